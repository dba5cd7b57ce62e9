"""Measures by how much the digests of a checkpoint lengthen its save and its load.

    python benchmarks/checkpoint_digests.py --config=bert_large --folder=/tmp/digests

Each round saves and restores the state of a run, with digests and without them, in alternating order, by the functions
that a run calls. A save ends when it is on disk, a load when all arrays are read and verified: once from the disk, as
after a restart of the machine, and once from the page cache. Prints the medians of the seconds and of the seconds of
CPU time in this process; the cost is the median of the differences within a round. The state is random numbers, which
hardly compress. Programs are compiled before the clock starts. Any config of pre-training is accepted; `--share 0.25`
keeps a quarter of its layers.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from etils import epath
from record import Record, add_json_argument

from bert_jax.config import ConfigDict, load_config
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import make_mesh
from bert_jax.text.wordpiece import WordPieceTokenizer
from bert_jax.training.checkpointing import checkpointer
from bert_jax.training.checkpointing.checkpoint_digests import array_digests
from bert_jax.training.checks import bert_config
from bert_jax.training.pretrain import plan_state
from bert_jax.training.state import StateSpec, TrainState

COLUMNS = {
    "work": "{work}",
    "seconds without digests": "{seconds:.2f}",
    "seconds of digests": "{extra_seconds:.2f}",
    "cost": "{share:.1%}",
    "CPU seconds without digests": "{cpu_seconds:.2f}",
    "CPU seconds of digests": "{extra_cpu_seconds:.2f}",
    "cost, CPU time": "{cpu_share:.1%}",
}
NO_DIGESTS = {"algorithm": "none", "arrays": {}, "items": {}}
"""Digests that a load does not know, and does not compare."""
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]


def make_state(config: ConfigDict, share: float) -> tuple[BertConfig, StateSpec, TrainState]:
    """Returns sizes, plan and state of a run; parameters and both moments are random numbers."""
    with config.unlocked():
        config.model.num_hidden_layers = max(1, round(config.model.num_hidden_layers * share))
    model = bert_config(config, vocab_size=30_522, seq_len=128, source="")
    spec = plan_state(make_mesh(config.mesh), config, model)[1]
    leaves, structure = jax.tree.flatten(spec.abstract)
    made = [_random_array(number, leaf) for number, leaf in enumerate(leaves)]
    return model, spec, jax.block_until_ready(jax.tree.unflatten(structure, made))


def _random_array(seed: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array with the sharding of `like`; a counter is 1."""
    values = np.random.default_rng(seed).standard_normal(like.shape, np.float32) if like.ndim else np.int32(1)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.asarray(values)[index])


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of `work`, and its seconds of CPU time in this process."""
    began, began_cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - began_cpu


def forget_files(folder: epath.Path) -> None:
    """Drops the files of a folder, which are on disk, from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bert_large")
    parser.add_argument("--folder", required=True, help="folder for checkpoints; each is deleted")
    parser.add_argument("--share", type=float, default=1.0, help="share of the model's layers")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_argument(parser, "checkpoint_digests")
    options = parser.parse_args()
    record = Record(options.json, ("bert_jax/training/checkpointing",))
    config = load_config(options.config, [])
    model, spec, state = make_state(config, options.share)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"{size / 1e9:.2f} GB on {jax.device_count()} x {jax.devices()[0].device_kind}")
    array_digests((state.parameters, state.optimizer_state))
    folder = epath.Path(options.folder).absolute() / "digests"
    tokenizer = WordPieceTokenizer(VOCABULARY, lowercase=True)

    def save_and_load() -> dict[str, tuple[float, float]]:
        shutil.rmtree(folder, ignore_errors=True)
        saver = checkpointer.Checkpointer(folder, keep=1, config=config, tokenizer=tokenizer)

        def save() -> None:
            saver.save(1, state, bert_config=model, dataset_hashes=())
            saver.wait()
            os.sync()

        def load() -> None:
            jax.block_until_ready(saver.restore(1, spec.abstract))

        try:
            found = {"save": measured(save)}
            forget_files(folder)
            return found | {"load from disk": measured(load), "load from the page cache": measured(load)}
        finally:
            saver.close()

    rounds: dict[str, list[dict[str, tuple[float, float]]]] = {"with": [], "without": []}
    alone: list[tuple[float, float]] = []
    for number in range(options.rounds + 1):
        for kind in ("with", "without") if number % 2 else ("without", "with"):
            if kind == "with":
                found = save_and_load()
            else:
                with mock.patch.object(checkpointer, "start_description", return_value=lambda: NO_DIGESTS):
                    found = save_and_load()
            if number:  # the first round warms up
                rounds[kind].append(found)
                print(
                    number, kind, {work: f"{seconds:.2f} s, CPU {cpu:.2f} s" for work, (seconds, cpu) in found.items()}
                )
        if number:
            alone.append(measured(lambda: array_digests((state.parameters, state.optimizer_state))))
    shutil.rmtree(folder, ignore_errors=True)

    def row(work: str) -> dict[str, Any]:
        pairs = [
            (np.array(without[work]), np.array(digested[work]))
            for without, digested in zip(rounds["without"], rounds["with"], strict=True)
        ]
        seconds, cpu = np.median([without for without, _ in pairs], axis=0).tolist()
        extra, extra_cpu = np.median([digested - without for without, digested in pairs], axis=0).tolist()
        return {
            "work": work, "seconds": seconds, "extra_seconds": extra, "share": extra / seconds, "cpu_seconds": cpu,
            "extra_cpu_seconds": extra_cpu, "cpu_share": extra_cpu / cpu,
        }  # fmt: skip

    record.set_table("digests", COLUMNS, [row(work) for work in rounds["with"][0]])
    seconds, cpu_seconds = (statistics.median(values) for values in zip(*alone, strict=True))
    record.set_values(
        gigabytes=size / 1e9, devices=jax.device_count(), device=jax.devices()[0].device_kind, rounds=options.rounds,
        digest_seconds=seconds, digest_cpu_seconds=cpu_seconds,
    )  # fmt: skip
    print(record.render("digests"))
    print(f"digests alone: {seconds:.3f} s, CPU {cpu_seconds:.3f} s")


if __name__ == "__main__":
    main()
