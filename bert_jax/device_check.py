"""Check of a machine before its first run: trains a tiny model on all devices, and compares what must be equal.

`bert-jax check` calls `check_devices`, in every process of a slice. It needs no data and no network.
"""

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax._src import xla_bridge  # the state of the backends has no public name

from bert_jax.config import PretrainConfig, load_config
from bert_jax.custom_training import Training
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.pipeline import prepare
from bert_jax.errors import BertJaxError, InputError, Interrupted
from bert_jax.files import remote
from bert_jax.files.provenance import software
from bert_jax.inference.pretrained import load
from bert_jax.interop.huggingface import export
from bert_jax.runtime.preemption import StopSignal
from bert_jax.runtime.processes import any_process, is_first, joined
from bert_jax.runtime.workdir_lock import shared_name
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.wordpiece import WordPieceTokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.throughput import NOT_REPRODUCIBLE
from bert_jax.tracking.trackers import Tracker
from bert_jax.training.checkpoints import complete_steps, open_checkpoint
from bert_jax.training.pretrain import pretrain
from bert_jax.training.run import describe_devices

STEPS, STOP_STEP = 30, 15
TOLERANCE, MESH_TOLERANCE = 1e-4, 1e-5
"""Relative differences in fp32: between devices or kernels, and between meshes."""
KERNELS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "tpu": ("pallas", TOLERANCE, {}),
    # It has no dropout and no fp32.
    "gpu": ("cudnn", 2e-2, {"dtype": "bfloat16", "model__attention_probs_dropout_prob": 0.0}),
}
"""The attention kernel of each platform beside "xla", its tolerance, and the settings that it needs."""
PARTS = ("devices", "train", "resume", "export", "cpu", "mesh", "attention", "storage")
"""The parts of the check, methods of `_Check`, in their order."""
OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True)
class PartResult:
    """Result of one part. `status` is OK, FAILED or SKIPPED; `message` has the values, or the reason."""

    name: str
    status: str
    seconds: float
    message: str
    values: dict[str, Any] = field(default_factory=dict)


class SkippedError(BertJaxError):
    """A part that these devices cannot run."""


def check_devices(
    workdir: str | None = None, only: Sequence[str] = (), show: Callable[[PartResult], None] = lambda result: None
) -> list[PartResult]:
    """Checks the devices of all processes, which have to call it alike, and returns the result of each part.

    A part that fails in any process has failed in all, and the next one follows. In a single process that has not used
    JAX yet, "resume" kills a child process before this one takes the accelerator.

    Args:
      workdir: folder in which runs and checkpoints are written, each into a new folder that is removed; by default a
        temporary one. Several processes need one that all see.
      only: names in `PARTS`; by default all.
      show: called with each result at once.

    Raises:
      InputError: a part is unknown, the workdir is empty, or several processes have none that they share.
      Interrupted: a stop signal was received while a part trained.
    """
    if unknown := [name for name in only if name not in PARTS]:
        raise InputError(f"--only={','.join(unknown)}: unknown part; expected some of {','.join(PARTS)}")
    if workdir == "":
        raise InputError("--workdir is empty; expected a folder, such as --workdir=runs, or no --workdir")
    with tempfile.TemporaryDirectory(prefix="bert-jax-check-") as temporary, _new_folder(workdir, temporary) as folder:
        check = _Check(Path(temporary), folder)
        check.make_dataset()
        chosen = [name for name in PARTS if not only or name in only]
        if "resume" in chosen and joined() is None and not xla_bridge.backends_are_initialized():
            check.train_in_killed_child()
        results = []
        for name in chosen:
            results.append(_run_part(name, check))
            show(results[-1])
        return results


@contextmanager
def _new_folder(workdir: str | None, temporary: str) -> Iterator[epath.Path]:
    """Yields a new folder in `workdir`, the same in all processes, and removes it. The parts that need it make it."""
    if joined() and not workdir:
        raise InputError("--workdir: required with several processes; use a folder that all see, such as gs://...")
    folder = (
        remote.absolute(workdir or temporary) / f"bert-jax-check-{shared_name() if joined() else uuid.uuid4().hex[:16]}"
    )
    try:
        yield folder
    finally:
        if is_first():
            with suppress(OSError):  # it could not be made
                folder.rmtree()


def _run_part(name: str, check: "_Check") -> PartResult:
    began, status, values = time.perf_counter(), FAILED, dict[str, Any]()
    try:
        values = getattr(check, name)()
        status, message = OK, ", ".join(f"{key} {_text(value)}" for key, value in values.items())
    except SkippedError as error:
        status, message = SKIPPED, str(error)
    except Interrupted:
        raise
    except Exception as error:  # of any library: it is the result
        kind = "" if isinstance(error, BertJaxError) else f"{type(error).__name__}: "
        message = f"{kind}{' '.join(str(error).split())[:500]}"
    if any_process(status == FAILED) and status != FAILED:
        status, message = FAILED, "failed in another process, whose log has the reason"
    return PartResult(name, status, round(time.perf_counter() - began, 2), message, values)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(entry)}" for key, entry in value.items()) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# --- The tiny runs -------------------------------------------------------------------------------------------------


class EndingTracker(Tracker):
    """Ends the run after a step, by a function."""

    def __init__(self, end: Callable[[], None]):
        self._end = end

    def log(self, row: Mapping[str, Any]) -> None:
        if row["step"] == STOP_STEP:
            self._end()


def tiny_config(dataset: str, **overrides: Any) -> PretrainConfig:
    """Returns the config of a tiny model with dropout; in `overrides`, double underscores stand for dots.

    Its sizes are divisible by 8 devices along `tensor` and 128 along `fsdp`, its batch by all devices.
    """
    count = jax.device_count()
    values = {
        "data__path": dataset, "model__hidden_size": 128, "model__num_attention_heads": 8,
        "model__intermediate_size": 256, "model__max_position_embeddings": 64, "model__hidden_dropout_prob": 0.1,
        "model__attention_probs_dropout_prob": 0.1, "global_batch_size": count * math.ceil(16 / count),
        "total_steps": STEPS, "log_every_steps": 1, "eval_every_steps": STOP_STEP, "eval_batches": 2,
        "checkpoint__every_steps": 10, "optimizer__warmup_steps": 3, "optimizer__learning_rate": 5e-3,
        "compilation_cache": str(Path(dataset).parent / "programs"), **overrides,
    }  # fmt: skip
    return load_config("bert_tiny", {name.replace("__", "."): value for name, value in values.items()})


class _Check:
    """Parts of the check, and what several of them use. `local` is this process's, `folder` that of all."""

    def __init__(self, local: Path, folder: epath.Path):
        self._local, self._folder = local, folder
        self._dataset = str(local / "data")
        self._killed: subprocess.CompletedProcess[str] | None = None

    def make_dataset(self) -> None:
        """Prepares a few hundred documents of a made-up language, the same in every process."""
        rng, text = random.Random(0), self._local / "text.txt"
        words = ["".join(pair) for pair in itertools.product("bdfgklmnprst", ("a", "e", "i", "o", "u", "ai", "ou"))]
        with text.open("w") as file:
            for number in range(2400):
                topic = words[number // 8 % 7 * 12 :][:12]
                file.write("\n" * (number % 8 == 0) + " ".join(rng.choices(topic, k=rng.randint(4, 9))) + " .\n")
        options = PrepareOptions(seq_len=64, eval_fraction=0.1, sentences="lines")
        prepare([str(text)], WordPieceTokenizer([*SPECIAL_TOKENS, ".", *words], True), self._dataset, options)

    def train_in_killed_child(self) -> None:
        """Trains in a child process that kills itself."""
        code = (
            "import os, signal, sys; from bert_jax.device_check import EndingTracker, pretrain, tiny_config\n"
            "tracker = EndingTracker(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
            "pretrain(tiny_config(sys.argv[1]), sys.argv[2], trackers=[tracker])"
        )
        command = [sys.executable, "-c", code, self._dataset, str(self._folder / "resumed")]
        self._killed = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)

    @cached_property
    def _trained(self) -> epath.Path:
        """The workdir of the uninterrupted run."""
        pretrain(tiny_config(self._dataset), str(self._folder / "run"))
        return self._folder / "run"

    def _metrics(self, devices: Sequence[jax.Device] | None = None, **overrides: Any) -> np.ndarray:
        """Returns loss and gradient norm of the first steps, [steps, 2], by default in fp32."""
        # A high learning rate would amplify rounding errors.
        values = {"total_steps": 3, "optimizer__warmup_steps": 1, "optimizer__learning_rate": 1e-4, "dtype": "float32"}
        training = Training(tiny_config(self._dataset, **{**values, **overrides}), devices)
        rows = []
        with jax.default_matmul_precision("highest"):
            state = training.initial_state()
            for _, batch in training.batches():
                state, metrics = training.step(state, batch)
                rows.append(jax.device_get([metrics["loss"], metrics["grad_norm"]]))
        return np.array(rows)

    @cached_property
    def _reference(self) -> np.ndarray:
        return self._metrics()

    # --- Parts ---------------------------------------------------------------------------------------------------

    def devices(self) -> dict[str, Any]:
        """Describes the devices and the versions of their software."""
        memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        versions = {name: software()[name] for name in ("jax", "jaxlib", "libtpu") if name in software()}
        return {**describe_devices(), "memory_bytes": memory, "versions": versions}

    def train(self) -> dict[str, Any]:
        """Trains with evaluations, samples and checkpoints; the loss has to fall."""
        rows = read_metrics(self._trained)
        losses = [row["loss"] for row in rows if "split" not in row]
        if splits := {"eval", "samples"} - {row.get("split") for row in rows}:
            raise BertJaxError(f"metrics.jsonl has no rows of {', '.join(sorted(splits))}")
        first, last = float(np.mean(losses[:3])), float(np.mean(losses[-3:]))
        if not last < first:
            raise BertJaxError(f"loss of {len(losses)} steps: {first:.2f} -> {last:.2f}, expected a lower one")
        return {"steps": len(losses), "first_loss": first, "last_loss": last}

    def resume(self) -> dict[str, Any]:
        """Ends a run and resumes it; metrics and parameters have to equal those of one without an end to the bit."""
        workdir, ended = self._folder / "resumed", "SIGKILL"
        if self._killed is None:
            stop, ended = StopSignal(), "SIGTERM"
            tracker = EndingTracker(lambda: setattr(stop, "received", signal.SIGTERM))
            with suppress(Interrupted):
                pretrain(tiny_config(self._dataset), str(workdir), stop=stop, trackers=[tracker])
        elif self._killed.returncode != -signal.SIGKILL:
            reason = self._killed.stderr.strip().split("\n")[-1]
            raise BertJaxError(f"a child process ended with {self._killed.returncode}, expected SIGKILL: {reason}")
        start = max((int(step.name) for step in complete_steps(workdir)), default=0)
        if not 0 < start < STEPS:
            raise BertJaxError(f"{ended} after step {STOP_STEP}: found checkpoint {start}; expected one before {STEPS}")
        pretrain(tiny_config(self._dataset), str(workdir))
        rows = itertools.zip_longest(*map(_reproducible_rows, (self._trained, workdir)))
        if changed := [row for row in rows if row[0] != row[1]]:
            raise BertJaxError(f"resumed from step {start}: expected and got {changed[0]}")
        arrays = [jax.tree.leaves(open_checkpoint(str(run)).load_parameters()) for run in (self._trained, workdir)]
        if differing := sum(not np.array_equal(ours, theirs) for ours, theirs in zip(*arrays, strict=True)):
            raise BertJaxError(f"resumed from step {start}: {differing} of {len(arrays[0])} arrays differ")
        return {"ended_by": ended, "start_step": start, "equal_rows": STEPS, "equal_arrays": len(arrays[0])}

    def export(self) -> dict[str, Any]:
        """Exports the run for Hugging Face transformers, and loads the export; hidden states have to be equal."""
        places = str(self._trained), str(self._local / "hf")
        architecture = export(open_checkpoint(places[0]), places[1])
        states = [np.asarray(load(place).encode(["ba be bi .", "bo"]).hidden_states) for place in places]
        if not np.array_equal(states[0], states[1]):
            raise BertJaxError(f"hidden states differ by up to {np.abs(states[0] - states[1]).max():.1e}")
        return {"architecture": architecture, "hidden_states": "equal"}

    def cpu(self) -> dict[str, Any]:
        """Compares loss and gradient norm of the training step with those of this machine's CPU."""
        try:
            devices = jax.local_devices(backend="cpu")[:1]
        except RuntimeError as error:
            platforms = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
            raise SkippedError(f"{platforms}: excludes the CPU; set {platforms},cpu") from error
        found = _difference(self._reference, self._metrics(devices), TOLERANCE, "one CPU device")
        return {"difference": found, "tolerance": TOLERANCE}

    def mesh(self) -> dict[str, Any]:
        """Compares the losses of every mesh axis with those of `mesh.data`."""
        if (count := jax.device_count()) == 1:
            raise SkippedError("one device has no mesh")
        differences, refused = dict[str, float](), dict[str, str]()
        for axis, size in itertools.product(("fsdp", "tensor"), sorted({2, count})):
            name = f"{axis}={size}"
            try:
                losses = self._metrics(None, **{f"mesh__{axis}": size})[:, 0]
            except InputError as error:
                refused[name] = str(error)
            else:
                differences[name] = _difference(self._reference[:, 0], losses, MESH_TOLERANCE, f"mesh.{name}")
        return {"differences": differences, "tolerance": MESH_TOLERANCE, "skipped": refused}

    def attention(self) -> dict[str, Any]:
        """Compares loss and gradient norm of the platform's attention kernel with those of `attention=xla`."""
        if jax.default_backend() not in KERNELS:
            raise SkippedError("only on TPU and GPU")
        kernel, tolerance, settings = KERNELS[jax.default_backend()]
        expected = self._metrics(**settings) if settings else self._reference
        found = self._metrics(**settings, attention=kernel)
        difference = _difference(expected, found, tolerance, f"attention={kernel}")
        return {"kernel": kernel, "difference": difference, "tolerance": tolerance}

    def storage(self) -> dict[str, Any]:
        """Measures how long it takes to save some 267 MiB of parameters, and to load and verify them."""
        sizes = {"model__hidden_size": 512, "model__num_hidden_layers": 22, "model__intermediate_size": 2048}
        shards, place = math.gcd(jax.device_count(), 512), str(self._folder / "storage")
        training = Training(tiny_config(self._dataset, mesh__fsdp=shards, **sizes))
        state = training.initial_state()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.parameters))
        began = time.perf_counter()
        training.save(place, state)
        saved = time.perf_counter()
        open_checkpoint(place).load_parameters()
        return {"bytes": size, "save_seconds": saved - began, "load_seconds": time.perf_counter() - saved}


def _reproducible_rows(workdir: epath.Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in NOT_REPRODUCIBLE} for row in read_metrics(workdir)]


def _difference(expected: np.ndarray, found: np.ndarray, tolerance: float, name: str) -> float:
    """Returns the largest relative difference. Raises BertJaxError if it exceeds `tolerance`."""
    difference = float(np.max(np.abs(found - expected) / np.abs(expected)))
    if not difference <= tolerance:
        raise BertJaxError(f"{name}: differs by {difference:.1e}, expected at most {tolerance:.0e}")
    return difference
