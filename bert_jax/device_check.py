"""Check of a machine before its first run: trains a tiny model on all devices, and compares what must be equal.

`bert-jax check` calls `check_devices`, in every process of a slice. It needs no data and no network.
"""

import itertools
import logging
import math
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.config import PretrainConfig, load_config
from bert_jax.data.options import PrepareOptions
from bert_jax.data.preparation.pipeline import prepare
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import remote
from bert_jax.progress import quiet
from bert_jax.runtime.processes import any_process, is_first, joined
from bert_jax.runtime.workdir_lock import shared_name
from bert_jax.sections import with_values
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.throughput import NOT_REPRODUCIBLE
from bert_jax.training.pretrain import Training, pretrain
from bert_jax.training.run import describe_devices

log = logging.getLogger(__name__)

STEPS = 30


def check_devices(workdir: str | None = None) -> dict[str, str]:
    """Checks the devices of all processes, which have to call it alike; returns the values of each part in words.

    Args:
      workdir: folder in which runs and checkpoints are written, into a new folder that is removed; by default a
        temporary one. Several processes need one that all see.

    Raises:
      InputError: several processes have no workdir.
      BertJaxError: the loss does not fall, or what must be equal differs.
    """
    if joined() and not workdir:
        raise InputError("workdir: required with several processes; use a folder that all see, such as gs://...")
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bert-jax-check-") as temporary:
        folder = remote.absolute(workdir or temporary) / f"bert-jax-check-{shared_name()}"
        config = _tiny_config(_make_dataset(Path(temporary)))
        try:
            for part in (devices, train, resume, agree):
                with quiet():  # the tiny runs log as runs do
                    found[part.__name__] = part(config, folder)
                log.info("%s: %s", part.__name__, found[part.__name__])
        finally:
            if is_first():
                with suppress(OSError):  # it could not be made
                    folder.rmtree()
    return found


def _make_dataset(folder: Path) -> str:
    """Prepares 300 documents of a made-up language, the same in every process. Returns the dataset's folder."""
    rng, words = random.Random(0), ["".join(pair) for pair in itertools.product("bdfgklmnprst", "aeiou")]
    topics = [words[number // 8 % 5 * 12 :][:12] for number in range(2400)]  # of a line; a document has eight
    lines = [f"{' '.join(rng.choices(topic, k=8))} ." for topic in topics]
    (folder / "text.txt").write_text("\n\n".join("\n".join(lines[at : at + 8]) for at in range(0, 2400, 8)))
    tokenizer = wordpiece_tokenizer([*SPECIAL_TOKENS, ".", *words], True)
    options = PrepareOptions(seq_len=64, eval_fraction=0.1, sentences="lines")
    prepare([str(folder / "text.txt")], tokenizer, str(folder / "data"), options)
    return str(folder / "data")


def _tiny_config(dataset: str) -> PretrainConfig:
    """Returns the config of a tiny model with dropout.

    Its sizes are divisible by 8 devices along `tensor` and 128 along `fsdp`, its batch by all devices.
    """
    count = jax.device_count()
    values = {
        "data.path": dataset, "model.num_attention_heads": 8, "model.intermediate_size": 256,
        "model.max_position_embeddings": 64, "model.hidden_dropout_prob": 0.1,
        "model.attention_probs_dropout_prob": 0.1, "global_batch_size": count * math.ceil(16 / count),
        "total_steps": STEPS, "log_every_steps": 1, "eval_every_steps": 15, "eval_batches": 2,
        "checkpoint.every_steps": 10, "optimizer.warmup_steps": 3, "optimizer.learning_rate": 5e-3,
        "compilation_cache": str(Path(dataset).parent / "programs"),
    }  # fmt: skip
    return load_config("bert_tiny", values)


# --- Parts, each of which returns its values in words ---------------------------------------------------------------


def devices(config: PretrainConfig, folder: epath.Path) -> str:
    """Describes the devices."""
    return ", ".join(f"{name} {value}" for name, value in describe_devices().items())


def train(config: PretrainConfig, folder: epath.Path) -> str:
    """Trains with evaluations and checkpoints; the loss has to fall."""
    pretrain(config, str(folder / "run"))
    losses = [row["loss"] for row in _rows(folder) if "split" not in row]
    first, last = np.mean(losses[:3]), np.mean(losses[-3:])
    if not last < first:
        raise BertJaxError(f"loss of {len(losses)} steps: {first:.2f} -> {last:.2f}, expected a lower one")
    return f"loss {first:.2f} -> {last:.2f} in {len(losses)} steps"


def resume(config: PretrainConfig, folder: epath.Path) -> str:
    """Resumes the run without its last checkpoint; its metrics, the last evaluation's too, are equal to the bit."""
    expected = _rows(folder)
    if is_first():
        (folder / "run" / "checkpoints" / str(STEPS)).rmtree()
    any_process(False)  # waits for the deletion
    pretrain(config, str(folder / "run"))
    if changed := [rows for rows in itertools.zip_longest(expected, _rows(folder)) if rows[0] != rows[1]]:
        hint = "; set XLA_FLAGS=--xla_gpu_deterministic_ops=true" if jax.default_backend() == "gpu" else ""
        raise BertJaxError(f"resumed: expected and got {changed[0]}{hint}")
    return f"metrics of {STEPS} steps are equal to the bit"


def _rows(folder: epath.Path) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "run")
    return [{key: row[key] for key in row if key not in NOT_REPRODUCIBLE} for row in rows]


def agree(config: PretrainConfig, folder: epath.Path) -> str:
    """Compares the losses of the first steps, and of an evaluation, with those of a CPU and of other meshes."""
    reference, differences = _first_losses(config, {}), []
    sizes = {f"mesh.{axis}": math.gcd(jax.device_count(), most) for axis, most in (("fsdp", 128), ("tensor", 8))}
    others: dict[str, Mapping[str, int]] = {f"{key}={size}": {key: size} for key, size in sizes.items() if size > 1}
    if jax.device_count() % 4 == 0:
        others["mesh.fsdp=2 mesh.zero1=True"] = {"mesh.fsdp": 2, "mesh.zero1": True}
    if "cpu" in (os.environ.get("JAX_PLATFORMS") or "cpu"):
        others = {"cpu": {}, **others}
    for name, overrides in others.items():
        losses = _first_losses(config, overrides, jax.local_devices(backend="cpu")[:1] if name == "cpu" else None)
        difference, tolerance = np.max(np.abs(losses / reference - 1)), 1e-4 if name == "cpu" else 1e-5
        if not difference <= tolerance:
            raise BertJaxError(f"{name}: loss differs by {difference:.1e}, expected at most {tolerance:.0e}")
        differences.append(f"{name} {difference:.1e}")
    return f"relative differences of the loss: {', '.join(differences) or 'nothing to compare with'}"


def _first_losses(
    config: PretrainConfig, overrides: Mapping[str, Any], devices: Sequence[jax.Device] | None = None
) -> np.ndarray:
    """Returns the losses of the first steps in fp32, and the MLM loss of an evaluation."""
    # A high learning rate would amplify rounding errors.
    values = {"total_steps": 3, "optimizer.warmup_steps": 1, "optimizer.learning_rate": 1e-4, "dtype": "float32"}
    training, losses = Training(with_values(config, {**values, **overrides}), devices), []
    with jax.default_matmul_precision("highest"):
        state = training.initial_state()
        for _, batch in training.batches():
            state, metrics = training.step(state, batch)
            losses.append(jax.device_get(metrics["loss"]))
        return np.array([*losses, training.evaluate(state)["mlm_loss"]])
