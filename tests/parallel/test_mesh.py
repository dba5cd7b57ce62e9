"""Meshes over slices, and what depends on how many devices there are."""

from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from support import helpers

from bert_jax.batch import pretraining_shapes
from bert_jax.config import load_config
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.parallel.mesh import between_slices, count_slices, fill_in_accumulation, make_mesh, put_batch
from bert_jax.parallel.sharding import batch_sharding
from bert_jax.sections import to_dict
from bert_jax.training.phases import abstract_batch, fit_plan, plan_phases
from bert_jax.training.pretrain import plan_state


@pytest.mark.parametrize(
    ("sizes", "slices", "expected"),
    [
        ((16, 1, 1), 1, (1, 1, 1)),
        ((16, 1, 1), 4, (4, 1, 1)),
        ((4, 4, 2), 4, (4, 1, 1)),
        ((2, 8, 2), 4, (2, 2, 1)),
        ((1, 16, 1), 4, (1, 4, 1)),
        ((6, 4, 1), 4, (2, 2, 1)),
    ],
)
def test_only_data_and_fsdp_axes_span_slices(sizes, slices, expected):
    assert between_slices(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), slices) == expected


@pytest.mark.parametrize("sizes", [(1, 1, 16), (2, 1, 8), (3, 2, 4)])
def test_tensor_axis_across_slices_is_refused(sizes):
    with pytest.raises(InputError, match=r"mesh\.tensor=\d+: .*\b4 .*mesh\.data .*\b4,"):
        between_slices(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), 4)


def test_slices_are_counted_by_the_devices_that_have_them():
    assert count_slices(SliceDevice(number, number // 4) for number in range(12)) == 3
    assert count_slices(jax.devices()) == 1


class SliceDevice:
    """A device of one of several slices, as far as laying out a mesh looks at it."""

    def __init__(self, number: int, slice_index: int):
        self.id, self.slice_index, self.platform, self.device_kind = number, slice_index, "gpu", "made up"
        self.process_index = slice_index

    def __repr__(self):
        return f"{self.slice_index}.{self.id}"


def test_a_mesh_has_whole_slices_along_its_tensor_axis(monkeypatch: pytest.MonkeyPatch):
    laid: dict = {}
    monkeypatch.setattr("bert_jax.parallel.mesh.Mesh", lambda grid, axes, axis_types: laid.update(grid=grid, axes=axes))
    devices = [SliceDevice(number, number // 4) for number in (0, 4, 1, 5, 2, 6, 3, 7)]
    make_mesh(load_config("bert_tiny", [("mesh.data", "-1"), ("mesh.tensor", "2")]).mesh, devices)
    assert laid["axes"] == ("data", "fsdp", "tensor")
    assert laid["grid"].shape == (4, 1, 2)
    slices = [[device.slice_index for device in row] for row in laid["grid"][:, 0]]
    assert slices == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_slices_of_different_sizes_are_refused():
    devices = [SliceDevice(number, int(number > 2)) for number in range(8)]
    with pytest.raises(InputError, match=r"mesh\.tensor=\d+: .*\b2 "):
        make_mesh(load_config("bert_tiny").mesh, devices)


@pytest.mark.parametrize(
    ("batch", "most", "devices", "expected"),
    [(64, 8, 8, 1), (64, 4, 8, 2), (64, 3, 8, 4), (48, 4, 8, 2), (56, 6, 8, 7), (8, 100, 8, 1), (64, 1, 1, 64)],
)
def test_fewest_microbatches_that_fit_max_rows_per_device(batch, most, devices, expected):
    config = load_config(
        "bert_tiny",
        [("gradient_accumulation", "-1"), ("max_rows_per_device", str(most)), ("global_batch_size", str(batch))],
    )
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    filled = fill_in_accumulation(mesh, config)
    assert filled.gradient_accumulation == expected
    assert config.gradient_accumulation == -1
    assert batch // expected // devices <= most


def test_a_number_of_microbatches_that_is_given_stays():
    config = load_config("bert_tiny", [("gradient_accumulation", "2"), ("max_rows_per_device", "1")])
    assert fill_in_accumulation(make_mesh(config.mesh), config).gradient_accumulation == 2


def test_batch_not_divisible_by_devices_is_refused():
    overrides = [("gradient_accumulation", "-1"), ("max_rows_per_device", "4"), ("global_batch_size", "12")]
    config = load_config("bert_tiny", overrides)
    mesh = make_mesh(config.mesh)
    with pytest.raises(InputError, match=r"global_batch_size=12\b.*\b8 "):
        fit_plan(plan_phases(config)[0], mesh, 32, 1_000, "data")


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


# --- Golden files ------------------------------------------------------------------------------------------------


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
    """Compares with files that a person reviews: after a change that is meant, `--update_golden`, and read the diff."""
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
