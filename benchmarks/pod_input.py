"""Measures the input of one host of a TPU pod: rows per second for the phases of `bert_large:lamb_v5e`.

    python benchmarks/pod_input.py --data128 DATASET --data512 DATASET [--work FOLDER]

Takes datasets of `bert-jax prepare --seq_len 128` and 512, and writes enlarged copies, with the same text repeated, to
FOLDER. A process makes the rows of one host, the first of the middle pair, with one thread: BATCHES batches after the
first SKIPPED ones. Their rate, per second of CPU time of all threads of the process, stands beside the rows per second
of the host's chips at their peak in model FLOPs, which no step reaches. A host of a TPU pod has more cores.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from record import Record, add_json_argument

from bert_jax.config import load_config
from bert_jax.data.dataset import (
    INFO_FILE,
    TOKEN_COUNTS_FILE,
    PreparedDataset,
    Shard,
    array_bytes,
    digest,
    file_digest,
    lengths_file,
    new_digest,
)
from bert_jax.data.loading.loader import Prefetch, TrainLoader, TrainRows
from bert_jax.model import BertConfig
from bert_jax.tracking.throughput import PEAK_FLOPS, training_flops
from bert_jax.training.phases import make_masking, plan_phases

CONFIG = "bert_large:lamb_v5e"
PREDICTIONS = {128: 20, 512: 76}
CHIPS_A_HOST = 4  # of Google's machines for v5e slices of several hosts
COUNTS = ("documents", "sentences", "tokens", "instances", "random_next")
INSTANCES, A_SHARD = 2_000_000, 16_384  # of an enlarged dataset
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


def enlarge(source: PreparedDataset, folder: Path, instances: int) -> None:
    """Writes a dataset of some `instances` training instances: copies of those of `source`, with new ids."""
    info, split = source.info, source.info.splits["train"]
    folder.mkdir(parents=True)
    for path in Path(str(source.folder)).glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    rng, records = np.random.default_rng(0), list[bytes]()
    for shard in split.shards:
        records += ArrayRecordReader(f"{source.folder}/{shard.file}").read_all()
    copies = -(-instances // len(records))
    numbers, shards = np.arange(copies * len(records)), []
    for first in range(0, len(numbers), A_SHARD):
        path = folder / f"train-{first // A_SHARD:05d}.array_record"
        chosen = numbers[first : first + A_SHARD] % len(records)
        writer = ArrayRecordWriter(str(path), "group_size:16")
        content = new_digest()
        for number, identity in zip(chosen.tolist(), rng.integers(0, 1 << 63, len(chosen)), strict=True):
            record = identity.tobytes() + records[number][8:]
            content.update(record)
            writer.write(record)
        writer.close()
        shards.append(Shard(path.name, len(chosen), content.hexdigest(), path.stat().st_size, file_digest(path)))
    arrays = {
        lengths_file("train"): np.tile(source.lengths("train"), copies), TOKEN_COUNTS_FILE: source.token_counts(),
        lengths_file("eval"): np.zeros(0, np.uint16),
    }  # fmt: skip
    for name, array in arrays.items():
        (folder / name).write_bytes(array_bytes(array))
    splits = {
        "train": replace(split, shards=tuple(shards), instances=len(numbers)),
        "eval": replace(split, **dict.fromkeys(COUNTS, 0), shards=()),
    }
    digests = {name: digest(array_bytes(array)) for name, array in arrays.items()}
    enlarged = replace(info, splits=splits, arrays=digests).with_hash()
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


def run_side(side: dict[str, Any]) -> dict[str, Any]:
    """Measures in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--data128=", "--data512=", "--side", json.dumps(side)],
        stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data128", required=True)
    parser.add_argument("--data512", required=True)
    parser.add_argument("--work", help="folder of the enlarged datasets; default: a temporary one")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    add_json_argument(parser, "pod_input")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(**json.loads(options.side))))
        return
    result = Record(options.json, MEASURES)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        enlarged = []
        for phase, source in enumerate((options.data128, options.data512)):
            enlarged.append(work / f"phase{phase}")
            if not (enlarged[-1] / "dataset.json").exists():
                print(f"enlarging {source} ...", file=sys.stderr, flush=True)
                enlarge(PreparedDataset(source), enlarged[-1], INSTANCES)
        rows = []
        for phase, packing, chips in itertools.product((0, 1), (False, True), (256, 1024)):
            row = run_side({"data": str(enlarged[phase]), "phase": phase, "chips": chips, "packing": packing})
            row["peak_rows"] = peak_rows(row["seq_len"])
            row["times"] = row["rows_per_second"] / row["peak_rows"]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            result.set_table("rates", COLUMNS, rows)
        result.set_values(
            least_times=min(row["times"] for row in rows), peak_mib=max(row["peak_mib"] for row in rows),
            chips_a_host=CHIPS_A_HOST, batches=BATCHES,
        )  # fmt: skip
    print(result.render("rates"))


if __name__ == "__main__":
    main()
