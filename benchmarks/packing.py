"""Measures the effect of packing at 512 tokens: on padding, and on sequences per second in training.

    python benchmarks/packing.py --input 'wiki/*.jsonl.gz' --vocab vocab.txt [--rounds 6]

Prepares the text once, and trains a small BERT on its rows unpacked and packed, a few steps of each in turn, in one
process. The rates are medians over the rounds.
"""

import statistics
import tempfile
import time
from glob import glob
from pathlib import Path

import jax
from record import Record, make_parser

from bert_jax.config import load_config
from bert_jax.data.options import PrepareOptions
from bert_jax.data.preparation.pipeline import prepare
from bert_jax.parallel.mesh import make_mesh, put_batch
from bert_jax.text.conversion import convert_vocabulary
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain import plan_step

CONFIG, BATCH = "bert:L4_H256", 8
STEPS = 3  # per round
MEASURES = ("bert_jax/data", "bert_jax/model", "bert_jax/parallel", "bert_jax/training")
COLUMNS = {
    "rows": "{rows}",
    "real tokens": "{real_share:.2%}",
    "rows per epoch": "{rows_per_epoch:,}",
    "sequences per row": "{sequences_per_row:.2f}",
    "sequences per second": "{sequences_per_second:.2f}",
}


class Side:
    """Trains on packed or on unpacked rows."""

    def __init__(self, data: str, packing: bool):
        keys = {"data.path": data, "data.packing": packing, "total_steps": 10_000, "global_batch_size": BATCH}
        config = load_config(CONFIG, keys | {"optimizer.warmup_steps": 1})
        self.name, self.mesh = "packed" if packing else "unpacked", make_mesh(config.mesh)
        (phase,) = open_phases(config, self.mesh)
        self.loader = phase.train_loader
        spec, self.train_step = plan_step(self.mesh, phase, phase.model)
        self.state, self.step = spec.make(), 0
        self.round()

    def round(self) -> float:
        """Trains `STEPS` steps, and returns the sequences per second."""
        batches = [put_batch(self.mesh, self.loader.batch(self.step + i)) for i in range(STEPS)]
        start = time.perf_counter()
        for batch in batches:
            self.state, metrics = self.train_step(self.state, batch)
        jax.block_until_ready(metrics)
        self.step += STEPS
        return STEPS * BATCH * self.loader.sequences_a_row / (time.perf_counter() - start)


def main() -> None:
    parser = make_parser(__doc__, "packing")
    parser.add_argument("--input", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    record = Record(options.json, MEASURES)
    with tempfile.TemporaryDirectory() as temporary:
        data = str(Path(temporary) / "data")
        tokenizer = convert_vocabulary(options.vocab)
        prepare(sorted(glob(options.input)), tokenizer, data, PrepareOptions(seq_len=512), workers=2)
        sides = [Side(data, packing) for packing in (False, True)]
        rates = [[side.round() for side in sides] for _ in range(options.rounds)]
    rows = [
        {
            "rows": side.name, "real_share": side.loader.real_share, "rows_per_epoch": side.loader.sources[0].size,
            "sequences_per_row": side.loader.sequences_a_row, "sequences_per_second": statistics.median(values),
        }
        for side, values in zip(sides, zip(*rates, strict=True), strict=True)
    ]  # fmt: skip
    record.set_table("packing", COLUMNS, rows)
    record.set_values(packed_times_unpacked=statistics.median(packed / unpacked for unpacked, packed in rates))
    print(record.render("packing"), record.content["values"], sep="\n\n")


if __name__ == "__main__":
    main()
