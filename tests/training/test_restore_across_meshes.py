"""A state saved on one mesh and restored on another: the same numbers, and on each device its own piece alone."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from support import models

from bert_jax.config import load_config
from bert_jax.parallel.mesh import make_mesh
from bert_jax.sections import to_dict
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.pretrain import plan_state

MODEL = dataclasses.replace(models.SMALL, num_hidden_layers=1)
MESHES = {
    "data8": {"data": 8},
    "data8_zero1": {"data": 8, "zero1": True},
    "fsdp8": {"data": 1, "fsdp": 8},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "reversed_fsdp4_tensor2": {"data": 1, "fsdp": 4, "tensor": 2},
}


def spec_on(name: str):
    overrides = [(f"mesh.{key}", str(value)) for key, value in MESHES[name].items()]
    config = load_config("bert_tiny", overrides)
    devices = jax.devices()[:: -1 if name.startswith("reversed") else 1]
    return config, plan_state(make_mesh(config.mesh, devices), config, MODEL)[1]


def bytes_on(device: jax.Device, *, without: list[jax.Array]) -> int:
    """Returns the bytes of all buffers that live on `device` and belong to none of the arrays in `without`.

    An array and its shards, which are live arrays as soon as somebody looks at them, share one buffer.
    """

    def buffers(arrays: list[jax.Array]) -> dict[int, int]:
        shards = (shard for array in arrays for shard in array.addressable_shards if shard.device == device)
        return {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}

    excluded = buffers(without)
    return sum(size for address, size in buffers(jax.live_arrays()).items() if address not in excluded)


@pytest.fixture
def other_arrays():
    """Arrays on every device that live through the test, as an earlier test may leave them behind."""
    _, spec = spec_on("data8")
    return jax.tree.map(lambda leaf: jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding), spec.abstract)


@pytest.mark.usefixtures("other_arrays")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("fsdp8", "data8_zero1", marks=pytest.mark.long),
        ("data8_zero1", "data2_fsdp2_tensor2"),
        pytest.param("data2_fsdp2_tensor2", "reversed_fsdp4_tensor2", marks=pytest.mark.long),
    ],
)
def test_a_state_comes_back_on_any_mesh(before, after, tokenizer: Tokenizer, tmp_path: Path):
    config, spec = spec_on(before)
    state = spec.make()
    moments = jax.tree.map(lambda p: p + 1, state.parameters)
    state.optimizer_state[1].mu.update(jax.device_put(moments, spec.trained(spec.shardings.parameters)))
    expected = jax.device_get(state)
    checkpointer = Checkpointer(
        epath.Path(tmp_path), {"config": to_dict(config), "tokenizer": tokenizer.to_json()}, keep=1
    )
    checkpointer.save(0, state, MODEL, {"datasets": ["made"]})
    checkpointer.wait()
    others = jax.live_arrays()  # this state among them, for as long as somebody holds it
    _, spec = spec_on(after)
    _, restored, _ = checkpointer.restore(0, spec.abstract)
    held = bytes_on(jax.devices()[0], without=others)
    checkpointer.close()
    pieces = [math.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(spec.abstract)]
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(spec.abstract))
    assert held < sum(pieces) + whole / 4  # no second copy of what is cut, and none of what others hold
    for leaf, planned, value in zip(*map(jax.tree.leaves, (restored, spec.abstract, expected)), strict=True):
        assert leaf.sharding == planned.sharding
        np.testing.assert_array_equal(leaf, value)
    parameters = open_checkpoint(str(tmp_path)).load_parameters(spec.shardings.parameters)
    jax.tree.map(np.testing.assert_array_equal, parameters, expected.parameters)
