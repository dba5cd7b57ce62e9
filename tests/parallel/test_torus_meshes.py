"""Meshes of TPUs that this machine lacks: every division of a topology, and neighbours on its torus."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from bert_jax.ahead_of_time.compiled_step import open_target
from bert_jax.config_keys import MeshKeys
from bert_jax.errors import InputError
from bert_jax.parallel.mesh import MESH_AXES, make_mesh

pytest.importorskip("libtpu", reason="needs the tpu-aot extra")

FLAT = ("2x2", "2x4", "4x2", "4x4", "4x8", "8x8", "8x16", "16x16")
DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12", "4x8x8", "8x8x8")
SHAPES = {"v4": (*DEEP, "8x8x16"), "v5e": FLAT, "v5p": (*DEEP, "8x8x16"), "v6e": FLAT, "tpu7x": DEEP}
ALL = [
    (f"{chip}:{shape}", slices)
    for chip, shapes in SHAPES.items()
    for shape in shapes
    for slices in (1, 2, 3)
    if np.prod([int(size) for size in shape.split("x")]) * slices <= 1024
]
QUICK = [
    ("v4:2x2x4", 1), ("v4:4x4x4", 1), ("v5e:2x2", 1), ("v5e:4x8", 1), ("v5e:4x4", 3), ("v5p:2x2x1", 1),
    ("v5p:4x4x8", 1), ("v6e:4x4", 1), ("v6e:8x8", 2), ("tpu7x:2x2x4", 1), ("tpu7x:4x4x4", 2),
]  # fmt: skip


def divisions(count: int, slices: int) -> Iterator[tuple[int, int, int]]:
    """Yields every (data, fsdp, tensor) of `count` devices in which `tensor` stays within a slice."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    for tensor, fsdp in itertools.product(divisors, divisors):
        data, left = divmod(count, fsdp * tensor)
        if left == 0 and fsdp % (slices // np.gcd(data, slices)) == 0:
            yield data, fsdp, tensor


def is_block(places: np.ndarray) -> np.ndarray:
    """Returns, for places [groups, devices, coordinates], whether the devices of a group fill a cuboid."""
    return (np.ptp(places, axis=1) + 1).prod(-1) == places.shape[1]


def problems(topology: str, slices: int) -> list[str]:
    """Lists what is wrong with the meshes of a topology.

    Each group of devices along `tensor` is a cuboid of the torus, as is each along `fsdp` x `tensor` within a slice,
    and consecutive devices of a group on one line are neighbours. A group along `fsdp` is a cuboid where it and
    `tensor` have the sizes of two dimensions, in tori that JAX does not order as one ring.
    """
    devices = open_target(topology, slices).devices
    places = np.array([[*device.coords, device.core_on_chip] for device in devices])
    torus, slice_of = places.max(0) + 1, np.array([getattr(device, "slice_index", 0) for device in devices])
    numbers = {device: number for number, device in enumerate(devices)}
    is_ring = len(devices) // slices <= 32 and not topology.startswith(("v4", "v5p"))
    found = []
    for sizes in divisions(len(devices), slices):
        inferred = MESH_AXES[sum(sizes) % 3]
        mesh = make_mesh(MeshKeys(**{**dict(zip(MESH_AXES, sizes, strict=True)), inferred: -1}), devices)
        grid = np.vectorize(numbers.__getitem__)(mesh.devices)
        if grid.shape != sizes or len(np.unique(grid)) != len(devices):
            found.append(f"{sizes}: {grid.shape}")
        data, fsdp, tensor = sizes
        fsdp //= slices // np.gcd(data, slices)
        within = grid.reshape(data, -1, fsdp, tensor)  # the devices along `fsdp` within a slice are consecutive
        whole = tensor == 1 or (tensor in torus and fsdp in torus and not is_ring)
        for name, group, is_compact in (
            ("tensor", grid.reshape(-1, tensor), True),
            ("fsdp", within.swapaxes(2, 3).reshape(-1, fsdp), whole),
            ("fsdp x tensor", within.reshape(-1, fsdp * tensor), True),
        ):
            blocks = is_block(places[group])
            if np.ptp(slice_of[group], axis=1).any() or (is_compact and not blocks.all()):
                found.append(f"{sizes}: groups along {name} are scattered")
            lines = places[group][blocks & (np.ptp(places[group], axis=1).astype(bool).sum(-1) == 1)]
            if (np.abs(np.diff(lines, axis=1)).sum(-1) > 1).any():
                found.append(f"{sizes}: consecutive devices along {name} are not neighbours")
    return found


@pytest.mark.parametrize(("topology", "slices"), QUICK)
def test_every_division_of_a_topology_is_a_mesh_of_neighbours(topology: str, slices: int):
    assert problems(topology, slices) == []


@pytest.mark.long
def test_every_division_of_all_topologies_is_a_mesh_of_neighbours():
    found = {f"{topology}, {slices} slices": problems(topology, slices) for topology, slices in ALL}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("sizes", [(-1, 3, 1), (5, 1, 1), (-1, 1, 32)])
def test_sizes_that_do_not_divide_a_topology_are_refused(sizes: tuple[int, int, int]):
    with pytest.raises(InputError, match=r"mesh\.data=.*\b16 devices|mesh\.data=.*got 16"):
        make_mesh(MeshKeys(*sizes), open_target("v6e:4x4").devices)
