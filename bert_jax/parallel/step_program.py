"""The program of a jitted training step, and the arguments that a run calls it with."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.batch import Batch
from bert_jax.parallel.host_batches import put_everywhere


class TrainStep:
    """The training step of a run: `(state, batch) -> (state, metrics)`."""

    def __init__(self, jitted: Any, mesh: Mesh, seed_data: np.ndarray, schedule: Callable[[Any], Any]):
        """Takes the jitted `(state, batch, seed, schedule) -> (state, metrics)`."""
        is_tree = isinstance(schedule, jax.tree_util.Partial)
        self._run_arguments = seed_data, schedule if is_tree else jax.tree_util.Partial(schedule)
        self._jitted, self._mesh = jitted, mesh

    def __call__(self, state: Any, batch: Batch[Any]) -> tuple[Any, dict[str, jax.Array]]:
        new, metrics = self._jitted(state, batch, *self._placed)
        return new, metrics

    @functools.cached_property
    def _placed(self) -> Any:
        with jax.transfer_guard("allow"):  # the loop disallows transfers; these two are placed at the first step
            return put_everywhere(self._mesh, self._run_arguments)

    def trace(self, state: Any, batch: Batch[Any]) -> jax.stages.Traced:
        """Traces the step to a jaxpr; state and batch may be `jax.ShapeDtypeStruct`s."""
        result: jax.stages.Traced = self._jitted.trace(state, batch, *self._run_arguments)
        return result

    def lower(self, state: Any, batch: Batch[Any]) -> jax.stages.Lowered:
        """Lowers the step to the compiler's input."""
        result: jax.stages.Lowered = self.trace(state, batch).lower()
        return result


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
