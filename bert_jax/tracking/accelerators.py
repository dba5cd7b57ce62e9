"""Rates of known accelerators, by JAX's `device_kind`.

Sources: the vendors' data sheets. Google's page on each TPU (docs of Cloud TPU, "System architecture") for FLOP/s and
the bandwidth of its HBM, "How to Scale Your Model" (Austin et al. 2025, chapter 2) for the links between chips, and
NVIDIA's data sheets without sparsity. The chips of TPU v2, v3 and TPU7x are two JAX devices each: half a chip's rates.
"""

import re
from dataclasses import dataclass

from bert_jax.errors import InputError


@dataclass(frozen=True)
class Bandwidths:
    """Bandwidths of a device, in bytes/s.

    Attributes:
      hbm: memory bandwidth, reads and writes together.
      link: bandwidth of one link to a neighbour, in one direction.
      torus_axes: number of axes of the torus; along each the device has a link in both directions.
    """

    hbm: float
    link: float
    torus_axes: int


@dataclass(frozen=True)
class Accelerator:
    """Dense bf16 FLOP/s of a JAX device, and its bandwidths if `bert-jax compile` supports it."""

    peak_flops: float
    bandwidths: Bandwidths | None = None


_V5E = Accelerator(197e12, Bandwidths(8.19e11, 4.5e10, 2))
_V5P = Accelerator(459e12, Bandwidths(2.765e12, 9e10, 3))
_V6E = Accelerator(918e12, Bandwidths(1.64e12, 9e10, 2))

ACCELERATORS = {  # by `device_kind`; for NVIDIA a form factor and a memory size may follow
    "TPU v2": Accelerator(46e12 / 2),
    "TPU v3": Accelerator(123e12 / 2),
    "TPU v4": Accelerator(275e12, Bandwidths(1.228e12, 4.5e10, 3)),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": Accelerator(2307e12 / 2, Bandwidths(7.38e12 / 2, 9e10 / 2, 3)),
    "NVIDIA A100": Accelerator(312e12),
    "NVIDIA H100": Accelerator(989e12),
    "NVIDIA H100 PCIe": Accelerator(756e12),
    "NVIDIA H100 NVL": Accelerator(835e12),
    "NVIDIA H200": Accelerator(989e12),
    "NVIDIA GH200": Accelerator(989e12),
    "NVIDIA B200": Accelerator(2250e12),
    "NVIDIA GB200": Accelerator(2500e12),
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
