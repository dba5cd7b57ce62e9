"""Throughput of a run: model FLOPs, the peaks of known accelerators, rates, and one-line summaries of metrics.

Convention of FLOPs: only matrix products, over padded tokens, the masked-LM head at the gathered positions, and three
times the forward pass. BERT-LARGE has 240.6 GFLOP per sequence at 128 tokens with 20 predictions, 1,019.8 at 512 with
76. The share of the peak is the model FLOPs utilization (MFU).

Sources of peaks: the vendors' data sheets, Google's page on each TPU (docs of Cloud TPU, "System architecture") and
NVIDIA's, without sparsity. A chip of TPU v2, v3 and TPU7x is two JAX devices, each with half of its peak; a B200 is two
dies and one device.
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from bert_jax.config_keys import PretrainConfig
from bert_jax.data.loading.loader import TrainLoader
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead, feature_size


def training_flops(config: BertConfig, seq_len: int, predictions: int, sequences: int = 1) -> float:
    """Counts FLOPs of the forward and backward pass of a row with one sequence, or several packed ones."""
    return 3.0 * _forward_flops(config, seq_len, predictions, sequences)


def finetuning_flops(config: BertConfig, head: TaskHead, seq_len: int) -> float:
    """Counts FLOPs of a row in fine-tuning. A frozen encoder runs only forward, and not at all for its embeddings."""
    encoder = 0.0 if head.features == "embeddings" else _forward_flops(config, seq_len, 0, 1)
    widths = [feature_size(head.features, config), *[2 * head.bilstm] * (head.bilstm_layers - 1)]
    bilstm = sum(2 * 2 * seq_len * 4 * head.bilstm * (width + head.bilstm) for width in widths)
    return (1.0 if head.features else 3.0) * encoder + 3.0 * bilstm


def _forward_flops(config: BertConfig, seq_len: int, predictions: int, sequences: int) -> float:
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    projections = 2 * seq_len * (4 * d * d + (3 if config.gated_mlp else 2) * d * f)
    global_layers = -(-layers // config.global_attn_every_n_layers)
    keys = global_layers * seq_len + (layers - global_layers) * min(seq_len, config.local_attention)
    attention = 2 * 2 * seq_len * keys * d
    mlm_head = 2 * predictions * (d * d + d * config.vocab_size)
    nsp_head = 2 * sequences * (d * d + 2 * d) if config.pooler else 0
    return float(layers * projections + attention + mlm_head + nsp_head)


# By `device_kind`; for NVIDIA a form factor and a memory size may follow.
PEAK_FLOPS = {
    "TPU v2": 46e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}
"""Dense bf16 FLOP/s of a JAX device."""


def device_kind(name: str) -> str:
    """Returns the `device_kind` of a device by its short or long name: `v5e`, `h100`, "TPU v5e".

    Raises InputError for an unknown name.
    """
    names = {_short_name(kind): kind for kind in PEAK_FLOPS}
    if _short_name(name) not in names:
        raise InputError(f"device={name}: unknown device; expected one of {', '.join(names)}")
    return names[_short_name(name)]


def _short_name(kind: str) -> str:
    return re.sub(r"[ _-]", "", kind.lower()).removeprefix("tpu").removeprefix("nvidia")


def peak_flops(device_kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of a device, by its name or by the longest known prefix of it; None if unknown.

    So is a MIG instance, a part of a GPU.
    """
    if device_kind in PEAK_FLOPS:
        return PEAK_FLOPS[device_kind]
    matches = [name for name in PEAK_FLOPS if device_kind.startswith((f"{name} ", f"{name}-")) and "NVIDIA" in name]
    return PEAK_FLOPS[max(matches, key=len)] if matches and " MIG " not in device_kind else None


RATES = ("examples_per_second", "tokens_per_second", "mfu", "step_seconds", "input_wait_share")
"""Names of the metrics of `Throughput.rates`."""
NOT_REPRODUCIBLE = (*RATES, "time")
"""Names of all metrics that differ between two runs of the same config."""
_FIRST = (
    "mlm_loss", "mlm_accuracy", "ltr_loss", "ltr_accuracy", "nsp_loss", "nsp_accuracy", "loss", "tokens_per_second",
    "input_wait_share",
)  # fmt: skip


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
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()

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
