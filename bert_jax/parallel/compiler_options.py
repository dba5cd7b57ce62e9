"""Choices between a program that compiles fast and one that runs fast, by platform."""

import os

from jax.sharding import AbstractMesh, Mesh

_LEVEL = "xla_backend_optimization_level"

UNROLLED_LAYERS = 12
"""Most layers that are unrolled on a CPU by default: more would take long to compile."""


def quick_compile_options(mesh: Mesh | AbstractMesh) -> dict[str, int | bool]:
    """Returns options with which LLVM compiles for CPUs in a third to two thirds of the default's time.

    With jaxlib 0.10 a step of fine-tuning runs as fast as with the default, and an initial state has the same bits.
    Returns no options for other devices, for an `AbstractMesh`, and if XLA_FLAGS has a level, which is kept.
    """
    is_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    if not is_cpu or _LEVEL in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_LEVEL: 1, "xla_llvm_disable_expensive_passes": True}


def scans_layers(setting: bool | str, num_layers: int, platform: str) -> bool:
    """Returns whether a program for devices of `platform` scans over the layers or unrolls them.

    `setting` is the config's `scan_layers`: a bool, or "auto". On a CPU, a scan spends 5 to 10% of a training step on
    the arrays that it stacks for the backward pass. On a TPU, unrolled layers take three times as long to compile.
    """
    if setting == "auto":
        return platform != "cpu" or num_layers > UNROLLED_LAYERS
    return bool(setting)
