"""The study of the steps from BERT to ModernBERT: equal FLOPs, and a table that grows row by row."""

from dataclasses import replace
from pathlib import Path

import modernbert_ladder as ladder
import pytest
from matplotlib import pyplot

from bert_jax.model import BertConfig
from bert_jax.studies.study import PERPLEXITY


def test_all_rows_take_as_many_flops():
    config = ladder.get_config()
    sizes = {key: value for key, value in config.pretraining.model.items() if value is not None}
    first = BertConfig(**sizes | {"vocab_size": ladder.VOCAB_SIZE})
    totals = []
    for row in config.rows:
        keys = row.pretraining
        model = {key.removeprefix("model."): value for key, value in keys.items() if key.startswith("model.")}
        steps = [keys[f"phases.{number}.steps"] for number in range(2)]
        assert sum(steps) == keys["total_steps"]
        each = [
            sequences * ladder.flops(replace(first, **model), tokens, keys.get("objective.mask_rate", 0.15))
            for _, sequences, tokens in ladder.PHASES
        ]
        totals.append(sum(count * cost for count, cost in zip(steps, each, strict=True)))
    assert len(totals) == len({tuple(row.pretraining.items()) for row in config.rows}) == 11
    assert totals == [pytest.approx(totals[0], rel=1e-3)] * 11


def test_table_and_figure_have_the_rows_whose_seeds_all_have_run(tmp_path: Path):
    tasks = {task: [50.0, 52.0] for task in ladder.TASKS}
    runs = [
        {
            "name": name, "seed": seed,
            "columns": {PERPLEXITY: [100.0 - add + seed], **tasks, "MRPC": [80.0 + add, 82.0 + add]},
        }
        for name, add in (("BERT", 0), ("+ pre-norm", 5)) for seed in ladder.SEEDS
    ]  # fmt: skip
    (first, second) = rows = ladder.summarize(
        [*runs, {"name": "+ no biases", "seed": 0, "columns": runs[0]["columns"]}]
    )
    assert (first["name"], first[PERPLEXITY], first["MRPC"]) == ("BERT", "101.00 ± 1.00", "81.0 ± 0.0")
    assert second[PERPLEXITY] == "96.00 ± 1.00 (-5.00: -5.00 to -5.00)"
    assert second["MRPC"].startswith("86.0 ± 0.0 (+5.0: ")
    ladder.draw(rows, tmp_path / "ladder.png")
    image = pyplot.imread(tmp_path / "ladder.png")
    assert image.shape[1] > 1_000
    assert image[..., :3].min() < 0.5
