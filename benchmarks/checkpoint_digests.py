"""Measures the cost of a checkpoint's digests, relative to its save and its load.

    python benchmarks/checkpoint_digests.py --config=bert_large --folder=/tmp/digests

Prints, per round and as medians, the seconds and the seconds of CPU time of a save without digests, of a load without
digests, and of the digests that each of the two computes. "read" sums every array, which is a lower bound for a digest
of all bits. The state is random numbers, which hardly compress. Programs are compiled before the clock starts. Any
config of pre-training is accepted; `--share 0.25` keeps a quarter of its layers.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from record import Record, add_json_argument

from bert_jax.config import load_config
from bert_jax.parallel.mesh import make_mesh
from bert_jax.training.checkpointing.checkpoint_digests import array_digests
from bert_jax.training.checks import bert_config
from bert_jax.training.pretrain import plan_state

COLUMNS = {
    "work": "{work}",
    "seconds": "{seconds:.2f}",
    "CPU seconds": "{cpu_seconds:.2f}",
    "digests / work, time": "{digests_share:.1%}",
    "digests / work, CPU time": "{digests_cpu_share:.1%}",
}


def make_state(config_name: str, share: float) -> dict[str, Any]:
    """Returns parameters and both moments, random, laid out as a run's."""
    config = load_config(config_name, [])
    with config.unlocked():
        config.model.num_hidden_layers = max(1, round(config.model.num_hidden_layers * share))
    model = bert_config(config, vocab_size=30_522, seq_len=128, source="")
    spec = plan_state(make_mesh(config.mesh), config, model)[1]
    leaves, structure = jax.tree.flatten(
        {"parameters": spec.abstract.parameters, "optimizer": spec.abstract.optimizer_state}
    )
    made = [
        jax.device_put(jax.random.normal(jax.random.key(number), leaf.shape).astype(leaf.dtype), leaf.sharding)
        for number, leaf in enumerate(leaves)
    ]
    return jax.block_until_ready(jax.tree.unflatten(structure, made))


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of `work`, and its seconds of CPU time in this process."""
    began, began_cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - began_cpu


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
    state = make_state(options.config, options.share)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"{size / 1e9:.2f} GB on {jax.device_count()} x {jax.devices()[0].device_kind}")
    array_digests(state)
    folder = Path(options.folder).absolute() / "checkpoint"
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)

    def save() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, state)

    def load() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            jax.block_until_ready(checkpointer.restore(folder, abstract))

    @jax.jit
    def read(array: jax.Array) -> jax.Array:
        return array.sum()

    def read_all() -> None:
        jax.block_until_ready([read(leaf) for leaf in jax.tree.leaves(state)])

    read_all()
    rounds: dict[str, list[tuple[float, float]]] = {"save": [], "load": [], "digests": [], "read": []}
    for _ in range(options.rounds):
        shutil.rmtree(folder, ignore_errors=True)
        works = {"save": save, "load": load, "digests": lambda: array_digests(state), "read": read_all}
        for name, work in works.items():
            rounds[name].append(measured(work))
    shutil.rmtree(folder, ignore_errors=True)
    medians = {
        name: [statistics.median(values) for values in zip(*found, strict=True)] for name, found in rounds.items()
    }
    digests = medians["digests"]
    rows = [
        {
            "work": name, "seconds": seconds, "cpu_seconds": cpu,
            "digests_share": digests[0] / seconds, "digests_cpu_share": digests[1] / cpu,
        }
        for name, (seconds, cpu) in medians.items()
    ]  # fmt: skip
    record.set_table("digests", COLUMNS, rows)
    record.set_values(gigabytes=size / 1e9, devices=jax.device_count(), device=jax.devices()[0].device_kind)
    print(record.render("digests"))


if __name__ == "__main__":
    main()
