"""The training state, its plan, and the step: a pure function of (state, batch), jitted in one visible place."""

import functools
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch
from bert_jax.config_keys import RunConfig
from bert_jax.errors import InputError
from bert_jax.model import BertConfig, abstract_parameters, initialize
from bert_jax.model.bert import Parameters
from bert_jax.model.layers import row_keys
from bert_jax.parallel.mesh import AnyMesh, batch_mesh_axes, put_everywhere
from bert_jax.parallel.sharding import (
    gather_along_data,
    gather_model,
    like_parameters,
    manual_spec,
    mark_varying,
    parameter_shardings,
    reduce_gradients,
    shard_along_data,
    shard_bytes,
    shard_map_over_batch,
    stack_layers,
)
from bert_jax.training import objectives
from bert_jax.training.objectives import Objective
from bert_jax.training.optimizer import AdamState

Metrics = dict[str, jax.Array]

_LEVEL = "xla_backend_optimization_level"

UNROLLED_LAYERS = {"cpu": 12, "tpu": 24}
"""Most layers that are unrolled by default on a platform; more would take long to compile."""


# --- Settings of the programs -----------------------------------------------------------------------------------------


def compute_dtype(name: str, platform: str | None = None) -> jnp.dtype:
    """Returns the type that `dtype` names; "auto" is float32 on platform "cpu" and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"
    return jnp.dtype(name)


def shards_state(setting: bool | str, platform: str) -> bool:
    """Returns whether the state is sharded along `data`, by the config's `mesh.zero1`: a bool, or "auto".

    On a TPU it takes the update of all parameters from every chip, and no more traffic than a sum of gradients.
    """
    return platform == "tpu" if setting == "auto" else bool(setting)


def model_settings(config: RunConfig, num_layers: int, platform: str, mesh: AnyMesh) -> dict[str, Any]:
    """Returns the settings of a run's model on devices of `platform`, for `abstract_parameters`.

    A scan over the layers stacks arrays for the backward pass, which takes 5 to 10% of a training step on a CPU and a
    third on a TPU, where unrolled layers take three times as long to compile. Along both `fsdp` and `tensor` XLA:TPU
    aborts while it partitions unrolled layers.
    """
    aborts = platform == "tpu" and mesh.shape["fsdp"] > 1 and mesh.shape["tensor"] > 1
    unrolled = 0 if aborts else UNROLLED_LAYERS.get(platform, 0)
    return {
        "dtype": compute_dtype(config.dtype, platform), "attention": config.attention, "remat": config.remat,
        "scan_layers": num_layers > unrolled if config.scan_layers == "auto" else config.scan_layers,
    }  # fmt: skip


def quick_compile_options(mesh: AnyMesh) -> dict[str, int | bool]:
    """Returns options with which LLVM compiles for CPUs in a third to two thirds of the default's time.

    With jaxlib 0.10 a step of fine-tuning runs as fast as with the default, and an initial state has the same bits.
    Returns no options for other devices, for an `AbstractMesh`, and if XLA_FLAGS has a level, which is kept.
    """
    is_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    if not is_cpu or _LEVEL in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_LEVEL: 1, "xla_llvm_disable_expensive_passes": True}


_OVERLAP_REDUCTION = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 4 << 20,
}
"""Options by which XLA:TPU sums the gradients of each weight beside the product of another one.

By default it sums all of them at once, at the end, with nothing to run beside. On TPU v4, whose vector memory is an
eighth of v5e's, a product fused with a sum does not fit.
"""


# --- State ------------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Pytree of arrays, or of their shapes or shardings. Counters are int32 scalars.

    `step` counts consumed batches, with applied or skipped updates. `nonfinite_steps` counts skipped updates,
    `nonfinite_streak` the current number of them in a row.
    """

    step: Any
    parameters: Parameters
    optimizer_state: Any
    nonfinite_steps: Any
    nonfinite_streak: Any


@dataclass(frozen=True)
class StateSpec:
    """Plan of a state: the model's graph, shapes and shardings, and the function that makes it.

    A parameter and its moments are sharded alike, and its update is computed so. `gathered` has the shardings of the
    parameters that a step computes with, which `data` does not shard.
    """

    graph: nnx.GraphDef[Any]
    abstract: TrainState  # of jax.ShapeDtypeStruct with shardings
    shardings: TrainState
    gathered: Parameters  # shardings
    frozen: Collection[str]  # parts of the model without moments
    seed: int
    initialize: Any  # (key of the seed, given parts of the parameters) -> TrainState; jitted

    def make(self, given: Parameters | None = None) -> TrainState:
        """Makes the initial state, directly in its shardings; `given` parts of the parameters replace random ones."""
        return self.initialize(key_data(self.seed), given)

    def trained(self, tree: Parameters) -> Parameters:
        """Drops the frozen parts of the model from a tree like the parameters."""
        return drop_parts(self.frozen, tree)


def key_data(seed: int) -> np.ndarray:
    """Returns the key of a seed as numbers, a program's argument on any number of hosts."""
    return jax.device_get(jax.random.key_data(jax.random.key(seed)))


def describe_state(
    mesh: AnyMesh,
    model: BertConfig,
    optimizer: optax.GradientTransformationExtraArgs,
    seed: int,
    *,
    zero1: bool = False,
    frozen: Collection[str] = (),
    **settings: Any,
) -> StateSpec:
    """Plans the state of a run; `settings` go to `initialize`. On an `AbstractMesh` it cannot be made.

    With `zero1` parameters and moments are sharded along `data`. The optimizer does not update `frozen` parts.
    """
    graph, shapes, info = abstract_parameters(model, **settings)

    def make(seed_data: jax.Array, given: Parameters | None = None) -> TrainState:
        seed_key = jax.random.wrap_key_data(seed_data)
        _, parameters = initialize(model, jax.random.fold_in(seed_key, 0), **settings)
        # XLA drops the random init of replaced parameters as dead code, which saves seconds of compilation.
        parameters |= given or {}
        # Each counter is a separate array: donated buffers must not be shared.
        zero = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return TrainState(zero[0], parameters, optimizer.init(drop_parts(frozen, parameters)), zero[1], zero[2])

    abstract = jax.eval_shape(make, key_data(seed))
    replicated = NamedSharding(mesh, PartitionSpec())
    gathered = parameter_shardings(mesh, info)
    parameters = shard_along_data(shapes, gathered, info) if zero1 else gathered
    trained, moments = (drop_parts(frozen, tree) for tree in (shapes, parameters))
    shardings = TrainState(
        step=replicated,
        parameters=parameters,
        optimizer_state=like_parameters(mesh, abstract.optimizer_state, trained, moments),
        nonfinite_steps=replicated,
        nonfinite_streak=replicated,
    )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )
    options = quick_compile_options(mesh) or None
    jitted = jax.jit(make, out_shardings=shardings, donate_argnums=1, compiler_options=options)
    return StateSpec(graph, abstract, shardings, gathered, frozen, seed, jitted)


def drop_parts(parts: Collection[str], parameters: Parameters) -> Parameters:
    """Drops some parts of the model from `parameters`, or from a tree like them."""
    return {part: value for part, value in parameters.items() if part not in parts}


def check_memory(state: TrainState, devices: Sequence[jax.Device]) -> None:
    """Raises InputError if a state of jax.ShapeDtypeStruct, without gradients and activations, exceeds the memory.

    `devices` are those of this process that the state is on.
    """
    device = devices[0]
    if device.platform == "cpu":  # the devices of a process share the memory of the machine
        memory, sharing = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), len(devices)
    else:
        memory, sharing = (device.memory_stats() or {}).get("bytes_limit", 0), 1
    needed = sharing * shard_bytes(state)
    if memory and needed > memory:
        raise InputError(
            f"parameters and optimizer need {needed / 2**30:,.1f} GiB of memory, but {device.device_kind} has "
            f"{memory / 2**30:,.1f} GiB; use a smaller model.hidden_size or model.num_hidden_layers, or more devices "
            "along mesh.fsdp"
        )


# --- Step -------------------------------------------------------------------------------------------------------------


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

    def lower(self, state: Any, batch: Batch[Any], platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
        """Lowers the step to the compiler's input, for this platform or others, such as ("tpu",).

        State and batch may be `jax.ShapeDtypeStruct`s.
        """
        traced = self._jitted.trace(state, batch, *self._run_arguments)
        return traced.lower(lowering_platforms=platforms)


def make_train_step(
    mesh: Mesh,
    spec: StateSpec,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    objective: Objective,
    *,
    seed: int,
    gradient_reduce_dtype: jnp.dtype = jnp.float32,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Makes the training step `(state, batch) -> (state, metrics)`; its input state is donated.

    The batch has a leading axis of microbatches: [A, B / A, ...]. Losses are sums over the global batch divided by its
    own counts, so that A changes memory and nothing else. A step whose loss, gradient or update is not finite is
    skipped: parameters and the state of the optimizer, whichever it is, stay, and the step is counted. Frozen parts of
    the model are not differentiated and count in no norm.

    Args:
      mesh: the devices.
      spec: plan of the state.
      optimizer: maps gradients to a direction, of which the step subtracts the learning rate's multiple. Its update is
        given the global norm of the gradients as `grad_norm`, if it takes more arguments.
      schedule: maps a step to the learning rate. The leaves of a pytree (`learning_rate_schedule`) are arguments of the
        program, as the seed is: runs that differ only in these share one program in JAX's cache.
      objective: the loss and its auxiliary metrics.
      seed: dropout keys are functions of it, the step and the row of the global batch.
      gradient_reduce_dtype: type of the gradient sum across devices; within a device it is float32.
      compiler_options: options of XLA for this program.
    """
    shardings = spec.shardings.parameters

    def compute_loss(
        trained: Parameters, parameters: Parameters, microbatch: Batch[jax.Array], keys: jax.Array,
        counts: objectives.Sums,
    ) -> tuple[jax.Array, objectives.Sums]:  # fmt: skip
        parameters = stack_layers({**parameters, **trained})
        model = gather_model(spec.graph, parameters, spec.gathered, gradient_reduce_dtype)
        # `counts` are the denominators of the global batch, so that the sum of all devices' results is its mean.
        means = objectives.divide(objective.sums(model, microbatch, keys), counts)
        return objective.loss(means), means

    def local_gradients(
        parameters: Parameters, batch: Batch[jax.Array], rows: jax.Array, key: jax.Array, counts: objectives.Sums
    ) -> tuple[Parameters, Metrics]:
        """Computes gradients and metrics of one device's rows, and reduces them over devices once, at the end.

        Along `fsdp` the gradients of each microbatch are reduced by the backward pass of `gather_model`.
        """
        parameters = mark_varying(parameters, shardings)  # or autodiff would sum gradients in every microbatch
        parameters = gather_along_data(spec.graph, parameters, shardings)
        trained = spec.trained(parameters)

        def microbatch_gradients(rows: jax.Array, microbatch: Batch[jax.Array]) -> tuple[Parameters, Metrics]:
            value_and_grad = jax.value_and_grad(compute_loss, has_aux=True)
            (loss, means), gradients = value_and_grad(trained, parameters, microbatch, row_keys(key, rows), counts)
            gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
            return gradients, {"loss": loss, **means}

        def accumulate(total: Any, rows_and_microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, microbatch_gradients(*rows_and_microbatch)), None

        if len(rows) == 1:  # XLA:TPU copies twice for a loop of one iteration
            gradients, metrics = microbatch_gradients(*jax.tree.map(lambda entry: entry[0], (rows, batch)))
        else:
            zeros = jax.tree.map(
                lambda value: jax.lax.pcast(jnp.zeros(value.shape, jnp.float32), batch_mesh_axes(mesh), to="varying"),
                (trained, {"loss": jnp.float32(0), **counts}),
            )
            (gradients, metrics), _ = jax.lax.scan(accumulate, zeros, (rows, batch))
        gathered, sharded = spec.trained(spec.gathered), spec.trained(shardings)
        gradients = reduce_gradients(gradients, gathered, sharded, gradient_reduce_dtype)
        return gradients, jax.lax.psum(metrics, batch_mesh_axes(mesh))

    def train_step(
        state: TrainState, batch: Batch[jax.Array], seed_data: jax.Array, schedule: optax.Schedule
    ) -> tuple[TrainState, Metrics]:
        entries = batch.copy()
        asked_to_stop = entries.pop("stop", None)

        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed_data), 1), state.step)
        shape = entries["input_ids"].shape[:2]
        rows = jnp.arange(math.prod(shape)).reshape(shape)  # of the global batch, for any number of microbatches
        specs = jax.tree.map(manual_spec, shardings)
        sharded, replicated = PartitionSpec(None, batch_mesh_axes(mesh)), PartitionSpec()
        gradients, metrics = shard_map_over_batch(
            local_gradients, mesh, (specs, sharded, sharded, replicated, replicated), (spec.trained(specs), replicated)
        )(state.parameters, entries, rows, key, objective.denominators(entries))

        state, metrics = apply_gradients(spec, optimizer, state, gradients, metrics, schedule(state.step))
        return state, metrics if asked_to_stop is None else {**metrics, "stop": asked_to_stop.max()}

    replicated = NamedSharding(mesh, PartitionSpec())
    device = mesh.devices.flat[0]
    overlaps = device.platform == "tpu" and device.device_kind not in ("TPU v2", "TPU v3", "TPU v4")
    jitted = jax.jit(
        train_step,
        in_shardings=(spec.shardings, None, replicated, replicated),  # a batch has its own: see `put_batch`, `put_flag`
        out_shardings=(spec.shardings, replicated),
        donate_argnums=0,
        compiler_options={**(_OVERLAP_REDUCTION if overlaps else {}), **(compiler_options or {})} or None,
    )
    return TrainStep(jitted, mesh, key_data(seed), schedule)


@jax.named_scope("optimizer")
def apply_gradients(
    spec: StateSpec, optimizer: optax.GradientTransformation, state: TrainState, gradients: Parameters,
    metrics: Metrics, learning_rate: jax.Array,
) -> tuple[TrainState, Metrics]:  # fmt: skip
    """Returns the state after an update by the gradients of the global batch, and the metrics with those of the update.

    Where loss, gradients or update are not finite, parameters and the state of the optimizer stay as they are.
    """
    trained = spec.trained(state.parameters)
    grad_norm = optax.tree.norm(gradients)
    # The last number is about the square of the update's norm: a huge learning rate also ruins a run. The updated
    # parameters would tell exactly, in a pass of its own over all parameters and moments.
    size = float(sum(leaf.size for leaf in jax.tree.leaves(trained)))  # it may exceed an int32
    is_finite = jnp.isfinite(jnp.stack([metrics["loss"], grad_norm, jnp.square(learning_rate) * size])).all()
    direction, optimizer_state = optax.with_extra_args_support(optimizer).update(
        gradients, state.optimizer_state, trained, grad_norm=grad_norm, is_finite=is_finite
    )
    updated = jax.tree.map(lambda p, d: p - learning_rate * d, trained, direction)

    def keep(new: Any, old: Any) -> Any:
        # Adam selects its moments before it makes a direction of them. Selected here as well, XLA:CPU writes each
        # twice: a step of BERT-BASE with 2 rows takes 25% longer.
        return new if isinstance(new, AdamState) else jnp.where(is_finite, new, old)

    updated, optimizer_state = jax.tree.map(
        keep, (updated, optimizer_state), (trained, state.optimizer_state), is_leaf=lambda x: isinstance(x, AdamState)
    )
    skipped = 1 - is_finite.astype(jnp.int32)
    state = TrainState(
        step=state.step + 1,
        parameters={**state.parameters, **updated},
        optimizer_state=optimizer_state,
        nonfinite_steps=state.nonfinite_steps + skipped,
        nonfinite_streak=(state.nonfinite_streak + 1) * skipped,
    )
    return state, {
        **metrics, "learning_rate": learning_rate, "grad_norm": grad_norm,
        "nonfinite_steps": state.nonfinite_steps, "nonfinite_streak": state.nonfinite_streak,
    }  # fmt: skip
