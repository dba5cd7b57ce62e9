"""A run's speed, and its numbers in one line for the eye."""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from bert_jax.config import ConfigDict
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
"""What `Throughput.rates` may return: the only numbers of a run that differ from one time it is made to the next."""


def summary(values: dict[str, float]) -> str:
    """A row in one line."""
    text = f"loss {values['loss']:.3f}"
    for head in ("mlm", "nsp"):
        if f"{head}_loss" in values:
            text += f"  {head} {values[f'{head}_loss']:.3f} ({values[f'{head}_accuracy']:.1%})"
    if "tokens_per_second" in values:
        text += f"  {values['tokens_per_second']:,.0f} tokens/s"
    if values.get("input_wait_share", 0.0) >= _NOTABLE_WAIT:
        text += f"  {values['input_wait_share']:.0%} waiting for input"
    return text


@dataclass(frozen=True)
class StepWork:
    """What one step comes to: examples, tokens (padding counted), of them those that are real, and model FLOPs.

    `real_tokens` is None where it is not told apart.
    """

    examples: float
    tokens: float
    real_tokens: float | None
    flops: float


class Throughput:
    """Rates since the last row, compilation and evaluation left out."""

    def __init__(self, work: Callable[[int], StepWork]):
        """`work` is that of a step."""
        self._work = work
        self._since: tuple[float, int, float] | None = None  # time, step, seconds waited for input until then
        self._finished = 0.0  # when the last step was
        self._waited = 0.0
        self._seconds: list[float] = []  # that each step has taken
        devices = jax.devices()
        peak = _peak_flops(devices[0].platform, devices[0].device_kind)
        self._peak = peak and peak * len(devices)

    def pause(self) -> None:
        """What follows until the next finished step does not count."""
        self._since = None

    def finished(self, step: int, waited: float) -> None:
        """Step `step` is done; `waited` are the seconds that its loop has waited for batches, in all."""
        now = time.perf_counter()
        if self._since is None:
            self._since, self._seconds = (now, step, waited), []
        else:
            self._seconds.append(now - self._finished)
        self._finished, self._waited = now, waited

    def rates(self, step: int) -> dict[str, float]:
        """`examples_per_second` (sequences, packed or not), `tokens_per_second` (padding counted, as in `mfu`).

        With `mfu` where the device's peak is known, and with `real_tokens_per_second` where rows are packed; then
        `step_seconds_p50` and the other percentiles of the time from one step's end to the next's, and
        `input_wait_share`, the part of the time in which the loop had no batch to go on with.
        """
        assert self._since is not None
        then, first, waited_then = self._since
        if step == first:
            return {}
        seconds = self._finished - then
        work = [self._work(number) for number in range(first + 1, step + 1)]
        rates = {
            "examples_per_second": sum(of.examples for of in work) / seconds,
            "tokens_per_second": sum(of.tokens for of in work) / seconds,
        }
        if all(of.real_tokens is not None for of in work):
            rates["real_tokens_per_second"] = sum(of.real_tokens or 0.0 for of in work) / seconds
        if self._peak:
            rates["mfu"] = sum(of.flops for of in work) / seconds / self._peak
        times = np.percentile(self._seconds, PERCENTILES).tolist()
        rates |= {f"step_seconds_p{percent}": at for percent, at in zip(PERCENTILES, times, strict=True)}
        rates["input_wait_share"] = (self._waited - waited_then) / seconds
        self._since, self._seconds = (self._finished, step, self._waited), []
        return rates


@functools.cache
def _peak_flops(platform: str, device_kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of a device; None, with a warning once a process, where they are not known."""
    accelerator = find_accelerator(device_kind)
    if accelerator is None and platform != "cpu":
        log.warning("mfu is not reported: the peak FLOP/s of %s are not known", device_kind)
    return accelerator.peak_flops if accelerator else None


def pretraining_work(config: ConfigDict, model: BertConfig, loader: TrainLoader) -> Callable[[int], StepWork]:
    """What a step of pre-training comes to, which is the same for all of a phase."""
    first = loader.sources[0]
    seq_len, rows = first.dataset.info.seq_len, config.global_batch_size
    flops = training_flops(model, seq_len, first.predictions, first.max_sequences)
    tokens = float(rows * seq_len)
    real = tokens * loader.real_share if config.data.packing else None
    work = StepWork(rows * loader.sequences_a_row, tokens, real, rows * flops)
    return lambda step: work
