"""Jitted forward passes over a mesh, for evaluation and inference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.batch import Batch
from bert_jax.model.bert import Parameters
from bert_jax.parallel.collectives import manual_spec, shard_map_over_batch
from bert_jax.parallel.mesh import batch_mesh_axes
from bert_jax.parallel.sharding import batch_sharding, gather_model


def make_forward_step(
    mesh: Mesh, graph: nnx.GraphDef[Any], shardings: Parameters, forward: Callable[..., Any], out_specs: PartitionSpec
) -> Callable[[Parameters, Batch[Any]], Any]:
    """Makes the jitted `(parameters, batch) -> forward(model, rows)` of a batch [1, B, ...]; results are replicated.

    `forward` runs on a device's rows [R, ...]; `out_specs` is that of its results in `shard_map_over_batch`.
    """

    def local_forward(parameters: Parameters, rows: Batch[jax.Array]) -> Any:
        return forward(gather_model(graph, parameters, shardings, jnp.float32), rows)

    def forward_step(parameters: Parameters, batch: Batch[jax.Array]) -> Any:
        specs = jax.tree.map(manual_spec, shardings), PartitionSpec(batch_mesh_axes(mesh))
        rows = jax.tree.map(lambda entry: entry[0], batch)
        return shard_map_over_batch(local_forward, mesh, specs, out_specs)(parameters, rows)

    forward_step.__name__ = forward.__name__  # the program's name in JAX's log and in a profile
    return jax.jit(
        forward_step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
