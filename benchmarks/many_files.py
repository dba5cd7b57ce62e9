"""Datasets of thousands of shards, workdirs of thousands of checkpoints, and many readers: what each costs.

    python benchmarks/many_files.py [--shards 5000] [--milestones 2000] [--readers 64] [--folder runs/many_files]

Each row has the same measured beside it with a few: the same text in a few shards, the same model with 30 checkpoints,
one reader. Every measurement is a process of its own. The readers start at once, with nothing verified yet, and all
must read the same batches. Ends with status 1 if anything read differs.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from record import Record, add_json_argument

MEASURES = ("bert_jax",)
COLUMNS = {
    "measured": "{measured}",
    "with few": "{few_seconds:.2f} s, {few_mib:,.0f} MiB",
    "with many": "{many_seconds:.2f} s, {many_mib:,.0f} MiB",
    "open files, most": "{handles}",
}
BATCH, LENGTH = 64, 32
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
READ_BATCHES = 200
FEW = 30  # milestones


def main() -> int:
    options = _parser().parse_args()
    folder = options.folder.absolute()
    if options.read:
        print(json.dumps(read(Path(options.read), options.batches)))
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["BERT_JAX_CACHE"] = f"{folder}/cache"
    record, rows = Record(options.json, MEASURES), []

    def add(measured: str, few: dict[str, Any], many: dict[str, Any]) -> None:
        found = {
            f"{name}_{key}": side[key] for name, side in (("few", few), ("many", many)) for key in ("seconds", "mib")
        }
        rows.append({"measured": measured, "handles": many.get("handles"), **found})
        record.set_table("costs", COLUMNS, rows)
        print(record.render("costs").splitlines()[-1], flush=True)

    few, many = folder / "few", folder / "many"
    shards = {path: make_dataset(folder, path, count) for path, count in ((many, options.shards), (few, 1))}
    record.set_values(few_shards=shards[few]["shards"], many_shards=shards[many]["shards"],
                      instances=shards[many]["instances"])  # fmt: skip
    add("`prepare`", shards[few], shards[many])
    for heading, batches in (("open a dataset, and read its first batch", 1), ("open it again", 1),
                             ("read an epoch in random order", -1)):  # fmt: skip
        add(heading, *(run_reader(path, batches) for path in (few, many)))
    digests = {run_reader(path, -1)["ids"] for path in (few, many)}
    is_same = len(digests) == 1

    one, several = (run_readers(folder, many, count) for count in (1, options.readers))
    add(f"{options.readers} readers at once, {READ_BATCHES} batches each", one, several)
    is_same &= len(one["digests"] | several["digests"]) == 1

    workdirs = {count: train(folder, few, count) for count in (FEW, options.milestones)}
    for heading in workdirs[FEW]:
        add(heading, *(workdirs[count][heading] for count in (FEW, options.milestones)))
    record.set_values(milestones=options.milestones, readers=options.readers, is_same=is_same)
    return int(not is_same)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=5000)
    parser.add_argument("--milestones", type=int, default=2000)
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("runs/many_files"))
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, help=argparse.SUPPRESS)
    add_json_argument(parser, "many_files")
    return parser


def call(folder: Path, *words: str) -> dict[str, Any]:
    """Runs a command of bert-jax, and returns its seconds and its peak memory."""
    began = time.monotonic()
    with (folder / "commands.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "bert_jax.cli", *words], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{words[0]} ended with status {os.waitstatus_to_exitcode(status)}; see {log.name}")
    return {"seconds": time.monotonic() - began, "mib": usage.ru_maxrss / 1024}


def make_dataset(folder: Path, path: Path, least: int) -> dict[str, Any]:
    """Prepares made-up text as at least so many shards for training."""
    vocab, text, tokens = folder / "tokenizer.json", folder / "text.txt", 1 << 24
    if not vocab.exists():
        write_text(text, least)
        call(folder, "vocab", f"--input={text}", f"--output={vocab}", "--size=2048")
    while True:
        shutil.rmtree(path, ignore_errors=True)
        found = call(folder, "prepare", f"--input={text}", f"--vocab={vocab}", f"--output={path}",
                     f"--seq_len={LENGTH}", f"--bucket_tokens={tokens}")  # fmt: skip
        split = json.loads((path / "dataset.json").read_text(encoding="utf-8"))["splits"]["train"]
        if (shards := len(split["shards"])) >= least:
            return found | {"shards": shards, "instances": split["instances"]}
        tokens = min(int(0.95 * tokens * shards / least), int(1.02 * split["tokens"] / least))


def write_text(path: Path, documents: int) -> None:
    """Writes documents of some 1,500 tokens each, a shard's least."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 8))) for _ in range(1500)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            for _ in range(60):
                file.write(" ".join(rng.choices(words, k=rng.randint(8, 24))).capitalize() + ".\n")
            file.write("\n")


def run_reader(path: Path, batches: int) -> dict[str, Any]:
    return json.loads(_start_reader(path, batches).communicate()[0].splitlines()[-1])


def _start_reader(path: Path, batches: int, **environment: str) -> subprocess.Popen:
    command = [sys.executable, __file__, f"--read={path}", f"--batches={batches}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def read(path: Path, batches: int) -> dict[str, Any]:
    """Reads batches, all of an epoch for -1; returns seconds, memory, open files and digests of what was read."""
    import numpy as np

    from bert_jax.data.dataset import PreparedDataset
    from bert_jax.data.loading.loader import TrainLoader, TrainRows
    from bert_jax.data.loading.masking import Masking

    began, handles, digest = time.monotonic(), 0, hashlib.sha256()
    dataset = PreparedDataset(str(path))
    loader = TrainLoader([TrainRows(dataset, seed=0, masking=Masking(5))], seed=0, global_batch_size=BATCH)
    for step in range(-(-dataset.size("train") // BATCH) if batches < 0 else batches):
        for name, array in sorted(loader.batch(step).items()):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        if step % 20 == 0:
            handles = max(handles, len(os.listdir("/proc/self/fd")))
    seconds, ids = time.monotonic() - began, ""
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if batches < 0:
        every = dataset.instances("train", np.arange(dataset.size("train")))["instance_ids"]
        ids = hashlib.sha256(np.sort(every).tobytes()).hexdigest()
    return {"seconds": seconds, "mib": mib, "handles": handles, "digest": digest.hexdigest(), "ids": ids}


def run_readers(folder: Path, path: Path, count: int) -> dict[str, Any]:
    """Starts readers at once, none of which finds a file verified, and waits for all."""
    began = time.monotonic()
    started = [_start_reader(path, READ_BATCHES, BERT_JAX_CACHE=f"{folder}/cache{count}") for _ in range(count)]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    return {
        "seconds": time.monotonic() - began, "mib": max(one["mib"] for one in found),
        "handles": max(one["handles"] for one in found), "digests": {one["digest"] for one in found},
    }  # fmt: skip


def train(folder: Path, dataset: Path, count: int) -> dict[str, dict[str, Any]]:
    """Trains so many steps, each a milestone, and returns what commands on the workdir cost."""
    workdir = folder / f"run{count}"
    words = [
        "pretrain", "--config=bert_tiny", f"--workdir={workdir}", f"--config.data.path={dataset}",
        f"--config.total_steps={count}", "--config.checkpoint.milestone_every_steps=1",
        f"--config.log_every_steps={max(1, count // 20)}", f"--config.global_batch_size={BATCH}",
        "--config.eval_batches=1", f"--config.eval_every_steps={count}",
        *(f"--config.model.{key}={value}" for key, value in MODEL.items()),
    ]  # fmt: skip
    whole = call(folder, *words)
    times = [(workdir / "checkpoints" / str(step)).stat().st_mtime for step in range(1, count + 1)]
    spans = sorted([after - before for before, after in itertools.pairwise(times)][-20:])
    shutil.rmtree(workdir / "checkpoints" / str(count))
    evaluate = ["evaluate", f"--checkpoint={workdir}", f"--data={dataset}"]
    return {
        "a step with its save, the last 20": {"seconds": spans[len(spans) // 2], "mib": whole["mib"]},
        "resume, for the last step": call(folder, *words),
        "`evaluate`": call(folder, *evaluate),
        "`evaluate --steps 1`": call(folder, *evaluate, "--steps=1"),
        "`report`": call(folder, "report", str(workdir), f"--output={folder}/report{count}.html"),
    }


if __name__ == "__main__":
    sys.exit(main())
