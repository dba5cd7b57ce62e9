"""Runs on devices that are as strict as TPUs and GPUs, see `support.strict_device`; and the strictness itself."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import helpers
from support.devices import all_devices, one_device  # noqa: F401
from support.runs import rows_without_times
from support.strict_device import StrictDeviceError, StrictProgram, strict_devices

import bert_jax
from bert_jax.batch import HostBatch
from bert_jax.config import FinetuneConfig, PretrainConfig, load_config
from bert_jax.config_keys import MeshKeys
from bert_jax.errors import BertJaxError, Interrupted
from bert_jax.finetuning.finetune import search
from bert_jax.parallel.mesh import make_mesh, put_batch, put_flag
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.pretrain import pretrain


@pytest.fixture
def strict() -> Any:
    with strict_devices():
        yield


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshKeys(data=2, fsdp=2, tensor=2), jax.devices())


# --- The strictness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [np.asarray, float, lambda x: x.item(), lambda x: x.copy_to_host_async(), "package"])
def test_implicit_copies_to_the_host_are_refused_in_a_guard_and_in_the_package(read, strict):
    x = jnp.float32(2)
    if read == "package":
        place = str(Path(bert_jax.__file__).parent / "some_module.py")
        with pytest.raises(StrictDeviceError, match=r"some_module\.py:1"):
            eval(compile("float(x)", place, "eval"), {"x": x})
    else:
        with jax.transfer_guard("disallow"), pytest.raises(StrictDeviceError):
            read(x)
    with jax.transfer_guard("disallow"):
        assert jax.device_get(x) == 2


def test_arrays_share_no_memory_with_the_host(strict):
    given = np.zeros((256, 256), np.float32)
    array = jax.device_put(given)
    read = jax.device_get(array)
    given[:] = 1
    assert not np.shares_memory(read, np.from_dlpack(array))
    assert float(array.sum()) == 0
    with pytest.raises(StrictDeviceError, match=r"\(256, 256\)"):
        StrictProgram(jax.jit(jnp.sum), lambda *_: ())(array)


def test_donated_arrays_are_deleted(strict):
    program = StrictProgram(jax.jit(lambda x: x + 1, donate_argnums=0), lambda arguments, _: arguments)
    array = jnp.zeros(1000)
    view = np.asarray(array)
    program(array)
    assert array.is_deleted()
    assert view[0] == 0
    with pytest.raises(StrictDeviceError, match="donated"):
        program(array)


def test_replicas_that_differ_are_refused(mesh, strict):
    parts = [jax.device_put(np.float32([device.id % 2]), device) for device in mesh.devices.flat]
    array = jax.make_array_from_single_device_arrays((1,), NamedSharding(mesh, PartitionSpec()), parts)
    with pytest.raises(StrictDeviceError, match="replicas differ"):
        StrictProgram(jax.jit(jnp.sum), lambda *_: ())(array)


# --- What runs hand to devices ---------------------------------------------------------------------------------------


def test_stop_flags_of_processes_may_differ_since_no_element_has_replicas(mesh):
    flag = put_flag(mesh, True)
    places = [shard.index for shard in flag.addressable_shards]
    assert len(set(map(str, places))) == mesh.size == len(flag)
    assert jax.device_get(flag).tolist() == [1] * mesh.size


def test_batches_are_copied_from_buffers_that_may_be_reused(mesh):
    buffer: HostBatch = {"input_ids": np.zeros((8, 4096), np.int32)}
    batch = put_batch(mesh, buffer)
    buffer["input_ids"][:] = 7
    assert int(batch["input_ids"].max()) == 0


# --- Runs ------------------------------------------------------------------------------------------------------------


class Stop(SimpleNamespace):
    """A stop signal that is received after a number of looks."""

    def __init__(self, looks: int):
        super().__init__(looks=looks)

    @property
    def received(self) -> signal.Signals | None:
        self.looks -= 1
        return signal.SIGTERM if self.looks < 0 else None


def config_of(dataset_dir: Path, **overrides: object) -> PretrainConfig:
    settings = {
        "total_steps": 6, "checkpoint__every_steps": 2, "eval_every_steps": 3, "eval_batches": 1, "log_every_steps": 1,
        "tracking__samples": 2, "model__num_hidden_layers": 1, "eval_at_start": True, "checkpoint__milestones": "(0,)",
        "phases": "({'steps': 3}, {'steps': 3, 'objective.nsp': False})",
    }  # fmt: skip
    return helpers.small_config(dataset_dir, **{**settings, **overrides})


def test_pretraining_with_all_hooks_stops_and_resumes(strict, dataset_dir: Path, tmp_path: Path):
    pretrain(config_of(dataset_dir, profile__steps="2:3"), str(tmp_path / "straight"))
    with pytest.raises(Interrupted):
        pretrain(config_of(dataset_dir), str(tmp_path / "stopped"), stop=Stop(3))
    assert 0 < helpers.kept_steps(tmp_path / "stopped")[-1] < 6
    pretrain(config_of(dataset_dir), str(tmp_path / "stopped"))
    assert rows_without_times(tmp_path / "straight") == rows_without_times(tmp_path / "stopped")
    assert any("samples" in row for row in helpers.rows(tmp_path / "straight"))


@pytest.mark.long
def test_pretraining_on_all_axes_of_a_mesh(strict, all_devices, dataset_dir: Path, tmp_path: Path):  # noqa: F811
    mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2, "mesh__zero1": True, "gradient_accumulation": 2}
    pretrain(config_of(dataset_dir, total_steps=4, phases="()", **mesh), str(tmp_path))
    assert helpers.kept_steps(tmp_path)[-1] == 4


def test_nonfinite_steps_end_with_a_checkpoint(strict, dataset_dir: Path, tmp_path: Path):
    config = config_of(dataset_dir, optimizer__learning_rate=1e30, max_nonfinite_steps=2, eval_at_start=False)
    with pytest.raises(BertJaxError, match=r"max_nonfinite_steps=2\b"):
        pretrain(config, str(tmp_path))
    assert open_checkpoint(str(tmp_path)).step > 2


def test_a_training_loop_of_ones_own(strict, dataset_dir: Path, tmp_path: Path):
    training = bert_jax.Training(config_of(dataset_dir, phases="()"))
    state = training.initial_state()
    for _, batch in training.batches():
        with jax.transfer_guard("disallow"):
            state, _ = training.step(state, batch)
    assert training.evaluate(state)["mlm_loss"] > 0
    training.save(str(tmp_path / "own"), state)
    assert bert_jax.load(str(tmp_path / "own")).embed("the ship .").shape == (1, 32)


@pytest.mark.long
def test_finetuning_with_a_search(strict, dataset_dir: Path, tmp_path: Path):
    pretrain(config_of(dataset_dir, phases="()", total_steps=3), str(tmp_path / "encoder"))
    for name in ("train.csv", "dev.csv"):
        (tmp_path / name).write_text("text,label\n" + "the ship .,sea\nthe owl .,night\n" * 4)
    values = {
        "init": tmp_path / "encoder", "data.path": tmp_path, "task.train": "train.csv", "task.dev": "dev.csv",
        "task.max_seq_len": 16, "num_epochs": 2, "global_batch_size": 8,
        "search.learning_rates": "(1e-2, 1e-3)", "search.seeds": "(0,)",
    }  # fmt: skip
    config = load_config("finetune/text", [(key, str(v)) for key, v in values.items()], kind=FinetuneConfig)
    assert len(search(config, str(tmp_path / "runs"))["by_learning_rate"]) == 2


def test_errors_of_a_device_end_the_run_and_save_nothing_after_them(
    strict, dataset_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A device reports an error when a result is read, after later work was dispatched."""
    get = jax.device_get

    def fail(values: Any) -> Any:
        if isinstance(values, dict) and "grad_norm" in values and (steps.append(0) or len(steps)) == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: the device halted")
        return get(values)

    steps: list[int] = []
    monkeypatch.setattr(jax, "device_get", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="halted"):
        pretrain(config_of(dataset_dir, phases="()"), str(tmp_path))
    monkeypatch.undo()
    assert open_checkpoint(str(tmp_path)).step == 2
    assert [row["step"] for row in helpers.train_rows(tmp_path)] == [1, 2]
