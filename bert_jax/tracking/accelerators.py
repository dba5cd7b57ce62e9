"""Rates of known accelerators, by JAX's `device_kind`.

Sources: the vendors' data sheets. Google's page on each TPU (docs of Cloud TPU, "System architecture") for FLOP/s and
the bandwidth of its HBM, "How to Scale Your Model" (Austin et al. 2025, chapter 2) for the links between chips, and
NVIDIA's data sheets, without sparsity. A chip of TPU v2, v3 and TPU7x is two JAX devices, each with half of its rates;
a B200 is two dies and one device.
"""

import re
from dataclasses import dataclass

from bert_jax.errors import InputError


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
    families = [name for name in ACCELERATORS if name.startswith("NVIDIA ")]
    matches = [name for name in families if device_kind.startswith((f"{name} ", f"{name}-"))]
    return ACCELERATORS[max(matches, key=len)] if matches else None
