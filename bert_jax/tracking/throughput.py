"""Throughput of a run, and one-line summaries of its metrics."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from bert_jax.config_keys import PretrainConfig
from bert_jax.data.loading.loader import TrainLoader
from bert_jax.model import BertConfig
from bert_jax.tracking.flops import peak_flops, training_flops

log = logging.getLogger(__name__)

RATES = ("examples_per_second", "tokens_per_second", "mfu", "step_seconds", "input_wait_share")
"""Names of the metrics of `Throughput.rates`."""
NOT_REPRODUCIBLE = (*RATES, "time")
"""Names of all metrics that differ between two runs of the same config."""
_FIRST = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "loss", "tokens_per_second", "input_wait_share")


def summary(values: Mapping[str, float]) -> str:
    """Formats the main metrics for a progress bar, the most important first; two spaces separate them."""
    return key_values({name: values[name] for name in _FIRST if name in values}).replace(" ", "  ")


def key_values(values: Mapping[str, float]) -> str:
    """Formats metrics as `key=value` words, for a line of the log that programs can search."""
    names = dict.fromkeys([*(name for name in _FIRST if name in values), *values])
    texts = {name: f"{values[name]:.0f}" if abs(values[name]) >= 10_000 else f"{values[name]:.4g}" for name in names}
    return " ".join(f"{name}={text}" for name, text in texts.items())


class StepWork(NamedTuple):
    """Work of one step: examples, tokens (with padding) and model FLOPs."""

    examples: float
    tokens: float
    flops: float


class Throughput:
    """Measures rates since the last row, without compilation and evaluation."""

    def __init__(self, work: Callable[[int], StepWork]):
        """Starts measuring; `work` maps a step to its work."""
        self._work = work
        self._steps: list[tuple[int, float, float]] = []  # step, time of its end, seconds waited for input until then
        device = jax.devices()[0]
        peak = peak_flops(device.device_kind)
        self._peak = peak and peak * jax.device_count()
        if peak is None and device.platform != "cpu":
            log.warning("No mfu is reported: the peak FLOP/s of device %s are not known", device.device_kind)

    def pause(self) -> None:
        """Excludes the time until the next finished step."""
        self._steps = []

    def finished(self, step: int, waited: float) -> None:
        """Records the end of `step`; `waited` is the total number of seconds that the loop has waited for batches."""
        self._steps.append((step, time.perf_counter(), waited))

    def rates(self) -> dict[str, float]:
        """Returns the metrics in `RATES` since the last row; none directly after a pause.

        `examples_per_second` counts sequences, packed or not. `tokens_per_second` counts padding, as `mfu` does, which
        needs a device of known peak. `step_seconds` is the median time between the ends of two steps.
        `input_wait_share` is the share of time in which the loop waited for a batch.
        """
        if len(self._steps) < 2:
            return {}
        steps, ends, waited = zip(*self._steps, strict=True)
        self._steps = self._steps[-1:]
        seconds = ends[-1] - ends[0]
        examples, tokens, flops = (np.sum([self._work(step) for step in steps[1:]], axis=0) / seconds).tolist()
        return {
            "examples_per_second": examples,
            "tokens_per_second": tokens,
            **({"mfu": flops / self._peak} if self._peak else {}),
            "step_seconds": float(np.median(np.diff(ends))),
            "input_wait_share": (waited[-1] - waited[0]) / seconds,
        }


def pretraining_work(config: PretrainConfig, model: BertConfig, loader: TrainLoader) -> StepWork:
    """Computes the work of each step of a phase."""
    first, rows = loader.sources[0], config.global_batch_size
    seq_len = first.dataset.info.seq_len
    flops = training_flops(model, seq_len, first.predictions, first.max_sequences)
    return StepWork(rows * loader.sequences_a_row, float(rows * seq_len), rows * flops)
