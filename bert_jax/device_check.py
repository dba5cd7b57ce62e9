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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.config import PretrainConfig, load_config
from bert_jax.custom_training import Training
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.data.preparation.pipeline import prepare
from bert_jax.errors import BertJaxError, InputError, Interrupted
from bert_jax.files import remote
from bert_jax.files.provenance import software
from bert_jax.inference.pretrained import load
from bert_jax.interop.huggingface import export
from bert_jax.runtime.processes import any_process, holds_devices, is_first, joined
from bert_jax.runtime.workdir_lock import WorkdirLock, shared_name
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.wordpiece import WordPieceTokenizer
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.throughput import NOT_REPRODUCIBLE
from bert_jax.tracking.tracker import Tracker
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import complete_steps, open_checkpoint
from bert_jax.training.pretrain import pretrain
from bert_jax.training.run import describe_devices

STEPS = 30
STOP_STEP = 15
"""Step after which the run of "resume" is ended; the last checkpoint before it is that of step 10."""
COMPARED_STEPS = 3
MESH_TOLERANCE = 1e-5
TOLERANCE = 1e-4
"""Relative differences in fp32: between meshes, and between devices or kernels."""
CUDNN_TOLERANCE = 2e-2
"""Relative difference in bfloat16."""
KERNELS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "tpu": ("pallas", TOLERANCE, {}),
    # It has no dropout and no fp32.
    "gpu": ("cudnn", CUDNN_TOLERANCE, {"dtype": "bfloat16", "model__attention_probs_dropout_prob": 0.0}),
}
"""The attention kernel of each platform beside "xla", its tolerance, and the settings that it needs."""
OK, FAILED, SKIPPED = "ok", "failed", "skipped"

Outcome = tuple[str, dict[str, Any]]
"""The message of a part, and its values as JSON."""


@dataclass(frozen=True)
class PartResult:
    """Result of one part. `status` is OK, FAILED or SKIPPED; `message` has the decisive number or the reason."""

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
    chosen = [name for name in PARTS if not only or name in only]
    with tempfile.TemporaryDirectory(prefix="bert-jax-check-") as temporary, _new_folder(workdir, temporary) as folder:
        check = _Check(Path(temporary), folder)
        check.make_dataset()
        if "resume" in chosen and not holds_devices():
            check.train_in_killed_child()
        results = []
        for name in chosen:
            results.append(_run_part(name, check))
            show(results[-1])
        return results


@contextmanager
def _new_folder(workdir: str | None, temporary: str) -> Iterator[epath.Path]:
    """Yields a new folder in `workdir`, the same in all processes, and removes it. The parts that need it make it."""
    name = f"bert-jax-check-{uuid.uuid4().hex[:8]}"
    if joined():
        if not workdir:
            raise InputError("--workdir: required with several processes; use a folder that all see, such as gs://...")
        name = f"bert-jax-check-{shared_name()}"
    folder = remote.absolute(workdir or temporary) / name
    try:
        yield folder
    finally:
        if not joined() or is_first():
            with suppress(OSError):  # it could not be made
                folder.rmtree()


def _run_part(name: str, check: "_Check") -> PartResult:
    began = time.perf_counter()
    status, values = FAILED, dict[str, Any]()
    try:
        message, values = PARTS[name](check)
        status = OK
    except SkippedError as error:
        status, message = SKIPPED, str(error)
    except Interrupted:
        raise
    except Exception as error:  # of any library: it is the result
        message = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, BertJaxError):
            message = f"{type(error).__name__}: {message[:300]}"
    if any_process(status == FAILED) and status != FAILED:
        status, message = FAILED, "failed in another process, whose log has the reason"
    return PartResult(name, status, round(time.perf_counter() - began, 2), message, values)


# --- The tiny runs -------------------------------------------------------------------------------------------------


class _EndingTracker(Tracker):
    """Sends a signal to this process after a step, once a checkpoint is complete."""

    def __init__(self, folder: epath.Path, number: signal.Signals):
        self._folder, self._number = folder, number

    def log_scalars(self, step: int, values: Any, *, split: str | None, time: float) -> None:
        if step == STOP_STEP and split is None:
            _wait_for_checkpoint(self._folder)
            os.kill(os.getpid(), self._number)


def _wait_for_checkpoint(folder: epath.Path) -> None:
    for _ in range(600):
        if complete_steps(folder):
            return
        time.sleep(0.1)


def run_to_signal(dataset: str, workdir: str, number: int) -> None:
    """Trains the tiny model of `check_devices` until it sends itself the signal `number`."""
    trackers = [_EndingTracker(epath.Path(workdir), signal.Signals(number))]
    pretrain(tiny_config(dataset), workdir, trackers=trackers)


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
        rng = random.Random(0)
        words = ["".join(pair) for pair in itertools.product("bdfgklmnprst", ("a", "e", "i", "o", "u", "ai", "ou"))]

        def sentence(topic: list[str]) -> str:
            return " ".join(rng.choices(topic, k=rng.randint(4, 9))) + " ."

        documents = []
        for _ in range(300):
            topic = words[rng.randrange(0, len(words), 12) :][:12]
            documents.append("\n".join(sentence(topic) for _ in range(rng.randint(4, 12))))
        text = self._local / "text.txt"
        text.write_text("\n\n".join(documents) + "\n")
        options = PrepareOptions(seq_len=64, eval_fraction=0.1, sentences="lines")
        prepare([str(text)], WordPieceTokenizer([*SPECIAL_TOKENS, ".", *words], True), self._dataset, options)

    def train_in_killed_child(self) -> None:
        """Trains in a child process that SIGKILL ends."""
        code = (
            "import sys; from bert_jax.device_check import run_to_signal as run; run(*sys.argv[1:3], int(sys.argv[3]))"
        )
        arguments = [self._dataset, str(self._folder / "resumed"), str(int(signal.SIGKILL))]
        self._killed = subprocess.run(
            [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, check=False
        )

    @cached_property
    def _trained(self) -> epath.Path:
        """The workdir of the uninterrupted run."""
        pretrain(tiny_config(self._dataset), str(self._folder / "run"))
        return self._folder / "run"

    def _metrics(self, devices: Sequence[jax.Device] | None = None, **overrides: Any) -> np.ndarray:
        """Returns loss and gradient norm of the first steps, [steps, 2], by default in fp32."""
        values = {
            "total_steps": COMPARED_STEPS, "dtype": "float32", "optimizer__warmup_steps": 1,
            "optimizer__learning_rate": 1e-4,  # a high one amplifies rounding errors
            **overrides,
        }  # fmt: skip
        training = Training(tiny_config(self._dataset, **values), devices)
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

    def devices(self) -> Outcome:
        """Describes the devices and the versions of their software."""
        first, found = jax.local_devices()[0], describe_devices()
        memory = (first.memory_stats() or {}).get("bytes_limit", 0)
        versions = {name: software()[name] for name in ("jax", "jaxlib", "libtpu") if name in software()}
        if found["platform"] == "gpu":
            versions["cuda"] = first.client.platform_version.split("\n")[-1].removeprefix("cuda ")
        message = (
            f"{found['count']} x {found['kind']} ({found['platform']}), processes: {found['processes']}, "
            f"{f'{memory / 2**30:.1f} GiB each' if memory else 'memory of the host'}; "
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}"
        )
        return message, {**found, "memory_bytes": memory, "versions": versions}

    def train(self) -> Outcome:
        """Trains with evaluations, samples and checkpoints; the loss has to fall."""
        rows = read_metrics(self._trained)
        losses = [row["loss"] for row in rows if "split" not in row]
        if splits := {"eval", "samples"} - {row.get("split") for row in rows}:
            raise BertJaxError(f"metrics.jsonl has no rows of {', '.join(sorted(splits))}")
        first, last = float(np.mean(losses[:3])), float(np.mean(losses[-3:]))
        message = f"{len(losses)} steps, loss {first:.2f} -> {last:.2f}"
        if not last < first:
            raise BertJaxError(f"{message}: expected a lower loss")
        return message, {"steps": len(losses), "first_loss": first, "last_loss": last}

    def resume(self) -> Outcome:
        """Ends a run and resumes it; metrics and state have to equal those of the uninterrupted run to the bit."""
        workdir = self._folder / "resumed"
        if self._killed is None:
            try:
                run_to_signal(self._dataset, str(workdir), signal.SIGTERM)
            except Interrupted:
                if not any(int(step.name) >= STOP_STEP for step in complete_steps(workdir)):
                    raise  # by a signal to the check itself
            ended = "stopped (SIGTERM)"
        elif self._killed.returncode == -signal.SIGKILL:
            ended = "killed (SIGKILL)"
        else:
            reason = self._killed.stderr.strip().split("\n")[-1]
            raise BertJaxError(f"a child process ended with {self._killed.returncode}, expected SIGKILL: {reason}")
        start = max((int(step.name) for step in complete_steps(workdir)), default=0)
        if not 0 < start < STEPS:
            raise BertJaxError(f"{ended} at step {STOP_STEP}: found checkpoint {start}; expected one before {STEPS}")
        pretrain(tiny_config(self._dataset), str(workdir))
        for row, other in itertools.zip_longest(*map(_reproducible_rows, (self._trained, workdir))):
            if row != other:
                raise BertJaxError(f"{ended}, resumed from step {start}: got {other}, expected {row}")
        expected, found = _saved_arrays(self._trained), _saved_arrays(workdir)
        if changed := [name for name in expected if not np.array_equal(expected[name], found[name], equal_nan=True)]:
            raise BertJaxError(
                f"{ended}, resumed from step {start}: {len(changed)} arrays differ, such as {changed[0]}"
            )
        message = f"{ended}, resumed from step {start}: metrics and {len(expected)} arrays are equal to the bit"
        return message, {"ended": ended, "start_step": start, "arrays": len(expected)}

    def export(self) -> Outcome:
        """Exports the run for Hugging Face transformers, and loads the export; hidden states have to be equal."""
        place, text = str(self._local / "hf"), ["ba be bi .", "bo"]
        architecture = export(open_checkpoint(str(self._trained)), place)
        states = [np.asarray(load(checkpoint).encode(text).hidden_states) for checkpoint in (str(self._trained), place)]
        if not np.array_equal(states[0], states[1]):
            raise BertJaxError(f"hidden states differ by up to {np.abs(states[0] - states[1]).max():.1e}")
        return f"{architecture}: hidden states of the loaded export are equal", {"architecture": architecture}

    def cpu(self) -> Outcome:
        """Compares the training step with that of this machine's CPU."""
        try:
            devices = jax.local_devices(backend="cpu")[:1]
        except RuntimeError:
            platforms = os.environ.get("JAX_PLATFORMS", "")
            raise SkippedError(
                f"JAX_PLATFORMS={platforms}: excludes the CPU; set JAX_PLATFORMS={platforms},cpu"
            ) from None
        found = _difference(self._reference, self._metrics(devices), TOLERANCE, "one CPU device")
        message = f"loss and gradient norm of {COMPARED_STEPS} steps differ by {found:.1e} from one CPU device's"
        return message, {"difference": found, "tolerance": TOLERANCE}

    def mesh(self) -> Outcome:
        """Compares the losses of every mesh axis with those of `mesh.data`."""
        count = jax.device_count()
        if count == 1:
            raise SkippedError("one device has no mesh")
        differences, refused = {}, []
        for axis, size in itertools.product(("fsdp", "tensor"), sorted({2, count})):
            name = f"{axis}={size}"
            try:
                losses = self._metrics(None, **{f"mesh__{axis}": size})[:, 0]
            except InputError as error:
                refused.append(f"{name} ({error})")
                continue
            differences[name] = _difference(self._reference[:, 0], losses, MESH_TOLERANCE, f"mesh.{name}")
        message = (
            f"losses of {', '.join(differences) or 'no mesh'} differ by {max(differences.values(), default=0):.1e}"
        )
        message += f" from data={count}" + (f"; skipped {'; '.join(refused)}" if refused else "")
        return message, {"differences": differences, "tolerance": MESH_TOLERANCE, "skipped": refused}

    def attention(self) -> Outcome:
        """Compares loss and gradient norm of the platform's attention kernel with those of `attention=xla`."""
        if jax.default_backend() not in KERNELS:
            raise SkippedError("only on TPU and GPU")
        kernel, tolerance, settings = KERNELS[jax.default_backend()]
        expected = self._metrics(**settings) if settings else self._reference
        found = self._metrics(**settings, attention=kernel)
        difference = _difference(expected, found, tolerance, f"attention={kernel}")
        message = f"loss and gradient norm of attention={kernel} differ by {difference:.1e} from those of xla"
        return message, {"difference": difference, "tolerance": tolerance}

    def storage(self) -> Outcome:
        """Measures the rates at which a run saves and restores a state of about 260 MiB."""
        width = 512
        shards = math.gcd(jax.device_count(), width)
        config = tiny_config(self._dataset, model__hidden_size=width, model__num_hidden_layers=7,
                             model__intermediate_size=4 * width, mesh__fsdp=shards)  # fmt: skip
        training = Training(config)
        # Random moments: zeros would be compressed.
        random_like = lambda leaf: jax.random.normal(jax.random.key(leaf.ndim), leaf.shape) if leaf.ndim else leaf  # noqa: E731
        state = training.initial_state()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        state = jax.jit(lambda old: jax.tree.map(random_like, old), out_shardings=shardings)(state)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        place = self._folder / "storage"
        with (
            closing(WorkdirLock(place)),
            closing(Checkpointer(place, keep=1, config=config, tokenizer=training.tokenizer)) as checkpointer,
        ):
            began = time.perf_counter()
            checkpointer.save(0, state, bert_config=training.model, dataset_hashes=[])
            checkpointer.wait()
            saved = time.perf_counter()
            checkpointer.restore(0, abstract)
            save_seconds, restore_seconds = saved - began, time.perf_counter() - saved
        message = f"{size / 2**20:.0f} MiB: saved at {size / save_seconds / 1e9:.2f} GB/s, restored and verified at "
        message += f"{size / restore_seconds / 1e9:.2f} GB/s"
        return message, {"bytes": size, "save_seconds": save_seconds, "restore_seconds": restore_seconds}


PARTS: dict[str, Callable[[_Check], Outcome]] = {
    "devices": _Check.devices, "train": _Check.train, "resume": _Check.resume, "export": _Check.export,
    "cpu": _Check.cpu, "mesh": _Check.mesh, "attention": _Check.attention, "storage": _Check.storage,
}  # fmt: skip
"""The function of each part, in their order."""


def _saved_arrays(workdir: epath.Path) -> dict[str, np.ndarray]:
    """Returns all arrays of the newest checkpoint of a run, by name; each process reads them whole."""
    arrays: dict[str, np.ndarray] = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for item in ("parameters", "optimizer"):
            path = next(complete_steps(workdir)) / item
            tree = checkpointer.metadata(path).item_metadata.tree
            whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            read = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=whole))
            for name, array in jax.tree_util.tree_leaves_with_path(read):
                arrays[item + jax.tree_util.keystr(name, simple=True, separator=".")] = np.asarray(array)
    return arrays


def _reproducible_rows(workdir: epath.Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key not in NOT_REPRODUCIBLE} for row in read_metrics(workdir)]


def _difference(expected: np.ndarray, found: np.ndarray, tolerance: float, name: str) -> float:
    """Returns the largest relative difference. Raises BertJaxError if it exceeds `tolerance`."""
    difference = float(np.max(np.abs(found - expected) / np.abs(expected)))
    if not difference <= tolerance:
        raise BertJaxError(f"{name}: differs by {difference:.1e}, expected at most {tolerance:.0e}")
    return difference
