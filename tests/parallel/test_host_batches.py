"""The placement of host batches."""

from pathlib import Path

import jax
from support import helpers
from support.devices import one_device  # noqa: F401

from bert_jax.parallel.mesh import make_mesh, put_batch
from bert_jax.training.phases import abstract_batch


def test_shapes_of_a_placed_batch_are_those_that_are_planned(dataset_dir: Path):
    config = helpers.small_config(dataset_dir, gradient_accumulation=2)
    mesh = make_mesh(config.mesh)
    (phase,) = helpers.open_phases(config)
    batch = put_batch(mesh, phase.train_loader.batch(0), 2)
    source = phase.train_loader.sources[0]
    planned = abstract_batch(mesh, config, phase.seq_len, source.predictions, source.max_sequences)
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), batch)
    assert described == planned
    assert planned["input_ids"].shape == (2, 8, 64)
