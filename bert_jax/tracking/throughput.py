"""Throughput of a run, one-line summaries of its metrics, and profiler traces for TensorBoard or Perfetto."""

import functools
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from bert_jax.config_keys import PretrainConfig
from bert_jax.data.loading.loader import TrainLoader
from bert_jax.errors import InputError
from bert_jax.files import atomic
from bert_jax.model import BertConfig
from bert_jax.tracking.flops import find_accelerator, training_flops

log = logging.getLogger(__name__)

PERCENTILES = (50, 90, 99)
RATES = (
    "examples_per_second", "tokens_per_second", "real_tokens_per_second", "mfu",
    *(f"step_seconds_p{percent}" for percent in PERCENTILES), "input_wait_share",
)  # fmt: skip
"""Names of the metrics of `Throughput.rates`."""
NOT_REPRODUCIBLE = (*RATES, "time")
"""Names of all metrics that differ between two runs of the same config."""


_FIRST = (
    "mlm_loss", "nsp_loss", "loss", "mlm_accuracy", "nsp_accuracy", "learning_rate", "tokens_per_second", "mfu"
)  # fmt: skip
_NOT_IN_LINES = ("steps_averaged", "nonfinite_streak", "step_seconds_p90", "step_seconds_p99")


def summary(values: Mapping[str, float], accuracies: str = ".0%") -> str:
    """Formats the metrics for a progress bar, the most important first; two spaces separate them."""
    parts = [
        f"{head} {values[f'{head}_loss']:.3f} ({values[f'{head}_accuracy']:{accuracies}})"
        for head in ("mlm", "nsp") if f"{head}_loss" in values
    ]  # fmt: skip
    parts.append(f"loss {values['loss']:.3f}")
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tok/s")
    if values.get("input_wait_share", 0.0) >= 0.05:
        parts.append(f"{values['input_wait_share']:.0%} waiting for input")
    return "  ".join(parts)


def key_values(values: Mapping[str, float]) -> str:
    """Formats a row of metrics as `key=value` words, for a line of the log that programs can search."""
    first = [name for name in _FIRST if name in values]
    rest = [name for name in values if name not in _FIRST and name not in _NOT_IN_LINES]
    texts = {name: f"{values[name]:.0f}" if abs(values[name]) >= 10_000 else f"{values[name]:.4g}" for name in values}
    return " ".join(f"{name}={texts[name]}" for name in [*first, *rest])


class StepWork(NamedTuple):
    """Work of one step: examples, tokens (with padding), real tokens (without padding) and model FLOPs.

    `real_tokens` is NaN if it is not measured.
    """

    examples: float
    tokens: float
    real_tokens: float
    flops: float


class Throughput:
    """Measures rates since the last row, without compilation and evaluation."""

    def __init__(self, work: Callable[[int], StepWork]):
        """Starts measuring; `work` maps a step to its work."""
        self._work = work
        self._steps: list[tuple[int, float, float]] = []  # step, time of its end, seconds waited for input until then
        devices = jax.devices()
        peak = _peak_flops(devices[0].platform, devices[0].device_kind)
        self._peak = peak and peak * len(devices)

    def pause(self) -> None:
        """Excludes the time until the next finished step."""
        self._steps = []

    def finished(self, step: int, waited: float) -> None:
        """Records the end of `step`; `waited` is the total number of seconds that the loop has waited for batches."""
        self._steps.append((step, time.perf_counter(), waited))

    def rates(self) -> dict[str, float]:
        """Returns the metrics in `RATES` since the last row.

        `examples_per_second` counts sequences, packed or not. `tokens_per_second` counts padding, as `mfu` does, which
        needs a device of known peak. `real_tokens_per_second` is for packed rows only. `step_seconds_p50` and the other
        percentiles are of the time between the ends of two steps. `input_wait_share` is the share of time in which the
        loop waited for a batch. There are none directly after a pause.
        """
        if len(self._steps) < 2:
            return {}
        steps, ends, waited = zip(*self._steps, strict=True)
        self._steps = self._steps[-1:]
        seconds = ends[-1] - ends[0]
        work = np.sum([self._work(step) for step in steps[1:]], axis=0)
        examples, tokens, real_tokens, flops = (work / seconds).tolist()
        rates = {"examples_per_second": examples, "tokens_per_second": tokens}
        if not math.isnan(real_tokens):
            rates["real_tokens_per_second"] = real_tokens
        if self._peak:
            rates["mfu"] = flops / self._peak
        for percent, value in zip(PERCENTILES, np.percentile(np.diff(ends), PERCENTILES).tolist(), strict=True):
            rates[f"step_seconds_p{percent}"] = value
        rates["input_wait_share"] = (waited[-1] - waited[0]) / seconds
        return rates


@functools.cache
def _peak_flops(platform: str, device_kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of a device; None if unknown, with one warning per process."""
    accelerator = find_accelerator(device_kind)
    if accelerator is None and platform != "cpu":
        log.warning("No mfu is reported: the peak FLOP/s of device %s are not known", device_kind)
    return accelerator.peak_flops if accelerator else None


def pretraining_work(config: PretrainConfig, model: BertConfig, loader: TrainLoader) -> Callable[[int], StepWork]:
    """Computes the work of a step of pre-training, which is the same for all steps of a phase."""
    first = loader.sources[0]
    seq_len, rows = first.dataset.info.seq_len, config.global_batch_size
    flops = training_flops(model, seq_len, first.predictions, first.max_sequences)
    tokens = float(rows * seq_len)
    real = tokens * loader.real_share if config.data.packing else math.nan
    work = StepWork(rows * loader.sequences_a_row, tokens, real, rows * flops)
    return lambda step: work


def parse_steps(steps: str) -> range:
    """Parses `A:B` to the steps A to B, both included, and "" to no steps. Raises InputError for other texts."""
    if not steps:
        return range(0)
    first, colon, last = steps.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return range(int(first), int(last) + 1)
    raise InputError(f"profile.steps={steps!r}: expected FIRST:LAST, such as 10:15")


class StepTracer:
    """Traces steps into WORKDIR/profile. A run that starts or ends within them traces those that it runs."""

    def __init__(self, steps: str, workdir: epath.Path, *, records: bool = True):
        """Parses `steps`. With `records` False nothing is traced, but `begins` and `ends` return the same.

        The loop has to read metrics at the same steps in every process, while one of them records.
        """
        self._steps, self._target, self._records = parse_steps(steps), workdir / "profile", records
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the current trace; JAX writes to local disks

    def begins(self, step: int) -> bool:
        """Returns whether the trace has to be started before `step`."""
        return not self._folder and step in self._steps

    def start(self) -> None:
        """Starts the trace."""
        self._folder = tempfile.TemporaryDirectory(prefix="bert_jax_profile_")
        if self._records:
            jax.profiler.start_trace(self._folder.name)

    def ends(self, step: int) -> bool:
        """Returns whether the trace has to be closed after `step`."""
        return bool(self._folder) and step == self._steps[-1]

    def close(self) -> None:
        """Stops the trace and writes it to the workdir."""
        if self._folder is None:
            return
        with self._folder as folder:
            self._folder = None
            if not self._records:
                return
            jax.profiler.stop_trace()
            for path in (path for path in Path(folder).rglob("*") if path.is_file()):
                target = self._target / str(path.relative_to(folder))
                atomic.make_folder(target.parent)
                atomic.place(path, target)
        log.info("Wrote profiler trace; view it with: tensorboard --logdir %s, or at ui.perfetto.dev", self._target)
