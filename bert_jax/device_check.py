"""Check of a machine before its first run: trains a tiny model on all devices, and compares what must be equal.

`bert-jax check` calls `check_devices`, in every process of a slice. It needs no data and no network.
"""

import itertools
import logging
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.config import PretrainConfig, load_config
from bert_jax.data.options import PrepareOptions
from bert_jax.data.preparation.pipeline import prepare
from bert_jax.errors import BertJaxError, InputError, Interrupted, NotBegun
from bert_jax.files import remote
from bert_jax.files.provenance import software
from bert_jax.runtime.interpreter import StopSignal
from bert_jax.runtime.processes import any_process, is_first, joined
from bert_jax.runtime.workdir_lock import shared_name
from bert_jax.sections import with_values
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.wordpiece import wordpiece_tokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.throughput import NOT_REPRODUCIBLE
from bert_jax.tracking.trackers import Tracker
from bert_jax.training.checkpoints import complete_steps
from bert_jax.training.pretrain import Training, pretrain
from bert_jax.training.run import describe_devices

log = logging.getLogger(__name__)

STEPS, STOP_STEP = 30, 15


@dataclass(frozen=True)
class PartResult:
    """Result of one part. `message` has the values, or the reason why it failed."""

    name: str
    ok: bool
    seconds: float
    message: str


def check_devices(workdir: str | None = None) -> Iterator[PartResult]:
    """Checks the devices of all processes, which have to call it alike; yields the result of each part.

    A part that fails in any process has failed in all, and the next one follows.

    Args:
      workdir: folder in which runs and checkpoints are written, into a new folder that is removed; by default a
        temporary one. Several processes need one that all see.

    Raises:
      InputError: several processes have no workdir.
      Interrupted: a stop signal was received while a part trained.
    """
    if joined() and not workdir:
        raise InputError("workdir: required with several processes; use a folder that all see, such as gs://...")
    package = logging.getLogger("bert_jax")
    log.setLevel(package.level)
    package.setLevel(logging.ERROR)  # the tiny runs log as runs do
    with tempfile.TemporaryDirectory(prefix="bert-jax-check-") as temporary:
        folder = remote.absolute(workdir or temporary) / f"bert-jax-check-{shared_name()}"
        config = _tiny_config(_make_dataset(Path(temporary)))
        try:
            for part in (devices, train, resume, agree):
                yield _run_part(part, config, folder)
        finally:
            package.setLevel(log.level)
            if is_first():
                with suppress(OSError):  # it could not be made
                    folder.rmtree()


def _run_part(part: Callable[..., str], config: PretrainConfig, folder: epath.Path) -> PartResult:
    began, ok = time.perf_counter(), True
    try:
        message = part(config, folder)
    except Interrupted as error:
        raise NotBegun(f"{part.__name__}: stopped by a signal; a check keeps nothing, run it again") from error
    except Exception as error:  # of any library: it is the result
        ok, message = False, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    if any_process(not ok) and ok:
        ok, message = False, "failed in another process, whose log has the reason"
    log.info("%s: %s", part.__name__, message if ok else f"FAILED: {message}")
    return PartResult(part.__name__, ok, round(time.perf_counter() - began, 2), message)


def _make_dataset(folder: Path) -> str:
    """Prepares 300 documents of a made-up language, the same in every process. Returns the dataset's folder."""
    rng, words = random.Random(0), ["".join(pair) for pair in itertools.product("bdfgklmnprst", "aeiou")]
    with (folder / "text.txt").open("w") as file:
        for number in range(2400):
            topic = words[number // 8 % 5 * 12 :][:12]
            file.write("\n" * (number % 8 == 0) + " ".join(rng.choices(topic, k=rng.randint(4, 9))) + " .\n")
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
        "total_steps": STEPS, "log_every_steps": 1, "eval_every_steps": STOP_STEP, "eval_batches": 2,
        "checkpoint.every_steps": 10, "optimizer.warmup_steps": 3, "optimizer.learning_rate": 5e-3,
        "compilation_cache": str(Path(dataset).parent / "programs"),
    }  # fmt: skip
    return load_config("bert_tiny", values)


# --- Parts, each of which returns its values in words ---------------------------------------------------------------


def devices(config: PretrainConfig, folder: epath.Path) -> str:
    """Describes the devices and the versions of their software."""
    versions = {name: software()[name] for name in ("jax", "jaxlib", "libtpu") if name in software()}
    return ", ".join(f"{name} {value}" for name, value in {**describe_devices(), **versions}.items())


def train(config: PretrainConfig, folder: epath.Path) -> str:
    """Trains with evaluations and checkpoints; the loss has to fall."""
    pretrain(config, str(folder / "run"))
    losses = [row["loss"] for row in read_metrics(folder / "run") if "split" not in row]
    first, last = np.mean(losses[:3]), np.mean(losses[-3:])
    if not last < first:
        raise BertJaxError(f"loss of {len(losses)} steps: {first:.2f} -> {last:.2f}, expected a lower one")
    return f"loss {first:.2f} -> {last:.2f} in {len(losses)} steps"


def resume(config: PretrainConfig, folder: epath.Path) -> str:
    """Stops a run and resumes it; metrics, those of the last evaluation among them, equal `train`'s to the bit."""
    workdir, stop = folder / "resumed", StopSignal()

    class Stop(Tracker):
        def log(self, row: Mapping[str, Any]) -> None:
            stop.received = signal.SIGTERM if row["step"] == STOP_STEP else stop.received

    with suppress(Interrupted):
        pretrain(config, str(workdir), stop=stop, trackers=[Stop()])
    start = max((int(step.name) for step in complete_steps(workdir)), default=0)
    if not 0 < start < STEPS:
        raise BertJaxError(f"stopped after step {STOP_STEP}: got checkpoint {start}; expected one before {STEPS}")
    pretrain(config, str(workdir))
    rows = itertools.zip_longest(*map(_reproducible_rows, (folder / "run", workdir)), fillvalue={})
    for ours, theirs in rows:
        changed = {key: (ours.get(key), theirs.get(key)) for key in ours | theirs if ours.get(key) != theirs.get(key)}
        if changed:
            raise BertJaxError(f"resumed from step {start}: expected and got {changed}")
    return f"from step {start} of {STEPS}: metrics are equal to the bit"


def _reproducible_rows(workdir: epath.Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in NOT_REPRODUCIBLE} for row in read_metrics(workdir)]


def agree(config: PretrainConfig, folder: epath.Path) -> str:
    """Compares loss and gradient norm of the first steps with those of a CPU and of other meshes."""
    reference, differences = _first_steps(config, {}), []

    def compare(name: str, tolerance: float, expected: np.ndarray, metrics: np.ndarray) -> None:
        difference = np.max(np.abs(metrics - expected) / np.abs(expected))
        if not difference <= tolerance:
            raise BertJaxError(f"{name}: differs by {difference:.1e}, expected at most {tolerance:.0e}")
        differences.append(f"{name} {difference:.1e}")

    if "cpu" in (os.environ.get("JAX_PLATFORMS") or "cpu"):
        compare("cpu", 1e-4, reference, _first_steps(config, {}, jax.local_devices(backend="cpu")[:1]))
    for axis, most in {"fsdp": 128, "tensor": 8}.items():
        if (size := math.gcd(jax.device_count(), most)) > 1:
            name = f"mesh.{axis}={size}"
            compare(name, 1e-5, reference[:, 0], _first_steps(config, {f"mesh.{axis}": size})[:, 0])
    return f"relative differences: {', '.join(differences) or 'nothing to compare with'}"


def _first_steps(
    config: PretrainConfig, overrides: Mapping[str, Any], devices: Sequence[jax.Device] | None = None
) -> np.ndarray:
    """Returns loss and gradient norm of the first steps in fp32, [steps, 2]."""
    # A high learning rate would amplify rounding errors.
    values = {"total_steps": 3, "optimizer.warmup_steps": 1, "optimizer.learning_rate": 1e-4, "dtype": "float32"}
    training = Training(with_values(config, {**values, **overrides}), devices)
    rows = []
    with jax.default_matmul_precision("highest"):
        state = training.initial_state()
        for _, batch in training.batches():
            state, metrics = training.step(state, batch)
            rows.append(jax.device_get([metrics["loss"], metrics["grad_norm"]]))
    return np.array(rows)
