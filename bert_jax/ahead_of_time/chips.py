"""Bounds on a step's time on TPUs, from the rates in `training.accelerators`."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.ahead_of_time.hlo import Collective
from bert_jax.tracking.accelerators import Bandwidths

ASSUMPTIONS = (
    "compute: the matrix products, with those that remat makes again, at the chip's dense bf16 peak",
    "memory, an estimate: state read and written once a step, temporaries written and read once a microbatch, at the "
    "HBM's full rate",
    "network: collectives in a ring over all links of a chip's torus at their full rate; what goes between slices is "
    "left out",
    "at least: the largest of the three, were they done at once; one after another: their sum",
)
"""Of `roofline`, for people."""


@dataclass(frozen=True)
class Roofline:
    """Seconds that a step takes at the least, part by part; see `ASSUMPTIONS`."""

    compute_seconds: float
    memory_seconds: float
    network_seconds: float | None

    @property
    def at_least(self) -> float:
        """All three at once."""
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds or 0.0)

    @property
    def one_after_another(self) -> float:
        """Nothing at once."""
        return self.compute_seconds + self.memory_seconds + (self.network_seconds or 0.0)

    @property
    def bound(self) -> str:
        """The part that is the largest."""
        parts = {"compute": self.compute_seconds, "memory": self.memory_seconds, "network": self.network_seconds or 0.0}
        return max(parts, key=lambda name: parts[name])


def roofline(
    bandwidths: Bandwidths,
    *,
    peak_flops: float,
    flops: float,
    memory_bytes: float,
    collectives: Sequence[Collective] | None,
) -> Roofline:
    """The bounds of a step that does `flops` and moves `memory_bytes` on each device; see `ASSUMPTIONS`.

    Without `collectives` (None: they are not known) there is no bound by the network.
    """
    wires = bandwidths.link * 2 * bandwidths.torus_axes
    network = None
    if collectives is not None:
        network = sum(one.bytes_sent for one in collectives if not one.between_slices) / wires
    return Roofline(flops / peak_flops, memory_bytes / bandwidths.hbm, network)
