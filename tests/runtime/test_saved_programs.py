"""A file of compiled programs: what it is compared with before it is loaded, and why a program is refused."""

import importlib.util
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert_jax.errors import InputError
from bert_jax.model.attention_kernels import pallas_attention
from bert_jax.runtime.compilation_cache import without_cache
from bert_jax.runtime.saved_programs import (
    HEADER,
    Program,
    SavedPrograms,
    digest,
    without_source_lines,
    write_programs,
)

SETTINGS = {"batch.x": [8, 4], "mesh.data": 8, "optimizer.b1": 0.9}


def lower(devices: int = 8, factor: float = 2.0, columns: int = 4) -> jax.stages.Lowered:
    sharding = NamedSharding(Mesh(jax.devices()[:devices], ("data",)), PartitionSpec("data"))
    shape = jax.ShapeDtypeStruct((8, columns), jnp.float32, sharding=sharding)
    return jax.jit(lambda x: (x * factor).sum(axis=0), in_shardings=sharding).lower(shape)


def write(path: Path, devices: int = 8, change: Callable[[dict[str, Any]], Any] = lambda _: None) -> SavedPrograms:
    """Writes the file of one program, with `change` made to its entry in the header, and opens it."""
    lowered = lower(devices)
    with without_cache():
        write_programs(str(path), [Program(lowered, lowered.compile(), jax.devices()[:devices], SETTINGS)])
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(contents[HEADER])
    change(header["programs"][0])
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as archive:
        for name, content in {**contents, HEADER: json.dumps(header).encode()}.items():
            archive.writestr(name, content)
    path.write_bytes(changed.getvalue())
    return SavedPrograms.open("compiled=FILE", str(path))


def test_digest_of_a_kernel_does_not_depend_on_the_folder_of_the_package(tmp_path: Path):
    path = tmp_path / "kernel.py"
    path.write_text(Path(pallas_attention.__file__).read_text())
    shapes = jax.ShapeDtypeStruct((1, 128, 3, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def digest_of(module: ModuleType) -> str:
        def attend(qkv, ids):
            return module.pallas_attention(qkv, ids, None, dropout_rate=0.0, causal=False)

        return digest(jax.jit(attend).trace(*shapes).lower(lowering_platforms=("tpu",)))

    def digests() -> set[str]:
        specification = importlib.util.spec_from_file_location("kernel", path)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        jax.clear_caches()  # kernels that are lowered already have their lines
        return {digest_of(pallas_attention), digest_of(module)}

    assert len(digests()) == 2
    with without_source_lines():
        assert len(digests()) == 1


@pytest.mark.parametrize("devices", [1, 8])
def test_loaded_program_computes_the_same(devices: int, tmp_path: Path):
    lowered, here = lower(devices), jax.devices()[:devices]
    program, reason = write(tmp_path / "file", devices).load(lowered, here, SETTINGS)
    assert (reason, program is not None) == ("", True)
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), program.input_shardings[0][0])
    assert (program(x) == lowered.compile()(x)).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("jax", "0.0.1"), ("jaxlib", "0.0.1"), ("platform", "tpu"), ("device_kind", "TPU v5 lite"), ("devices", 16),
        ("processes", 4), ("device_ids", [7, 6, 5, 4, 3, 2, 1, 0]), ("flags", ["--xla_other"]), ("cpu", "arm64-0"),
    ],
)  # fmt: skip
def test_another_environment_is_named(key: str, value: object, tmp_path: Path):
    saved = write(tmp_path / "file", change=lambda entry: entry["environment"].update({key: value}))
    program, reason = saved.load(lower(), jax.devices(), SETTINGS)
    assert program is None
    assert f"{key} {value!r}, here " in reason


def test_other_settings_are_named(tmp_path: Path):
    saved = write(tmp_path / "file")
    program, reason = saved.load(lower(columns=5), jax.devices(), {**SETTINGS, "batch.x": [8, 5]})
    assert program is None
    assert "batch.x [8, 4], here [8, 5]" in reason
    program, reason = saved.load(lower(4), jax.devices()[:4], {**SETTINGS, "mesh.data": 4})
    assert program is None
    assert "devices 8, here 4" in reason
    assert "mesh.data 8, here 4" in reason


def test_another_program_of_the_same_settings_is_refused(tmp_path: Path):
    program, reason = write(tmp_path / "file").load(lower(factor=3.0), jax.devices(), SETTINGS)
    assert program is None
    assert "code" in reason


def test_executable_that_cannot_be_loaded_is_a_reason(tmp_path: Path):
    write(tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file") as archive:
        contents = {name: archive.read(name) if name == HEADER else b"none" for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    program, reason = SavedPrograms.open("compiled=FILE", str(tmp_path / "file")).load(lower(), jax.devices(), SETTINGS)
    assert program is None
    assert "UnpicklingError" in reason


def test_nothing_is_unpickled_before_the_header_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = write(tmp_path / "file", change=lambda entry: entry["environment"].update({"jax": "0.0.1"}))
    monkeypatch.setattr(SavedPrograms, "_load", lambda *_: pytest.fail("unpickled"))
    assert saved.load(lower(), jax.devices(), SETTINGS)[0] is None


@pytest.mark.parametrize(
    "header",
    [
        [], {}, {"format": 1}, {"format": 1, "bert_jax": "0", "programs": None},
        {"format": 1, "bert_jax": "0", "programs": [{"digest": "0"}]},
        {"format": 1, "bert_jax": "0", "programs": [{"digest": "0", "environment": 1, "settings": {}}]},
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused(header: object, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr(HEADER, json.dumps(header))
    with pytest.raises(InputError, match=r"compiled=FILE: expected a file that `bert-jax compile"):
        SavedPrograms.open("compiled=FILE", str(tmp_path / "file"))


def test_missing_and_other_files_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"compiled=FILE: file not found"):
        SavedPrograms.open("compiled=FILE", str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"compiled=FILE: is a folder"):
        SavedPrograms.open("compiled=FILE", str(tmp_path))
    (tmp_path / "text").write_text("text")
    with pytest.raises(InputError, match="compiled=FILE: "):
        SavedPrograms.open("compiled=FILE", str(tmp_path / "text"))
    with zipfile.ZipFile(tmp_path / "later", "w") as archive:
        archive.writestr(HEADER, json.dumps({"format": 99, "programs": []}))
    with pytest.raises(InputError, match="99"):
        SavedPrograms.open("compiled=FILE", str(tmp_path / "later"))
