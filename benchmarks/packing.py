"""Measures the effect of packing at 512 tokens: on padding, and on sequences per second in training.

    python benchmarks/packing.py --input 'wiki/*.jsonl.gz' --vocab vocab.txt [--rounds 6]

Prepares the text once, and trains a small BERT on its rows unpacked and packed, a few steps of each in turn, in one
process. The rates are medians over the rounds.
"""

import argparse
import statistics
import tempfile
import time
from glob import glob
from pathlib import Path

import jax
import numpy as np
from record import Record, add_json_argument

from bert_jax.config import load_config
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.parallel.mesh import make_mesh, put_batch
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain import plan_step

STEPS = 3  # per round
MEASURES = ("bert_jax/data", "bert_jax/model", "bert_jax/parallel", "bert_jax/training")
COLUMNS = {
    "rows": "{rows}",
    "real tokens": "{real_share:.2%}",
    "rows per epoch": "{rows_per_epoch:,}",
    "sequences per row": "{sequences_per_row:.2f}",
    "sequences per second": "{sequences_per_second:.2f}",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--config", default="bert:L4_H256")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    add_json_argument(parser, "packing")
    options = parser.parse_args()
    record = Record(options.json, MEASURES)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = convert_vocabulary(options.vocab)
        data = str(Path(temporary) / "data")
        prepare(sorted(glob(options.input)), tokenizer, data, PrepareOptions(seq_len=512), workers=2)
        lengths = PreparedDataset(data).lengths("train")
        print(
            f"{len(lengths):,} sequences of {lengths.mean():.0f} tokens on average, half of them of "
            f"{np.median(lengths):.0f} or fewer"
        )
        sides = {packing: Side(options, data, packing) for packing in (False, True)}
        rates: dict[bool, list[float]] = {packing: [] for packing in sides}
        for _ in range(options.rounds):
            for packing, side in sides.items():
                rates[packing].append(side.round())
    rows = [
        {
            "rows": "packed" if packing else "unpacked", "real_share": side.loader.real_share,
            "rows_per_epoch": side.loader.sources[0].size, "sequences_per_row": side.loader.sequences_a_row,
            "sequences_per_second": statistics.median(rates[packing]),
        }
        for packing, side in sides.items()
    ]  # fmt: skip
    ratio = statistics.median(one / other for one, other in zip(rates[True], rates[False], strict=True))
    record.set_table("packing", COLUMNS, rows)
    record.set_values(
        packed_times_unpacked=ratio, config=options.config, device=jax.devices()[0].device_kind, rounds=options.rounds
    )
    print(record.render("packing"))
    print(
        f"\npacked: {ratio:.2f} times as many sequences per second ({options.config}, {jax.devices()[0].device_kind})"
    )


class Side:
    """Trains on packed or on unpacked rows."""

    def __init__(self, options: argparse.Namespace, data: str, packing: bool):
        overrides = {
            "data.path": data, "data.packing": packing, "total_steps": 10_000,
            "global_batch_size": options.batch_size, "optimizer.warmup_steps": 1,
        }  # fmt: skip
        config = load_config(options.config, [(key, str(value)) for key, value in overrides.items()])
        self.mesh = make_mesh(config.mesh)
        (phase,) = open_phases(config, self.mesh)
        self.loader = phase.train_loader
        spec, self.train_step = plan_step(self.mesh, phase, phase.model)
        self.state, self.step = spec.make(), 0
        self.batch_size = options.batch_size
        self.round()

    def round(self) -> float:
        """Trains `STEPS` steps, and returns the sequences per second."""
        batches = [put_batch(self.mesh, self.loader.batch(self.step + i)) for i in range(STEPS)]
        start = time.perf_counter()
        for batch in batches:
            self.state, metrics = self.train_step(self.state, batch)
        jax.block_until_ready(metrics)
        self.step += STEPS
        return STEPS * self.batch_size * self.loader.sequences_a_row / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
