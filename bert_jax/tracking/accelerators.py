"""Rates of the accelerators that are known, by JAX's name of the device.

Sources: the makers' data sheets. Google's page on each TPU (docs of Cloud TPU, "System architecture") for FLOP/s and
the bandwidth of its HBM, "How to Scale Your Model" (Austin et al. 2025, chapter 2) for the links between chips, and
NVIDIA's data sheets without sparsity. The chips of TPU v2, v3 and TPU7x are two JAX devices each: half a chip's rates.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bandwidths:
    """Bytes/s in and out of a device.

    Attributes:
      hbm: of its memory, reads and writes together.
      link: of one link to a neighbour, in one direction.
      torus_axes: the axes of the torus, along each of which it has a link there and one back.
    """

    hbm: float
    link: float
    torus_axes: int


@dataclass(frozen=True)
class Accelerator:
    """Dense bf16 FLOP/s of a JAX device, and its bandwidths where `bert-jax compile` uses them."""

    peak_flops: float
    bandwidths: Bandwidths | None = None


_V5E = Accelerator(197e12, Bandwidths(8.19e11, 4.5e10, 2))
_V5P = Accelerator(459e12, Bandwidths(2.765e12, 9e10, 3))
_V6E = Accelerator(918e12, Bandwidths(1.64e12, 9e10, 2))

ACCELERATORS = {  # by `device_kind`; NVIDIA's may be followed by a form factor and a size of memory
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


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Returns the rates of a device, by its name or by the longest name that its first words are; None if unknown."""
    if device_kind in ACCELERATORS:
        return ACCELERATORS[device_kind]
    families = [name for name in ACCELERATORS if name.startswith("NVIDIA ")]
    matches = [name for name in families if device_kind.startswith((f"{name} ", f"{name}-"))]
    return ACCELERATORS[max(matches, key=len)] if matches else None
