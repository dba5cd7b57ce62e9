"""Bounds on a step's time, from the rates in `tracking.accelerators`."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.ahead_of_time.hlo import Collective
from bert_jax.tracking.accelerators import Accelerator

ASSUMPTIONS = (
    "compute: matrix products, including those recomputed by remat, at the chip's dense bf16 peak",
    "memory, an estimate: state read and written once per step, temporaries written and read once per microbatch, at "
    "the HBM's full bandwidth",
    "network: ring collectives over all links of a TPU's torus at full bandwidth; traffic between slices is not "
    "included, and GPUs have no bound",
    "lower bound: the largest of the three, with full overlap; sequential: their sum",
)
"""Assumptions of `roofline`, as text."""


@dataclass(frozen=True)
class Roofline:
    """Lower bounds of a step's time, in seconds, for each part; see `ASSUMPTIONS`."""

    compute_seconds: float
    memory_seconds: float
    network_seconds: float | None

    @property
    def at_least(self) -> float:
        """Seconds with full overlap of the three parts."""
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds or 0.0)

    @property
    def one_after_another(self) -> float:
        """Seconds without overlap."""
        return self.compute_seconds + self.memory_seconds + (self.network_seconds or 0.0)

    @property
    def bound(self) -> str:
        """The largest part: compute, memory or network."""
        parts = {"compute": self.compute_seconds, "memory": self.memory_seconds, "network": self.network_seconds or 0.0}
        return max(parts, key=lambda name: parts[name])


def roofline(
    accelerator: Accelerator, *, flops: float, memory_bytes: float, collectives: Sequence[Collective] | None
) -> Roofline:
    """Computes the bounds of a step with `flops` and `memory_bytes` on each device; see `ASSUMPTIONS`.

    Without a torus, or with `collectives` None (unknown), there is no network bound; without a known bandwidth of the
    memory, the memory's is 0.
    """
    network, torus = None, accelerator.torus
    if torus and collectives is not None:
        sent = sum(one.bytes_sent for one in collectives if not one.between_slices)
        network = sent / (torus.link * 2 * torus.axes)
    memory = memory_bytes / accelerator.hbm if accelerator.hbm else 0.0
    return Roofline(flops / accelerator.peak_flops, memory, network)
