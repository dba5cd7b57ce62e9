"""Measures the input of one host of a TPU pod: rows per second for the phases of `bert_large:lamb_v5e`.

    python benchmarks/pod_input.py --data128 DATASET --data512 DATASET [--work FOLDER]

Takes datasets of `bert-jax prepare --seq_len 128` and 512, and writes enlarged copies, with the same text repeated, to
FOLDER. A process makes the rows of one host, the first of the middle pair, with one thread, and reads ahead with
another: BATCHES batches after the first SKIPPED ones. Their rate stands beside the rows per second of the host's chips
at their peak in model FLOPs, which no step reaches.

The rate of one core is per second of CPU time, of all threads of the process. The rate of two threads is per second of
wall time, of another process: a host of a TPU pod has more cores than a machine with two, and takes up to four threads.
"""

import argparse
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
from etils import epath
from record import Record, add_json_argument

from bert_jax.config import load_config
from bert_jax.data.dataset import INFO_FILE, TOKEN_COUNTS_FILE, PreparedDataset, ShardWriter, lengths_file
from bert_jax.data.file_digests import file_digest
from bert_jax.data.loading.loader import TrainLoader, TrainRows
from bert_jax.data.loading.order import ORDERS
from bert_jax.data.loading.prefetch import Prefetch
from bert_jax.data.records import BLOCK, encode_block
from bert_jax.model import BertConfig
from bert_jax.tracking.flops import PEAK_FLOPS, training_flops
from bert_jax.training.phases import make_masking, plan_phases

CONFIG = "bert_large:lamb_v5e"
PREDICTIONS = {128: 20, 512: 76}
CHIPS_A_HOST = 4  # of Google's machines for v5e slices of several hosts
COUNTS = ("documents", "sentences", "tokens", "instances", "random_next")
INSTANCES, SHARD_BLOCKS = 2_000_000, 32  # of an enlarged dataset
BATCHES, SKIPPED = 32, 8
MEASURES = ("bert_jax/data", "configs/bert_large.py")
MIB = 1 << 20
COLUMNS = {
    "tokens": "{seq_len}",
    "rows": "{rows}",
    "order": "{row_order}",
    "chips": "{chips:,}",
    "hosts": "{hosts}",
    "rows of a step: all, of a host": "{batch_size:,}, {host_rows:,}",
    "rows/s on one core": "{rows_per_second:,.0f}",
    "rows/s of its chips at their peak": "{peak_rows:,.0f}",
    "times the peak": "{times:.1f}",
    "rows/s of two threads": "{two_threads_per_second:,.0f}",
    "times": "{two_threads_times:.1f}",
    "peak memory, MiB": "{peak_mib:,.0f}",
    "first batch, CPU s": "{first_seconds:.1f}",
    "read, MiB a step": "{read_mib:.1f}",
}
PACKING_COLUMNS = {
    "order": "{row_order}",
    "blocks packed together": "{blocks}",
    "real tokens": "{real_share:.2%}",
    "rows per epoch": "{size:,}",
}


def enlarge(source: PreparedDataset, folder: Path, instances: int) -> None:
    """Writes a dataset of some `instances` training instances: copies of the full blocks of `source`, with new ids."""
    info, split = source.info, source.info.splits["train"]
    sizes = source.block_sizes("train")
    full = np.nonzero(sizes == BLOCK)[0]
    lengths = np.split(source.lengths("train"), np.cumsum(sizes)[:-1])
    blocks = np.tile(full, -(-instances // (BLOCK * len(full))))
    folder.mkdir(parents=True)
    for path in Path(str(source.folder)).glob("vocab*"):
        (folder / path.name).write_bytes(path.read_bytes())
    rng, shards = np.random.default_rng(0), []
    for number, its_blocks in enumerate(np.split(blocks, range(SHARD_BLOCKS, len(blocks), SHARD_BLOCKS))):
        writer = ShardWriter(epath.Path(folder / f"train-{number:05d}.array_record"))
        for block in its_blocks.tolist():
            read = source.read_blocks("train", np.array([block]))
            headers = read.headers.copy()
            headers["id"] = rng.integers(0, 1 << 63, len(headers))
            writer.write(encode_block(headers, [np.ascontiguousarray(read.tokens).data.cast("B")]))
        shards.append(writer.close(BLOCK * len(its_blocks)))
    np.save(folder / lengths_file("train"), np.concatenate([lengths[block] for block in blocks.tolist()]))
    np.save(folder / TOKEN_COUNTS_FILE, source.token_counts())
    np.save(folder / lengths_file("eval"), np.zeros(0, np.uint16))
    splits = {
        "train": replace(split, shards=tuple(shards), instances=BLOCK * len(blocks)),
        "eval": replace(split, **dict.fromkeys(COUNTS, 0), shards=()),
    }
    names = [*map(lengths_file, splits), TOKEN_COUNTS_FILE, *(shard.file for shard in shards)]
    digests = {name: file_digest(folder / name) for name in names}
    enlarged = replace(info, splits=splits, files=digests).with_hash()
    (folder / INFO_FILE).write_text(enlarged.to_json(), encoding="utf-8")


def rows_of_host(batch_size: int, microbatches: int, index: int, hosts: int) -> np.ndarray:
    """Returns the rows of a host on a data-parallel mesh, as `rows_here` of a process does: int64, ascending."""
    columns = batch_size // microbatches // hosts
    first = np.arange(microbatches)[:, None] * (batch_size // microbatches) + index * columns
    return (first + np.arange(columns)).reshape(-1)


def measure(data: str, phase: int, chips: int, packing: bool, row_order: int, threads: int) -> dict[str, Any]:
    """Makes batches of one host, and returns what was measured."""
    config = plan_phases(load_config(CONFIG))[phase].config
    hosts, batch_size = chips // CHIPS_A_HOST, config.global_batch_size
    microbatches = max(1, batch_size // (chips * config.max_rows_per_device))
    chosen = rows_of_host(batch_size, microbatches, hosts // 2, hosts)
    began = time.process_time()
    dataset = PreparedDataset(data)
    rows = TrainRows(
        dataset, seed=0, masking=make_masking(config), row_order=row_order,
        max_sequences=config.data.max_sequences if packing else 1,
    )  # fmt: skip
    loader = TrainLoader([rows], seed=0, global_batch_size=batch_size)
    batches = Prefetch(lambda step: loader.batch(step, chosen), 0, SKIPPED + BATCHES + 8, threads=threads)
    next(batches)
    first_seconds = time.process_time() - began
    for _ in range(SKIPPED - 1):
        next(batches)
    began, read, wall = time.process_time(), _read_bytes(), time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    read = _read_bytes() - read
    batches.close()
    return {
        "seq_len": dataset.info.seq_len, "rows": "packed" if packing else "unpacked", "row_order": row_order,
        "chips": chips, "hosts": hosts, "batch_size": batch_size, "host_rows": len(chosen),
        "instances": dataset.size("train"), "rows_per_second": BATCHES * len(chosen) / seconds,
        "rows_per_wall_second": BATCHES * len(chosen) / wall, "first_seconds": first_seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "read_mib": read / BATCHES / MIB,
    }  # fmt: skip


def _read_bytes() -> int:
    """Returns the bytes that this process has read from files, cached by the kernel or not."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(next(line.partition(":")[2] for line in lines if line.startswith("rchar")))


def peak_rows(seq_len: int) -> float:
    """Returns the rows per second of BERT-LARGE on the chips of a host at their peak."""
    model = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return CHIPS_A_HOST * PEAK_FLOPS["TPU v5e"] / training_flops(model, seq_len, PREDICTIONS[seq_len])


def packing_rows(data: str) -> list[dict[str, Any]]:
    """Returns the rows of the table of real tokens, by order."""
    dataset = PreparedDataset(data)
    found = []
    for version, rules in ORDERS.items():
        rows = TrainRows(dataset, seed=0, masking=None, max_sequences=8, row_order=version)
        found.append(
            {"row_order": version, "blocks": rules.packed_blocks, "real_share": rows.real_share, "size": rows.size}
        )
    return found


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
        result.set_table("packing", PACKING_COLUMNS, packing_rows(str(enlarged[1])))
        sides = [(phase, chips, packing, 2) for phase in (0, 1) for packing in (False, True) for chips in (256, 1024)]
        sides += [(phase, 1024, packing, 1) for phase in (0, 1) for packing in (False, True)]
        rows = []
        for phase, chips, packing, order in sides:
            side = {
                "data": str(enlarged[phase]), "phase": phase, "chips": chips, "packing": packing, "row_order": order,
            }  # fmt: skip
            row = run_side({**side, "threads": 1})
            row["two_threads_per_second"] = run_side({**side, "threads": 2})["rows_per_wall_second"]
            row["peak_rows"] = peak_rows(row["seq_len"])
            row["times"] = row["rows_per_second"] / row["peak_rows"]
            row["two_threads_times"] = row["two_threads_per_second"] / row["peak_rows"]
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            result.set_table("rates", COLUMNS, rows)
        newest = [row for row in rows if row["row_order"] == 2]
        result.set_values(
            least_times=min(row["times"] for row in newest),
            least_two_threads_times=min(row["two_threads_times"] for row in newest),
            peak_mib=max(row["peak_mib"] for row in newest), chips_a_host=CHIPS_A_HOST, batches=BATCHES,
        )  # fmt: skip
    print(result.render("rates"))
    print(result.render("packing"))


if __name__ == "__main__":
    main()
