"""Bounds on a step's time, from the rates in `tracking.flops`, and the clocks of TPUs."""

from collections.abc import Sequence
from typing import Any

from bert_jax.ahead_of_time.hlo import Collective
from bert_jax.tracking.flops import Accelerator, find_accelerator

ASSUMPTIONS = (
    "matrix products, with those recomputed by remat, at the dense bf16 peak; state read and written once per step, "
    "temporaries once per microbatch; ring collectives on all links of a TPU's torus, none between slices or GPUs; all "
    "three at the same time"
)
"""Assumptions of `roofline`."""

_MATRIX_UNITS = {
    "TPU v4": (8, 128), "TPU v5 lite": (4, 128), "TPU v5e": (4, 128), "TPU v5": (8, 128), "TPU v5p": (8, 128),
    "TPU v6 lite": (4, 256), "TPU v6e": (4, 256),
}  # fmt: skip
"""Number and width of a chip's matrix units (MXUs), by `device_kind`."""


def clock_rate(device_kind: str) -> float | None:
    """Returns the clock of a TPU in Hz; None if its matrix units are not known.

    A matrix unit of width w does w x w multiply-adds a cycle, of 2 FLOPs each, so that the clock is
    peak / (units x w x w x 2):

        v4   275e12 / (8 x 128 x 128 x 2) = 1.05 GHz, the clock that Google states
        v5e  197e12 / (4 x 128 x 128 x 2) = 1.50 GHz
        v5p  459e12 / (8 x 128 x 128 x 2) = 1.75 GHz, the clock that Google states
        v6e  918e12 / (4 x 256 x 256 x 2) = 1.75 GHz
    """
    accelerator = find_accelerator(device_kind)
    if device_kind not in _MATRIX_UNITS or accelerator is None:
        return None
    units, width = _MATRIX_UNITS[device_kind]
    return accelerator.peak_flops / (units * width * width * 2)


def roofline(
    accelerator: Accelerator, *, flops: float, memory_bytes: float, collectives: Sequence[Collective] | None = None
) -> dict[str, Any]:
    """Returns lower bounds, in seconds, of a step with `flops` and `memory_bytes` on each device; see `ASSUMPTIONS`.

    `at_least_seconds` is the longest, that of `bound`: compute, memory or network. Without a torus, or with
    `collectives` None (unknown), there is no network bound; without a known bandwidth of the memory, the memory's is 0.
    """
    network, torus = None, accelerator.torus
    if torus and collectives is not None:
        sent = sum(collective.bytes_sent for collective in collectives if not collective.between_slices)
        network = sent / (torus.link * 2 * torus.axes)
    memory = memory_bytes / accelerator.hbm if accelerator.hbm else 0.0
    parts = {"compute": flops / accelerator.peak_flops, "memory": memory, "network": network}
    bound = max(parts, key=lambda part: parts[part] or 0.0)
    return {
        "at_least_seconds": parts[bound], "bound": bound, **{f"{part}_seconds": parts[part] for part in parts},
        "assumes": ASSUMPTIONS,
    }  # fmt: skip
