"""Shardings of every array of a run on several meshes, compared with golden files that a person reviews.

After a change that is meant: `pytest tests/training/test_golden_shardings.py --update_golden`, and read the diff.
"""

from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding

from bert_jax.batch import pretraining_shapes
from bert_jax.config import load_config
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import make_mesh
from bert_jax.parallel.sharding import batch_sharding
from bert_jax.sections import to_dict
from bert_jax.training.pretrain import plan_state

GOLDEN = Path(__file__).parent / "golden"
MESHES = {
    "data8": {"data": 8},
    "data8_zero1": {"data": 8, "zero1": True},
    "fsdp8": {"data": 1, "fsdp": 8},
    "data4_tensor2": {"data": 4, "tensor": 2},
    "data2_fsdp2_tensor2_zero1": {"data": 2, "fsdp": 2, "tensor": 2, "zero1": True},
}


def describe(path: tuple, shape: tuple[int, ...], sharding: NamedSharding) -> str:
    """Formats an array's name, its partition spec and its shape on one device."""
    axes = ", ".join("+".join(axis) if isinstance(axis, tuple) else str(axis or "-") for axis in sharding.spec)
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"{name}  {list(shape)}  ({axes})  {list(sharding.shard_shape(shape))}"


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("config_name", ["bert_base", "bert_large"])
def test_shardings_match_the_golden_file(config_name, mesh_name, request: pytest.FixtureRequest):
    overrides = {f"mesh.{key}": value for key, value in MESHES[mesh_name].items()}
    config = load_config(config_name, [(key, str(value)) for key, value in overrides.items()])
    mesh = make_mesh(config.mesh)
    sizes = {**to_dict(config.model), "vocab_size": 30_522}
    _, spec = plan_state(mesh, config, BertConfig.from_dict(sizes))
    lines = [
        describe(path, leaf.shape, leaf.sharding) for path, leaf in jax.tree_util.tree_leaves_with_path(spec.abstract)
    ]
    rows = batch_sharding(mesh)
    for name, (shape, _) in pretraining_shapes(config.global_batch_size, 128, 20, 1).items():
        lines.append(describe((jax.tree_util.DictKey("batch"), jax.tree_util.DictKey(name)), (1, *shape), rows))
    file = GOLDEN / f"{config_name}-{mesh_name}.txt"
    text = "\n".join(lines) + "\n"
    if request.config.getoption("--update_golden"):
        file.write_text(text)
    assert text == file.read_text()
