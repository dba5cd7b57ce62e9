"""The training step: a pure function of (state, batch), jitted in one visible place."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch
from bert_jax.model.bert import Parameters
from bert_jax.model.layers import row_keys
from bert_jax.parallel.mesh import batch_mesh_axes
from bert_jax.parallel.sharding import (
    gather_model,
    manual_spec,
    mark_varying,
    reduce_gradients,
    shard_map_over_batch,
    varying_zeros,
)
from bert_jax.parallel.step_program import TrainStep
from bert_jax.training import objectives
from bert_jax.training.objectives import Objective
from bert_jax.training.optimizer import AdamState
from bert_jax.training.state import StateSpec, TrainState, key_data

Metrics = dict[str, jax.Array]


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
    the model, which are not in `spec.moments`, are not differentiated and count in no norm.

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
        model = gather_model(spec.graph, {**parameters, **trained}, shardings, gradient_reduce_dtype)
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
        trained = spec.trained(parameters)

        def microbatch_gradients(rows: jax.Array, microbatch: Batch[jax.Array]) -> tuple[Parameters, Metrics]:
            value_and_grad = jax.value_and_grad(compute_loss, has_aux=True)
            (loss, means), gradients = value_and_grad(trained, parameters, microbatch, row_keys(key, rows), counts)
            return gradients, {"loss": loss, **means}

        def accumulate(total: Any, rows_and_microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, microbatch_gradients(*rows_and_microbatch)), None

        if len(rows) == 1:  # XLA:TPU copies twice for a loop of one iteration
            gradients, metrics = microbatch_gradients(*jax.tree.map(lambda entry: entry[0], (rows, batch)))
        else:
            zeros = varying_zeros(mesh, (trained, {"loss": jnp.float32(0), **counts}))
            (gradients, metrics), _ = jax.lax.scan(accumulate, zeros, (rows, batch))
        gradients = reduce_gradients(gradients, spec.trained(shardings), spec.moments, gradient_reduce_dtype)
        return gradients, jax.lax.psum(metrics, batch_mesh_axes(mesh))

    def train_step(
        state: TrainState, batch: Batch[jax.Array], seed_data: jax.Array, schedule: optax.Schedule
    ) -> tuple[TrainState, Metrics]:
        entries = batch.copy()
        asked_to_stop = entries.pop("stop", None)

        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed_data), 1), state.step)
        shape = entries["input_ids"].shape[:2]
        rows = jnp.arange(math.prod(shape)).reshape(shape)  # of the global batch, for any number of microbatches
        # Gradients come out with the shardings of the moments, which update them.
        specs, moment_specs = (jax.tree.map(manual_spec, tree) for tree in (shardings, spec.moments))
        sharded, replicated = PartitionSpec(None, batch_mesh_axes(mesh)), PartitionSpec()
        gradients, metrics = shard_map_over_batch(
            local_gradients, mesh, (specs, sharded, sharded, replicated, replicated), (moment_specs, replicated)
        )(state.parameters, entries, rows, key, objective.denominators(entries))

        state, metrics = apply_gradients(spec, optimizer, state, gradients, metrics, schedule(state.step))
        return state, metrics if asked_to_stop is None else {**metrics, "stop": asked_to_stop.max()}

    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        train_step,
        in_shardings=(spec.shardings, None, replicated, replicated),  # a batch has its own: see `put_batch`, `put_flag`
        out_shardings=(spec.shardings, replicated),
        donate_argnums=0,
        compiler_options=dict(compiler_options or {}) or None,
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
