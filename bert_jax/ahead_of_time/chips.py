"""What is known of TPU chips, and how fast a step could be on them at the very best.

Sources: Google's page on each chip for the bandwidth of its HBM (docs of Cloud TPU, "System architecture"), and "How
to Scale Your Model" (Austin et al. 2025, chapter 2) for the links between chips. Rates are of one chip.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.ahead_of_time.collectives import Collective


@dataclass(frozen=True)
class Chip:
    """Rates of a chip, in bytes/s; its FLOP/s are in `training.flops`.

    Attributes:
      hbm_bandwidth: of its memory, reads and writes together.
      link_bandwidth: of one link to a neighbour, in one direction.
      torus_axes: in how many directions of the torus, there and back, it has links.
    """

    hbm_bandwidth: float
    link_bandwidth: float
    torus_axes: int


CHIPS = {  # by the name of a topology, before its colon
    "v4": Chip(1.228e12, 4.5e10, 3),
    "v5e": Chip(8.19e11, 4.5e10, 2),
    "v5p": Chip(2.765e12, 9e10, 3),
    "v6e": Chip(1.64e12, 9e10, 2),
}

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
    chip: Chip, *, peak_flops: float, flops: float, memory_bytes: float, collectives: Sequence[Collective] | None
) -> Roofline:
    """The bounds of a step that does `flops` and moves `memory_bytes` on each chip; see `ASSUMPTIONS`.

    Without `collectives` (None: they are not known) there is no bound by the network.
    """
    wires = chip.link_bandwidth * 2 * chip.torus_axes
    network = None
    if collectives is not None:
        network = sum(one.bytes_sent for one in collectives if not one.between_slices) / wires
    return Roofline(flops / peak_flops, memory_bytes / chip.hbm_bandwidth, network)
