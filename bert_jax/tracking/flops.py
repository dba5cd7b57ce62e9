"""Model FLOPs and the rates of known accelerators, for model FLOPs utilization (MFU).

Convention of FLOPs: only matrix products, over padded tokens, the masked-LM head at the gathered positions, and three
times the forward pass. BERT-LARGE has 240.6 GFLOP per sequence at 128 tokens with 20 predictions, 1,019.8 at 512 with
76.

Sources of rates: the vendors' data sheets. Google's page on each TPU (docs of Cloud TPU, "System architecture") for
FLOP/s and the bandwidth of its HBM, "How to Scale Your Model" (Austin et al. 2025, chapter 2) for the links between
chips, and NVIDIA's data sheets, without sparsity. A chip of TPU v2, v3 and TPU7x is two JAX devices, each with half of
its rates; a B200 is two dies and one device.
"""

import re
from dataclasses import dataclass

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
    d, f = config.hidden_size, config.intermediate_size
    projections = 2 * seq_len * (4 * d * d + 2 * d * f)
    attention = 2 * 2 * seq_len * seq_len * d
    mlm_head = 2 * predictions * (d * d + d * config.vocab_size)
    nsp_head = 2 * sequences * (d * d + 2 * d)
    return float(config.num_hidden_layers * (projections + attention) + mlm_head + nsp_head)


def recomputed_flops(config: BertConfig, seq_len: int, remat: str, attention: str = "xla") -> float:
    """Counts FLOPs of a row's matrix products that the backward pass recomputes; they are not model FLOPs.

    `remat` recomputes them, and a fused attention kernel (any but "xla") the queries by keys, which it does not store.
    """
    d, f = config.hidden_size, config.intermediate_size
    product = 2.0 * seq_len * seq_len * d  # queries by keys, or probabilities by values
    fused = 0.0 if attention == "xla" else product
    per_layer = {
        "none": fused,
        "attention": fused or product,
        "dots": 2 * product + fused,
        "full": 2 * product + fused + 2 * seq_len * (4 * d * d + 2 * d * f),
    }
    return config.num_hidden_layers * per_layer[remat]


@dataclass(frozen=True)
class Torus:
    """Links between TPUs.

    Attributes:
      link: bandwidth of one link to a neighbour, in one direction, in bytes/s.
      axes: number of axes of the torus; along each the device has a link in both directions.
    """

    link: float
    axes: int


@dataclass(frozen=True)
class Accelerator:
    """Rates of a JAX device.

    Attributes:
      peak_flops: dense bf16 FLOP/s.
      hbm: memory bandwidth, reads and writes together, in bytes/s; None if unknown.
      torus: links of a TPU that `bert-jax compile` supports; None for others.
    """

    peak_flops: float
    hbm: float | None = None
    torus: Torus | None = None


_V5E = Accelerator(197e12, 8.19e11, Torus(4.5e10, 2))
_V5P = Accelerator(459e12, 2.765e12, Torus(9e10, 3))
_V6E = Accelerator(918e12, 1.64e12, Torus(9e10, 2))

# By `device_kind`; for NVIDIA a form factor and a memory size may follow. Where these differ in the bandwidth of their
# memory and the name does not say which, it is that of the fastest, so that a bound on the time stays a lower bound.
ACCELERATORS = {
    "TPU v2": Accelerator(46e12 / 2),
    "TPU v3": Accelerator(123e12 / 2),
    "TPU v4": Accelerator(275e12, 1.228e12, Torus(4.5e10, 3)),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": Accelerator(2307e12 / 2, 7.38e12 / 2, Torus(9e10 / 2, 3)),
    "NVIDIA A100": Accelerator(312e12, 2.039e12),
    "NVIDIA A100-SXM4-40GB": Accelerator(312e12, 1.555e12),
    "NVIDIA H100": Accelerator(989e12, 3.35e12),
    "NVIDIA H100 PCIe": Accelerator(756e12, 2e12),
    "NVIDIA H100 NVL": Accelerator(835e12, 3.9e12),
    "NVIDIA H200": Accelerator(989e12, 4.8e12),
    "NVIDIA GH200": Accelerator(989e12, 4.9e12),
    "NVIDIA B200": Accelerator(2250e12, 8e12),
    "NVIDIA GB200": Accelerator(2500e12, 8e12),
}


def named_accelerator(name: str) -> tuple[str, Accelerator]:
    """Returns the `device_kind` and the rates of a device by its short or long name: `v5e`, `h100`, "TPU v5e".

    Raises InputError for an unknown name.
    """
    names = {_short_name(kind): kind for kind in ACCELERATORS}
    kind = names.get(_short_name(name))
    if kind is None:
        raise InputError(f"--device={name}: unknown device; expected one of {', '.join(names)}")
    return kind, ACCELERATORS[kind]


def _short_name(kind: str) -> str:
    return re.sub(r"[ _-]", "", kind.lower()).removeprefix("tpu").removeprefix("nvidia")


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Returns the rates of a device, by its name or by the longest known prefix of it; None if unknown."""
    if device_kind in ACCELERATORS:
        return ACCELERATORS[device_kind]
    matches = [name for name in ACCELERATORS if device_kind.startswith((f"{name} ", f"{name}-")) and "NVIDIA" in name]
    return ACCELERATORS[max(matches, key=len)] if matches else None
