"""A damaged checkpoint is noticed by every load, and a run falls back to the newest intact step."""

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from support import models
from support.gcs import Emulator

from bert_jax.config import load_config
from bert_jax.errors import BertJaxError, InputError
from bert_jax.parallel.mesh import make_mesh
from bert_jax.sections import to_dict
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import (
    FILE,
    DamagedError,
    newest_intact,
    newest_step,
    open_checkpoint,
    set_aside,
    step_folders,
)
from bert_jax.training.pretrain import plan_state
from bert_jax.training.train_step import StateSpec, TrainState

CONFIG = load_config("bert_tiny", [("mesh.data", "2"), ("mesh.fsdp", "4")])


@pytest.fixture(scope="module")
def spec() -> StateSpec:
    return plan_state(make_mesh(CONFIG.mesh), CONFIG, models.SMALL)[1]


@pytest.fixture(scope="module")
def saved(spec: StateSpec, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir with the steps 10, 20 and 30."""
    workdir = tmp_path_factory.mktemp("run")
    checkpointer = opened(workdir, tokenizer)
    for step in (10, 20, 30):
        checkpointer.save(step, made_state(spec, step), models.SMALL, {"datasets": ["made"]})
        checkpointer.wait()
    checkpointer.close()
    return workdir


@pytest.fixture
def workdir(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def made_state(spec: StateSpec, step: int) -> TrainState:
    """Random numbers, laid out as those of a run."""
    random = np.random.default_rng(step)

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = random.normal(size=leaf.shape) if leaf.shape else np.array(step)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(make, spec.abstract)


def opened(workdir: object, tokenizer: Tokenizer) -> Checkpointer:
    description = {"config": to_dict(CONFIG), "tokenizer": tokenizer.to_json()}
    return Checkpointer(epath.Path(workdir), description, keep=3)


def array_files(step: Path, item: str) -> list[Path]:
    """The files that hold the arrays, the largest first."""
    files = [path for path in (step / item).rglob("d/*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def flip(path: Path, place: float = 0.5, bit: int = 6) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1 << bit
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "lost": Path.unlink,
}


@pytest.mark.parametrize("flips", [6, pytest.param(60, marks=pytest.mark.long)])
def test_every_flipped_bit_is_found(flips: int, workdir: Path, spec: StateSpec, tokenizer: Tokenizer):
    """In any file of a step but those in which Orbax notes the commit, and the provenance, which nothing reads."""
    step, random = workdir / "checkpoints" / "30", np.random.default_rng(0)
    files = [
        path for path in sorted(step.rglob("*"))
        if path.is_file() and path.name not in ("_CHECKPOINT_METADATA", "commit_success.txt")
        and path.parent.name != "provenance"
    ]  # fmt: skip
    assert step / FILE in files

    def read() -> None:
        open_checkpoint(str(step)).load_parameters()
        opened_again = opened(workdir, tokenizer)
        try:
            assert opened_again.restore(30, spec.abstract)[0] == 30
        finally:
            opened_again.close()

    read()
    for path in [step / FILE, *random.choice(np.array(files), flips)]:
        content = path.read_bytes()
        flip(path, random.random(), int(random.integers(8)))
        with pytest.raises((InputError, AssertionError), match=r"checkpoints/30|20 == 30"):
            read()
        if not step.exists():  # set aside by the resume
            step.with_name("30.damaged").rename(step)
        path.write_bytes(content)
    read()


def test_the_error_names_the_changed_file(workdir: Path):
    path = array_files(workdir / "checkpoints" / "30", "parameters")[0]
    flip(path)
    with pytest.raises(DamagedError, match=rf"checkpoints/30 .*{path.name}"):
        open_checkpoint(str(workdir)).load_parameters(parts=["pooler"])


@pytest.mark.parametrize(
    ("item", "damage"),
    [
        ("parameters", "flipped"),
        ("parameters", "lost"),
        ("optimizer", "truncated"),
        pytest.param("optimizer", "empty", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_resume_falls_back_to_newest_intact_step(
    item: str,
    damage: str,
    workdir: Path,
    spec: StateSpec,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
):
    for file in array_files(workdir / "checkpoints" / "30", item):  # one may hold nothing that is referred to
        DAMAGE[damage](file)
    checkpointer = opened(workdir, tokenizer)
    step, state, _ = checkpointer.restore(30, spec.abstract)
    assert (step, int(state.step)) == (20, 20)
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["10", "20", "30.damaged"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("checkpoints/30 " in line for line in warnings)
    assert any("30.damaged" in line for line in warnings)
    checkpointer.save(30, made_state(spec, 30), models.SMALL, {"datasets": ["made"]})
    checkpointer.close()
    assert newest_step(epath.Path(workdir)).name == "30"


def test_a_step_that_orbax_does_not_save_is_an_error(workdir: Path, spec: StateSpec, tokenizer: Tokenizer):
    """Another run has saved a later one."""
    with (
        closing(opened(workdir, tokenizer)) as checkpointer,
        pytest.raises(BertJaxError, match=r"after 25, .*not"),
    ):
        checkpointer.save(25, made_state(spec, 25), models.SMALL, {"datasets": ["made"]})


def test_without_an_intact_step_nothing_is_moved(workdir: Path, spec: StateSpec, tokenizer: Tokenizer):
    for step in (10, 20, 30):
        for file in array_files(
            workdir / "checkpoints" / str(step), "parameters"
        ):  # one may hold nothing that is referred to
            flip(file)
    checkpointer = opened(workdir, tokenizer)
    with pytest.raises(DamagedError, match="checkpoints/30 "):
        checkpointer.restore(30, spec.abstract)
    checkpointer.close()
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["10", "20", "30"]


@pytest.mark.parametrize("item", ["tokenizer", "bert_config", "config", "position"])
def test_a_changed_item_of_json_is_noticed(item: str, workdir: Path):
    path = workdir / "checkpoints" / "30" / item / "metadata"
    text = path.read_text()
    changed = {
        "tokenizer": ('"fox"', '"fux"'), "bert_config": ('"hidden_size": 32', '"hidden_size": 33'),
        "config": ('"seed": 0', '"seed": 1'), "position": ('"made"', '"mate"'),
    }[item]  # fmt: skip
    assert changed[0] in text
    path.write_text(text.replace(*changed))
    with pytest.raises(DamagedError, match=rf"checkpoints/30 .*{item}"):
        open_checkpoint(str(workdir))
    assert newest_intact(epath.Path(workdir)).step == 20


def test_a_newer_version_is_refused_and_not_taken_for_damage(workdir: Path):
    """An earlier step must not replace it: the run would repeat what a newer version has done."""
    path = workdir / "checkpoints" / "30" / FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format_version": content["format_version"] + 100}))
    for read in (open_checkpoint, lambda folder: newest_intact(epath.Path(folder))):
        with pytest.raises(InputError, match=rf"checkpoints/30/{FILE}: format_version=101: ") as refused:
            read(str(workdir))
        assert not isinstance(refused.value, DamagedError)


def test_a_step_without_checksums_is_damaged(workdir: Path):
    (workdir / "checkpoints" / "30" / FILE).unlink()
    with pytest.raises(DamagedError, match="checkpoints/30 "):
        open_checkpoint(str(workdir))
    assert newest_intact(epath.Path(workdir)).step == 20


@pytest.mark.parametrize(
    "lacks", [None, "parameters", *(pytest.param(name, marks=pytest.mark.long) for name in ("position", "config"))]
)
def test_a_step_that_lacks_an_item_is_damaged(
    lacks: str | None, workdir: Path, spec: StateSpec, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    if lacks is None:
        (workdir / "checkpoints" / "99").mkdir()
    else:
        shutil.copytree(workdir / "checkpoints" / "30", workdir / "checkpoints" / "99")
        shutil.rmtree(workdir / "checkpoints" / "99" / lacks)
    (workdir / "checkpoints" / "²").mkdir()
    assert lacks == "parameters" or newest_intact(epath.Path(workdir)).step == 30
    checkpointer = opened(workdir, tokenizer)
    assert checkpointer.restore(30, spec.abstract)[0] == 30
    assert "checkpoints/99" in caplog.text
    checkpointer.save(31, made_state(spec, 31), models.SMALL, {"datasets": ["made"]})
    checkpointer.close()
    assert open_checkpoint(str(workdir)).path.name == "31"
    assert (workdir / "checkpoints" / "99.damaged").exists()


def test_workdir_with_only_an_incomplete_step_is_refused(tmp_path: Path):
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(InputError, match="checkpoints/7"):
        newest_intact(epath.Path(tmp_path))


def test_unreadable_file_is_not_reported_as_damage(workdir: Path, spec: StateSpec, tokenizer: Tokenizer, monkeypatch):
    def denied(*_: object, **__: object) -> None:
        raise ValueError('PERMISSION_DENIED: Error opening "d/x": Permission denied [errno 13]')

    checkpointer = opened(workdir, tokenizer)
    monkeypatch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.restore", denied)
    with pytest.raises(InputError, match=r"checkpoints/30 .*PERMISSION_DENIED") as refused:
        checkpointer.restore(30, spec.abstract)
    assert not isinstance(refused.value, DamagedError)
    checkpointer.close()


@pytest.mark.long
def test_damaged_step_in_a_store_is_set_aside_whole(store: Emulator):
    for name in ("position/metadata", "parameters/d/1", "commit_success.txt"):
        store.put(f"run/checkpoints/30/{name}", name.encode())
    store.put("run/checkpoints/20/position/metadata", b"{}")
    (newest, _) = step_folders(epath.Path("gs://bucket/run"))
    set_aside(newest)
    assert [name for name in store.names("run/checkpoints/") if "/30" in name] == [
        "run/checkpoints/30.damaged/commit_success.txt",
        "run/checkpoints/30.damaged/parameters/d/1",
        "run/checkpoints/30.damaged/position/metadata",
    ]
    assert [step.name for step in step_folders(epath.Path("gs://bucket/run"))] == ["20"]
