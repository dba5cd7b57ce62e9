"""The compiled programs of a jitted training step, and the arguments that a run calls them with."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.batch import Batch
from bert_jax.parallel.host_batches import put_everywhere

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

_SETTINGS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_threefry_partitionable": jax.threefry_partitionable,
}
"""Settings of JAX that a program is traced with. What their context managers set, they set for one thread."""

_COMPILING_THREADS = 1
"""The first step waits for its program alone, which has all cores: the compiler uses several threads itself."""


class TrainStep:
    """The training step of a run: `(state, batch) -> (state, metrics)`."""

    def __init__(self, jitted: Any, mesh: Mesh, seed_data: np.ndarray, schedule: Callable[[Any], Any]):
        """Takes the jitted `(state, batch, seed, schedule) -> (state, metrics)`."""
        is_tree = isinstance(schedule, jax.tree_util.Partial)
        self._run_arguments = seed_data, schedule if is_tree else jax.tree_util.Partial(schedule)
        self._jitted, self._mesh = jitted, mesh
        self._programs: dict[Shapes, Future[jax.stages.Compiled]] = {}

    def __call__(self, state: Any, batch: Batch[Any]) -> tuple[Any, dict[str, jax.Array]]:
        program = self._programs.get(_shapes(batch))
        step: Any = program.result() if program else self._jitted
        new, metrics = step(state, batch, *self._placed)
        return new, metrics

    def compile_ahead(self, state: Any, batches: Iterable[Batch[Any]], stack: ExitStack) -> None:
        """Compiles the step for the shapes of `batches` in other threads, in their order; a call waits for its own.

        The program is that of a call, which would trace and compile in the main thread. `stack` cancels what has not
        been started. Does nothing with several processes: their compilers may wait for each other's results.
        """
        if jax.process_count() > 1:
            return
        settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
        threads = ThreadPoolExecutor(_COMPILING_THREADS, "compile")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        for batch in batches:
            if (shapes := _shapes(batch)) not in self._programs:
                self._programs[shapes] = threads.submit(self._compile, state, batch, settings)

    def _compile(self, state: Any, batch: Batch[Any], settings: tuple[Any, ...]) -> jax.stages.Compiled:
        with ExitStack() as stack:
            for use, value in zip(_SETTINGS.values(), settings, strict=True):
                stack.enter_context(use(value))
            stack.enter_context(jax.set_mesh(self._mesh))
            return self.lower(state, batch).compile()

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


def _shapes(batch: Batch[Any]) -> Shapes:
    entries: Mapping[str, Any] = batch
    return tuple((name, entries[name].shape) for name in sorted(entries))


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
