"""The folder that export writes: its modes, its config, and what a killed export leaves."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from support import child_processes, sources

from bert_jax.files.atomic import whole_folder
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.training.checkpoints import Checkpoint

UNFINISHED = """
import signal, sys
from etils import epath
from bert_jax.files.atomic import whole_folder
with whole_folder(epath.Path(sys.argv[1]), last="config.json") as partial:
    (partial / "config.json").write_text("{}")
    print(partial, flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Checkpoint:
    return sources.write_checkpoint(tmp_path_factory.mktemp("export") / "checkpoint", vocabulary)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_every_file_has_the_mode_that_the_umask_gives(umask: int, mode: int, checkpoint: Checkpoint, tmp_path: Path):
    before = os.umask(umask)
    try:
        huggingface.export(checkpoint, str(tmp_path / "hf"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()}
    assert modes == dict.fromkeys(modes, mode)
    assert "model.safetensors" in modes


def test_what_a_killed_export_leaves_is_replaced_by_the_next(tmp_path: Path):
    command = [sys.executable, "-c", UNFINISHED, str(tmp_path / "hf")]
    killed = child_processes.start(command, stdout=subprocess.PIPE, text=True)
    assert killed.stdout
    abandoned = Path(killed.stdout.readline().strip())
    killed.kill()
    killed.communicate()
    assert abandoned.is_dir()
    (abandoned / "model.safetensors").touch()
    (tmp_path / "hf.partial").mkdir()  # of somebody else
    with whole_folder(epath.Path(tmp_path / "hf"), last="config.json") as partial:
        (partial / "config.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "hf.partial"]
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["config.json"]


@pytest.mark.parametrize("kind", ["classify", "tag", "span"])
def test_the_dropout_of_a_fine_tuned_head_is_written(kind: str, checkpoint: Checkpoint, tmp_path: Path):
    without_run = sources.write_fine_tuned(tmp_path / "task", checkpoint, kind, {"name": "text"}, size=2)
    of_run = dataclasses.replace(without_run, config={"head": {"dropout": 0.3}})
    huggingface.export(of_run, str(tmp_path / "hf"))
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described.get("classifier_dropout") == (None if kind == "span" else 0.3)
    huggingface.export(without_run, str(tmp_path / "other"))
    assert "classifier_dropout" not in json.loads((tmp_path / "other" / "config.json").read_text())


def test_the_record_of_the_task_is_written_without_the_fields_of_transformers(checkpoint: Checkpoint, tmp_path: Path):
    record = {"name": "squad/2.0", "doc_stride": 16, "max_query_length": 16, "null_threshold": -1.5}
    found = sources.write_fine_tuned(tmp_path / "task", checkpoint, "span", record, size=2)
    huggingface.export(found, str(tmp_path / "hf"))
    written = json.loads((tmp_path / "hf" / "config.json").read_text())["bert_jax_task"]
    assert written == {name: value for name, value in found.task.items() if name != "max_seq_len"}
    assert import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "back")).task == found.task


def test_an_import_names_the_files_that_changed_since_the_export(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    name = "model.safetensors"
    huggingface.export(checkpoint, str(tmp_path / "hf"))
    import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "imported"))
    assert not caplog.records or all("changed since" not in line for line in caplog.messages)
    path = tmp_path / "hf" / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "again"))
    (line,) = (line for line in caplog.messages if "changed since" in line)
    assert line.startswith(f"{tmp_path / 'hf'}: {name} ")
