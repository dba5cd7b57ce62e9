"""Trackers: receivers of the config, the metrics and the text samples that a run logs.

A run has one for `metrics.jsonl`, one for TensorBoard, and those that the config or the caller adds.
"""

import functools
import importlib.util
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from etils import epath
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from bert_jax.errors import InputError
from bert_jax.extras import install_hint
from bert_jax.files import atomic, remote
from bert_jax.tracking.metrics import METRICS_FILE, SAMPLES, GrowingFile, finite_json, read_metrics

log = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FILE = "wandb.json"
"""Names the run in W&B, so that a resumed run continues it."""
Sample = Mapping[str, Any]
"""A masked text and its fills, as JSON: `text`, with [MASK]s, and `masks`. Each of these has its `target`, the
`probability` of it, and `fills`: the most probable words with their probabilities, best first."""


@dataclass(frozen=True)
class RunRecord:
    """A run as its trackers see it.

    Attributes:
      workdir: the folder of the run.
      config: the hyper-parameters, by dotted key.
      start: steps done when the run was opened; above 0 if it resumes.
    """

    workdir: epath.Path
    config: Mapping[str, Any]
    start: int


class Tracker:
    """Receiver of what a run logs, in process 0. A subclass overrides the methods that it needs.

    Steps ascend, and a resumed run logs the steps after its checkpoint again. `time` is in unix seconds.
    """

    def log_config(self, run: RunRecord) -> None:
        """Called once, before anything else."""

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        """Called with a row of metrics. `split` is None for training; a value is a number,
        which may not be finite, or the text `data`: the hash of the dataset that an evaluation measured."""

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        """Called with the fills of masked texts after an evaluation."""

    def flush(self) -> None:
        """Called before each checkpoint: writes everything to where it survives a kill."""

    def close(self) -> None:
        """Called once, at the end of the run, whatever the reason."""


@dataclass
class Trackers:
    """All trackers of a run. Empty in processes other than process 0.

    Attributes:
      files: trackers of files in the workdir. Their errors end the run.
      others: trackers of services, and those of the caller. An error of one is logged, and ends its tracking alone.
    """

    files: Sequence[Tracker] = ()
    others: Sequence[Tracker] = ()
    _failed: list[Tracker] = field(default_factory=list)

    def log_config(self, run: RunRecord) -> None:
        """Logs the config of the run."""
        self._each(lambda tracker: tracker.log_config(run))

    def log_scalars(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """Logs a row of metrics. `split` is "eval" for evaluations and None for training."""
        now = time.time()
        self._each(lambda tracker: tracker.log_scalars(step, values, split=split, time=now))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs the fills of masked texts."""
        now = time.time()
        self._each(lambda tracker: tracker.log_samples(step, samples, time=now))

    def flush(self) -> None:
        """Writes everything to where it survives a kill."""
        self._each(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Closes every tracker, those that failed too, and files first; then raises an error of `files`."""
        with ExitStack() as stack:
            for tracker in self.others:
                stack.callback(self._guarded, tracker, tracker.close)
            for tracker in self.files:
                stack.callback(tracker.close)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.files:
            call(tracker)
        for tracker in self.others:
            if tracker not in self._failed:
                self._guarded(tracker, functools.partial(call, tracker))

    def _guarded(self, tracker: Tracker, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._failed.append(tracker)
            log.exception("Tracker %s failed and is not used any more; the run continues", type(tracker).__name__)


class MetricsFile(Tracker):
    """Appends rows to `metrics.jsonl`.

    Drops rows after `resume_step` first: a resumed run writes them again, and the result is that of an uninterrupted
    run.
    """

    def __init__(self, workdir: epath.Path, resume_step: int):
        # A run that starts anew also drops the evaluation at step 0 of one that was killed before its first checkpoint.
        kept = [_line(row) for row in read_metrics(workdir) if row["step"] <= resume_step and resume_step]
        self._file = GrowingFile(workdir / METRICS_FILE, b"".join(kept))

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        row = {"step": step, **({"split": split} if split else {}), **values, "time": round(time, 3)}
        self._file.write(_line(row))

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        self._file.write(_line({"step": step, "split": SAMPLES, "samples": list(samples), "time": round(time, 3)}))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return finite_json(row).encode() + b"\n"


class TensorBoard(Tracker):
    """Writes events to WORKDIR/tensorboard; those of an earlier start after `resume_step` are no longer shown.

    The usual writers (SummaryWriter) have a background thread, and block forever after it has died of a full disk. They
    also import TensorFlow or torch if installed, which takes seconds at each start.
    """

    def __init__(self, workdir: epath.Path, resume_step: int):
        """Opens a new event file. TensorBoard needs `tfevents` in its name and reads in the order of names."""
        folder = workdir / TENSORBOARD_FOLDER
        if not remote.is_remote(folder):
            folder.mkdir(exist_ok=True)
        self._events = RecordWriter(
            GrowingFile(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}")
        )
        self._write(time.time(), file_version="brain.Event:2")
        purge = SessionLog(status=SessionLog.START)  # TensorBoard drops its events from this step on
        self._write(time.time(), step=resume_step + 1, session_log=purge)

    def log_config(self, run: RunRecord) -> None:
        values = {key: value if isinstance(value, (bool, int, float)) else str(value)
                  for key, value in run.config.items()}  # fmt: skip
        rows = "\n".join(f"| {key} | {json.dumps(value)} |" for key, value in run.config.items())
        table = _markdown("config", f"| key | value |\n| --- | --- |\n{rows}")
        for summary in (hparams_pb(values, trial_id=str(run.workdir)), table):
            self._write(time.time(), step=run.start, summary=summary)

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):  # TensorBoard does not support other values
                tag = f"{split or 'train'}/{name}"
                self._write(time, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        for number, sample in enumerate(samples):
            self._write(time, step=step, summary=_markdown(f"samples/{number}", _sample_table(sample)))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def _write(self, time: float, **fields: Any) -> None:
        self._events.write(Event(wall_time=time, **fields).SerializeToString())


def _markdown(name: str, text: str) -> Summary:
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    metadata = create_summary_metadata(display_name=name, description="")
    return Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])


def _sample_table(sample: Sample) -> str:
    """Formats a sample: the masked text, and a row for each mask."""
    rows = [f"| {mask['target']} | {mask['probability']:.3f} | {_fills(mask)} |" for mask in sample["masks"]]
    return "\n".join([sample["text"], "", "| target | probability | fills |", "| --- | --- | --- |", *rows])


def check_wandb(project: str) -> None:
    """Raises InputError if a project is set and the package `wandb` is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise InputError(f"tracking.wandb_project={project}: requires the package wandb; run: {install_hint('wandb')}")


class WeightsAndBiases(Tracker):
    """Logs to a project of W&B. A resumed run continues its run there, which keeps the first value of a step.

    The environment variables of W&B apply: WANDB_MODE=offline writes to the workdir, for `wandb sync`.
    """

    def __init__(self, project: str, entity: str, workdir: epath.Path):
        """Opens the run. Raises InputError if W&B refuses it, such as without a login."""
        import wandb

        identity = _identity(workdir / WANDB_FILE, project, entity)
        try:
            self._run = wandb.init(
                project=project,
                entity=entity or None,
                id=identity,
                name=workdir.name,
                dir=None if remote.is_remote(workdir) else str(workdir),
                resume="allow",
                reinit="create_new",  # leaves a run of the calling program alone
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.UsageError as error:
            raise InputError(
                f"tracking.wandb_project={project}: {error}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        log.info("Weights & Biases: %s", f"offline, in {self._run.dir}" if self._run.offline else self._run.url)

    def log_config(self, run: RunRecord) -> None:
        self._run.config.update(dict(run.config), allow_val_change=True)

    def log_scalars(self, step: int, values: Mapping[str, Any], *, split: str | None, time: float) -> None:
        self._run.log({f"{split or 'train'}/{name}": value for name, value in values.items()}, step=step)

    def log_samples(self, step: int, samples: Sequence[Sample], *, time: float) -> None:
        import wandb

        table = wandb.Table(columns=["step", "text", "target", "probability", "fills"])
        for sample in samples:
            for mask in sample["masks"]:
                table.add_data(step, sample["text"], mask["target"], mask["probability"], _fills(mask))
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def _identity(path: epath.Path, project: str, entity: str) -> str:
    """Returns the id of the workdir's run in the project, a new one at first."""
    place = {"project": project, "entity": entity}
    before = json.loads(atomic.read_whole(path)) if remote.exists(path) else {}
    if {key: before.get(key) for key in place} == place:
        return str(before["id"])
    identity = secrets.token_hex(8)
    atomic.write_whole(path, (json.dumps({"id": identity, **place}) + "\n").encode())
    return identity


def _fills(mask: Mapping[str, Any]) -> str:
    return ", ".join(f"{word} {probability:.3f}" for word, probability in mask["fills"])
