"""The folder that export writes: its modes, its config, and what a killed export leaves."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from support import child_processes, sources

from bert_jax.files.output_folder import whole_folder
from bert_jax.interop import huggingface
from bert_jax.model import abstract_parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.training.checkpointing.checkpoints import Checkpoint, open_checkpoint, save_parameters

UNFINISHED = """
import signal, sys
from etils import epath
from bert_jax.files.output_folder import whole_folder
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


@pytest.fixture
def unfinished(tmp_path: Path) -> Iterator[list[tuple[subprocess.Popen, Path]]]:
    """Two processes that export to `hf` and never finish, each with its partial folder."""
    command = [sys.executable, "-c", UNFINISHED, str(tmp_path / "hf")]
    processes = [child_processes.start(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        yield [(process, Path(process.stdout.readline().strip())) for process in processes if process.stdout]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_what_a_killed_export_leaves_is_deleted_by_the_next(unfinished, tmp_path: Path):
    (killed, abandoned), (_, held) = unfinished
    killed.kill()
    killed.wait()
    others = [tmp_path / name for name in ("hf.partial", "hf.0123abcd.part", "hf2.0123abcd.partial")]
    for folder in others:
        folder.mkdir()
    (tmp_path / "hf.01234567.partial").write_text("a file of somebody else")
    assert abandoned.is_dir()
    with whole_folder(epath.Path(tmp_path / "hf"), last="config.json") as partial:
        (partial / "config.json").write_text("{}")
    assert not abandoned.exists()
    assert (held / "config.json").exists()
    assert all(folder.is_dir() for folder in others)
    assert (tmp_path / "hf.01234567.partial").read_text() == "a file of somebody else"
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["config.json"]


@pytest.mark.parametrize("kind", ["classify", "tag", "span"])
def test_the_dropout_of_a_fine_tuned_head_is_written(kind: str, checkpoint: Checkpoint, tmp_path: Path):
    head = TaskHead(kind, 2)
    _, shapes, _ = abstract_parameters(checkpoint.bert_config, build=BertForTask, head=head)
    parameters = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    save_parameters(
        epath.Path(tmp_path / "task"), parameters, bert_config=checkpoint.bert_config, tokenizer=checkpoint.tokenizer,
        heads=("pooler",) if "pooler" in parameters else (), task={**head.about(), "max_seq_len": 24},
    )  # fmt: skip
    without_run = open_checkpoint(str(tmp_path / "task"))
    of_run = dataclasses.replace(without_run, config={"head": {"dropout": 0.3}})
    huggingface.export(of_run, str(tmp_path / "hf"))
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described.get("classifier_dropout") == (None if kind == "span" else 0.3)
    huggingface.export(without_run, str(tmp_path / "other"))
    assert "classifier_dropout" not in json.loads((tmp_path / "other" / "config.json").read_text())
