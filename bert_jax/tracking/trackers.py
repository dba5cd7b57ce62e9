"""Trackers: receivers of the config and of the rows of `metrics.jsonl`.

A run has one for `metrics.jsonl`, one for TensorBoard, and those that the config or the caller adds.
"""

import importlib.util
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
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

from bert_jax.errors import InputError, install_hint
from bert_jax.files import atomic, remote
from bert_jax.tracking.metrics import METRICS_FILE, SAMPLES, GrowingFile, finite_json, read_metrics

log = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FILE = "wandb_id"
"""The id of the run in W&B, so that a resumed run continues it."""
_SAMPLE_HEADS = ["text", "target", "probability", "fills"]


class Tracker:
    """Receiver of what a run logs, in process 0. A subclass overrides the methods that it needs."""

    is_required = False
    """Whether its errors end the run. Any other error is logged, and ends the tracking of this tracker alone."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Called once, before anything else, with the hyper-parameters by dotted key."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Called with each row of `metrics.jsonl`, whose values may be NaN or infinite.

        `split` is absent for training, "eval" for an evaluation, and "samples" for a row whose `samples` are masked
        texts and their fills. `time` is in unix seconds. Steps ascend; a resumed run logs the steps after its
        checkpoint again.
        """

    def flush(self) -> None:
        """Called before each checkpoint: writes everything to where it survives a kill."""

    def close(self) -> None:
        """Called once, at the end of the run, whatever the reason."""


@dataclass
class Trackers:
    """All trackers of a run, in the order in which they are called. Empty in processes other than process 0."""

    trackers: Sequence[Tracker] = ()
    _failed: list[Tracker] = field(default_factory=list)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Logs the hyper-parameters of the run."""
        self._each(lambda tracker: tracker.log_config(config))

    def log(self, step: int, values: Mapping[str, Any], split: str | None = None) -> None:
        """Logs a row; see `Tracker.log`."""
        row = {"step": step, **({"split": split} if split else {}), **values, "time": round(time.time(), 3)}
        self._each(lambda tracker: tracker.log(row))

    def flush(self) -> None:
        """Writes everything to where it survives a kill."""
        self._each(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Closes every tracker, also those that failed. Required ones may raise: they are first, and closed last."""
        for tracker in reversed(self.trackers):
            self._call(tracker, lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers:
            if tracker not in self._failed:
                self._call(tracker, call)

    def _call(self, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except Exception:
            if tracker.is_required:
                raise
            self._failed.append(tracker)
            log.exception("Tracker %s failed and is not used any more; the run continues", type(tracker).__name__)


class MetricsFile(GrowingFile, Tracker):
    """Appends rows to `metrics.jsonl`.

    Drops rows after `resume_step` first: a resumed run writes them again, and the result is that of an uninterrupted
    run.
    """

    is_required = True

    def __init__(self, workdir: epath.Path, resume_step: int):
        # A run that starts anew also drops the evaluation at step 0 of one that was killed before its first checkpoint.
        kept = [_line(row) for row in read_metrics(workdir) if row["step"] <= resume_step and resume_step]
        super().__init__(workdir / METRICS_FILE, b"".join(kept))

    def log(self, row: Mapping[str, Any]) -> None:
        self.write(_line(row))


def _line(row: Mapping[str, Any]) -> bytes:
    return finite_json(row).encode() + b"\n"


class TensorBoard(RecordWriter, Tracker):  # type: ignore[misc]  # tensorboard has no types
    """Writes events to WORKDIR/tensorboard; those of an earlier start after `resume_step` are no longer shown.

    TensorBoard's own writers import TensorFlow if it is installed, and write in a background thread.
    """

    is_required = True

    def __init__(self, workdir: epath.Path, resume_step: int):
        """Opens a new event file. TensorBoard needs `tfevents` in its name and reads in the order of names."""
        folder = workdir / TENSORBOARD_FOLDER
        if not remote.is_remote(folder):
            folder.mkdir(exist_ok=True)
        self._name, self._start = str(workdir), resume_step
        super().__init__(GrowingFile(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"))
        self._write(time.time(), file_version="brain.Event:2")
        purge = SessionLog(status=SessionLog.START)  # TensorBoard drops its events from this step on
        self._write(time.time(), step=resume_step and resume_step + 1, session_log=purge)

    def log_config(self, config: Mapping[str, Any]) -> None:
        values = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in config.items()}
        self._write(time.time(), step=self._start, summary=hparams_pb(values, trial_id=self._name))

    def log(self, row: Mapping[str, Any]) -> None:
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in _named_values(row).items() if isinstance(value, (int, float)) and math.isfinite(value)
        ]  # fmt: skip
        if SAMPLES in row:
            lines = [_SAMPLE_HEADS, ["---"] * len(_SAMPLE_HEADS), *_sample_rows(row)]
            text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
            tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
            metadata = create_summary_metadata(display_name=SAMPLES, description="")
            values.append(Summary.Value(tag=SAMPLES, metadata=metadata, tensor=tensor))
        self._write(row["time"], step=row["step"], summary=Summary(value=values))

    def _write(self, time: float, **fields: Any) -> None:
        self.write(Event(wall_time=time, **fields).SerializeToString())


def _named_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of a row by split and name, such as "eval/loss"."""
    split = row.get("split", "train")
    return {f"{split}/{name}": value for name, value in row.items() if name not in ("step", "time", "split", SAMPLES)}


def _sample_rows(row: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the cells below `_SAMPLE_HEADS` for each mask of a row of samples."""
    return [
        [sample["text"], mask["target"], mask["probability"], ", ".join(f"{word} {p:.3f}" for word, p in mask["fills"])]
        for sample in row[SAMPLES] for mask in sample["masks"]
    ]  # fmt: skip


def check_wandb(project: str) -> None:
    """Raises InputError if a project is set and the package `wandb` is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise InputError(f"tracking.wandb_project={project}: requires the package wandb; run: {install_hint('wandb')}")


class WeightsAndBiases(Tracker):
    """Logs to a project of W&B. A resumed run continues its run there, which keeps the first value of a step.

    The environment variables of W&B apply: WANDB_MODE=offline writes to the workdir, for `wandb sync`.
    """

    def __init__(self, project: str, workdir: epath.Path):
        """Opens the run. Raises InputError if W&B refuses it, such as without a login."""
        import wandb

        path = workdir / WANDB_FILE
        if not remote.exists(path):
            atomic.write_whole(path, secrets.token_hex(8).encode())
        try:
            self._run = wandb.init(
                project=project,
                id=atomic.read_whole(path).decode(),
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

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, row: Mapping[str, Any]) -> None:
        import wandb

        values: dict[str, Any] = _named_values(row)
        if SAMPLES in row:
            cells = [[row["step"], *line] for line in _sample_rows(row)]
            values[SAMPLES] = wandb.Table(columns=["step", *_SAMPLE_HEADS], data=cells)
        self._run.log(values, step=row["step"])

    def close(self) -> None:
        self._run.finish()
