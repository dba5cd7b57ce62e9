"""Studies that run row by row: equal FLOPs, and a table that grows."""

import math
from pathlib import Path

import modernbert_ladder
import pytest
import recipe_trials
import study_rows
from matplotlib import pyplot

from bert_jax.config_keys import PretrainConfig
from bert_jax.sections import from_mapping, with_values
from bert_jax.studies.study import PERPLEXITY


@pytest.mark.parametrize(("study", "count"), [(modernbert_ladder, 11), (recipe_trials, 19)], ids=["ladder", "trials"])
def test_all_rows_take_as_many_flops(study, count: int):
    config = study.get_config("folder")
    first = from_mapping(PretrainConfig, config.pretraining.to_dict())
    totals = []
    for row in config.rows:
        made = with_values(first, row.pretraining)
        assert made.total_steps == sum(phase["steps"] for phase in made.phases)
        totals.append(0.0)
        for phase in made.phases:
            tokens = int(phase["data.path"].removeprefix("folder/data").removesuffix("-sop"))
            cost = study_rows.flops_per_token(
                with_values(made, {k: v for k, v in phase.items() if k != "steps"}), tokens
            )
            totals[-1] += phase["steps"] * phase["global_batch_size"] * tokens * cost
    assert len({row.name for row in config.rows}) == len({str(row.pretraining) for row in config.rows}) == count
    assert totals == [pytest.approx(totals[0], rel=2e-3)] * count  # steps are whole


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, [(64, "mlm"), (16, "mlm")]), (0.25, [(64, "ltr"), (64, "mlm"), (16, "mlm")]),
     (0.5, [(64, "ltr"), (16, "mlm")]), (0.75, [(64, "ltr"), (16, "ltr"), (16, "mlm")])],
)  # fmt: skip
def test_next_tokens_come_first_and_take_their_share_of_the_flops(share: float, expected: list[tuple[int, str]]):
    first = PretrainConfig()
    budget = 1000 * 64 * 32 * study_rows.flops_per_token(first, 32)
    steps = round(budget / (16 * 128 * study_rows.flops_per_token(first, 128)))
    made = study_rows.phases(first, first, "folder", ((1000, 64, 32), (steps, 16, 128)), clm=share)["phases"]
    assert [(phase["global_batch_size"], phase.get("objective.lm", "mlm")) for phase in made] == expected


def test_one_length_has_the_flops_of_both():
    rows = {row.name: row.pretraining["phases"] for row in recipe_trials.get_config().rows}
    (phase,) = rows["128 tokens only"]
    assert phase["global_batch_size"] == 16
    assert phase["steps"] > rows["the first"][-1]["steps"]


def test_table_and_figure_have_the_rows_whose_seeds_all_have_run(tmp_path: Path):
    names = ["BERT", "+ pre-norm", "+ rotary", "+ no biases"]
    runs = [
        {
            "name": name, "seed": seed,
            "columns": {PERPLEXITY: [math.exp(4 - add / 10 + seed / 8)], "MRPC": [80.0 + add, 82.0 + add]},
        }
        for name, add in zip(names, (0, 5, 8, 9), strict=True) for seed in study_rows.SEEDS
    ][:-1]  # fmt: skip
    first, second, third = rows = study_rows.summarize(names, runs, steps=False)
    assert (first["name"], first["MLM loss"], first["MRPC"]) == ("BERT", "4.125 ± 0.125", "81.0 ± 0.0")
    assert second["MLM loss"] == "3.625 ± 0.125 (-0.500: -0.500 to -0.500)"
    assert second["MRPC"].startswith("86.0 ± 0.0 (+5.0: ")
    assert third["MLM loss"] == "3.325 ± 0.125 (-0.800: -0.800 to -0.800)"
    steps = study_rows.summarize(names, runs, steps=True)
    assert steps[:2] == rows[:2]
    assert steps[2]["MLM loss"] == "3.325 ± 0.125 (-0.300: -0.300 to -0.300)"
    assert steps[2]["columns"] == third["columns"]
    study_rows.draw(rows, tmp_path / "ladder.png")
    image = pyplot.imread(tmp_path / "ladder.png")
    assert image.shape[1] > 1_000
    assert image[..., :3].min() < 0.5
