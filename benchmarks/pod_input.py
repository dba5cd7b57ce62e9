"""Measures the input of one host of a TPU pod: rows per second for the phases of `bert_large:lamb_v5e`.

    python benchmarks/pod_input.py --data128 DATASET --data512 DATASET [--work FOLDER]

Takes datasets of `bert-jax prepare --seq_len 128` and 512, and writes enlarged copies, with the same text repeated, to
FOLDER. A process makes the rows of one host, the first of the middle pair, with one thread: BATCHES batches after the
first SKIPPED ones. Their rate, per second of CPU time of all threads of the process, stands beside the rows per second
of the host's chips at their peak in model FLOPs, which no step reaches. A host of a TPU pod has more cores.
"""

import itertools
import json
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from processes import call
from record import Record, make_parser

from bert_jax.config import load_config
from bert_jax.data.dataset import INFO_FILE, PreparedDataset, array_bytes, digest, lengths_file
from bert_jax.data.loading.loader import Prefetch, TrainLoader, TrainRows
from bert_jax.model import BertConfig
from bert_jax.tracking.throughput import PEAK_FLOPS, training_flops
from bert_jax.training.phases import make_masking, plan_phases

CONFIG = "bert_large:lamb_v5e"
PREDICTIONS = {128: 20, 512: 76}
CHIPS_A_HOST = 4  # of Google's machines for v5e slices of several hosts
INSTANCES = 2_000_000  # of an enlarged dataset
BATCHES, SKIPPED = 32, 8
MEASURES = ("bert_jax/data", "configs/bert_large.py")
COLUMNS = {
    "tokens": "{seq_len}",
    "rows": "{rows}",
    "chips": "{chips:,}",
    "hosts": "{hosts}",
    "rows of a step: all, of a host": "{batch_size:,}, {host_rows:,}",
    "rows/s on one core": "{rows_per_second:,.0f}",
    "rows/s of its chips at their peak": "{peak_rows:,.0f}",
    "times the peak": "{times:.1f}",
    "peak memory, MiB": "{peak_mib:,.0f}",
    "first batch, s": "{first_seconds:.1f}",
}


def enlarge(path: str, output: str) -> None:
    """Writes a dataset of at least `INSTANCES` training instances: the shards of another one, many times."""
    source, folder = PreparedDataset(path), Path(output)
    info, split = source.info, source.info.splits["train"]
    copies = -(-INSTANCES // split.instances)
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("*.array_record"))
    lengths = array_bytes(np.tile(source.lengths("train"), copies))
    (folder / lengths_file("train")).write_bytes(lengths)
    shards = []
    for number, shard in itertools.product(range(copies), split.shards):
        shards.append(replace(shard, file=f"train-{number:05d}-{shard.file}"))
        shutil.copy(f"{path}/{shard.file}", folder / shards[-1].file)
    splits = {
        "train": replace(split, shards=tuple(shards), instances=copies * split.instances),
        "eval": replace(info.splits["eval"], instances=0, shards=()),
    }
    arrays = info.arrays | {lengths_file("train"): digest(lengths)}
    enlarged = replace(info, splits=splits, arrays=arrays).with_hash()
    (folder / INFO_FILE).write_text(enlarged.to_json(), encoding="utf-8")


def rows_of_host(batch_size: int, microbatches: int, index: int, hosts: int) -> np.ndarray:
    """Returns the rows of a host on a data-parallel mesh, as `rows_here` of a process does: int64, ascending."""
    columns = batch_size // microbatches // hosts
    first = np.arange(microbatches)[:, None] * (batch_size // microbatches) + index * columns
    return (first + np.arange(columns)).reshape(-1)


def measure(data: str, phase: int, chips: int, packing: bool) -> dict[str, Any]:
    """Makes batches of one host, and returns what was measured."""
    config = plan_phases(load_config(CONFIG))[phase].config
    hosts, batch_size = chips // CHIPS_A_HOST, config.global_batch_size
    microbatches = max(1, batch_size // (chips * config.max_rows_per_device))
    chosen = rows_of_host(batch_size, microbatches, hosts // 2, hosts)
    began = time.perf_counter()
    dataset = PreparedDataset(data)
    rows = TrainRows(
        dataset, seed=0, masking=make_masking(config), max_sequences=config.data.max_sequences if packing else 1
    )
    loader = TrainLoader([rows], seed=0, global_batch_size=batch_size)
    batches = Prefetch(lambda step: loader.batch(step, chosen), 0, SKIPPED + BATCHES + 8)
    next(batches)
    first_seconds = time.perf_counter() - began
    for _ in range(SKIPPED - 1):
        next(batches)
    began = time.process_time()
    for _ in range(BATCHES):
        next(batches)
    seconds = time.process_time() - began
    batches.close()
    return {
        "seq_len": dataset.info.seq_len, "rows": "packed" if packing else "unpacked", "chips": chips, "hosts": hosts,
        "batch_size": batch_size, "host_rows": len(chosen), "instances": dataset.size("train"),
        "rows_per_second": BATCHES * len(chosen) / seconds, "first_seconds": first_seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def peak_rows(seq_len: int) -> float:
    """Returns the rows per second of BERT-LARGE on the chips of a host at their peak."""
    model = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return CHIPS_A_HOST * PEAK_FLOPS["TPU v5e"] / training_flops(model, seq_len, PREDICTIONS[seq_len])


def main() -> None:
    parser = make_parser(__doc__, "pod_input")
    parser.add_argument("--data128", required=True)
    parser.add_argument("--data512", required=True)
    parser.add_argument("--work", help="folder of the enlarged datasets; default: a temporary one")
    options = parser.parse_args()
    result, rows = Record(options.json, MEASURES), []
    with tempfile.TemporaryDirectory() as temporary:
        enlarged = []
        for source in (options.data128, options.data512):
            enlarged.append(Path(options.work or temporary) / f"phase{len(enlarged)}")
            if not (enlarged[-1] / INFO_FILE).exists():
                call(enlarge, source, enlarged[-1])
        for phase, packing, chips in itertools.product((0, 1), (False, True), (256, 1024)):
            row = call(measure, enlarged[phase], phase, chips, packing, OMP_NUM_THREADS="1")
            row["peak_rows"] = peak_rows(row["seq_len"])
            row["times"] = row["rows_per_second"] / row["peak_rows"]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            result.set_table("rates", COLUMNS, rows)
    result.set_values(chips_a_host=CHIPS_A_HOST)
    print(result.render("rates"))


if __name__ == "__main__":
    main()
