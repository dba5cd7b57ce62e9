"""Throughput of a run, and one-line summaries of its metrics."""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from bert_jax.config_keys import PretrainConfig
from bert_jax.data.loading.loader import TrainLoader
from bert_jax.model import BertConfig
from bert_jax.tracking.accelerators import find_accelerator
from bert_jax.tracking.flops import training_flops

log = logging.getLogger(__name__)

_NOTABLE_WAIT = 0.05
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


def summary(values: dict[str, float]) -> str:
    """Formats a row of metrics in one line."""
    text = f"loss {values['loss']:.3f}"
    for head in ("mlm", "nsp"):
        if f"{head}_loss" in values:
            text += f"  {head} {values[f'{head}_loss']:.3f} ({values[f'{head}_accuracy']:.1%})"
    if "tokens_per_second" in values:
        text += f"  {values['tokens_per_second']:,.0f} tokens/s"
    if values.get("input_wait_share", 0.0) >= _NOTABLE_WAIT:
        text += f"  {values['input_wait_share']:.0%} waiting for input"
    return text


def short_summary(values: Mapping[str, float]) -> str:
    """Formats the metrics for a progress bar, the most important first; two spaces separate them."""
    parts = [
        f"{head} {values[f'{head}_loss']:.3f} ({values[f'{head}_accuracy']:.0%})"
        for head in ("mlm", "nsp") if f"{head}_loss" in values
    ]  # fmt: skip
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tok/s")
    parts.insert(len(parts) if "mlm_loss" in values else 0, f"loss {values['loss']:.3f}")
    if values.get("input_wait_share", 0.0) >= _NOTABLE_WAIT:
        parts.append(f"{values['input_wait_share']:.0%} waiting for input")
    return "  ".join(parts)


def key_values(values: Mapping[str, float]) -> str:
    """Formats a row of metrics as `key=value` words, for a line of the log that programs can search."""
    first = [name for name in _FIRST if name in values]
    rest = [name for name in values if name not in _FIRST and name not in _NOT_IN_LINES]
    return " ".join(f"{name}={_short(values[name])}" for name in [*first, *rest])


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


@dataclass(frozen=True)
class StepWork:
    """Work of one step: examples, tokens (with padding), real tokens (without padding) and model FLOPs.

    `real_tokens` is None if it is not measured.
    """

    examples: float
    tokens: float
    real_tokens: float | None
    flops: float


class Throughput:
    """Measures rates since the last row, without compilation and evaluation."""

    def __init__(self, work: Callable[[int], StepWork]):
        """Starts measuring; `work` maps a step to its work."""
        self._work = work
        self._since: tuple[float, int, float] | None = None  # time, step, seconds waited for input until then
        self._finished = 0.0  # time of the end of the last step
        self._waited = 0.0
        self._seconds: list[float] = []  # duration of each step
        devices = jax.devices()
        peak = _peak_flops(devices[0].platform, devices[0].device_kind)
        self._peak = peak and peak * len(devices)

    def pause(self) -> None:
        """Excludes the time until the next finished step."""
        self._since = None

    def finished(self, step: int, waited: float) -> None:
        """Records the end of `step`; `waited` is the total number of seconds that the loop has waited for batches."""
        now = time.perf_counter()
        if self._since is None:
            self._since, self._seconds = (now, step, waited), []
        else:
            self._seconds.append(now - self._finished)
        self._finished, self._waited = now, waited

    def rates(self, step: int) -> dict[str, float]:
        """Returns the metrics in `RATES` since the last row, up to `step`.

        `examples_per_second` counts sequences, packed or not. `tokens_per_second` counts padding, as `mfu` does, which
        needs a device of known peak. `real_tokens_per_second` is for packed rows only. `step_seconds_p50` and the other
        percentiles are of the time between the ends of two steps. `input_wait_share` is the share of time in which the
        loop waited for a batch. There are none directly after a pause.
        """
        if self._since is None:
            return {}
        then, first, waited_then = self._since
        if step == first:
            return {}
        seconds = self._finished - then
        work = [self._work(number) for number in range(first + 1, step + 1)]
        rates = {
            "examples_per_second": sum(step_work.examples for step_work in work) / seconds,
            "tokens_per_second": sum(step_work.tokens for step_work in work) / seconds,
        }
        if all(step_work.real_tokens is not None for step_work in work):
            rates["real_tokens_per_second"] = sum(step_work.real_tokens or 0.0 for step_work in work) / seconds
        if self._peak:
            rates["mfu"] = sum(step_work.flops for step_work in work) / seconds / self._peak
        times = np.percentile(self._seconds, PERCENTILES).tolist()
        rates |= {f"step_seconds_p{percent}": value for percent, value in zip(PERCENTILES, times, strict=True)}
        rates["input_wait_share"] = (self._waited - waited_then) / seconds
        self._since, self._seconds = (self._finished, step, self._waited), []
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
    real = tokens * loader.real_share if config.data.packing else None
    work = StepWork(rows * loader.sequences_a_row, tokens, real, rows * flops)
    return lambda step: work
