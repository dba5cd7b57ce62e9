"""The folder that export writes: its modes, its config, and what a killed export leaves."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from support import child_processes, helpers, sources
from support.torch_models import require_torch

from bert_jax.errors import InputError
from bert_jax.files.atomic import whole_folder
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint
from bert_jax.model.bert import HEADS
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.pretrain import pretrain

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


@pytest.mark.parametrize(("lm", "architecture"), [("mlm", "BertForPreTraining"), ("ltr", "BertLMHeadModel")])
def test_a_trained_model_comes_back(lm: str, architecture: str, dataset_dir: Path, tmp_path: Path):
    few_steps = {"optimizer__learning_rate": 0.05, "optimizer__warmup_steps": 1, "total_steps": 2, "eval_batches": 1}
    config = helpers.small_config(dataset_dir, objective__lm=lm, objective__nsp=lm == "mlm", **few_steps)
    pretrain(config, str(tmp_path / "run"))
    trained = open_checkpoint(str(tmp_path / "run"))
    assert huggingface.export(trained, str(tmp_path / "hf")) == architecture
    back = import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "back"))
    assert back.bert_config == trained.bert_config
    assert back.tokenizer.sha256 == trained.tokenizer.sha256
    assert back.heads == (HEADS if lm == "mlm" else ("mlm_head",))
    kept = ("embeddings", "encoder", *back.heads)
    sources.assert_same_parameters(back.load_parameters(), trained.load_parameters(parts=kept))
    _, transformers = require_torch()
    _, info = getattr(transformers, architecture).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info


def test_the_record_of_the_task_is_written_without_the_fields_of_transformers(checkpoint: Checkpoint, tmp_path: Path):
    record = {"name": "squad/2.0", "doc_stride": 16, "max_query_length": 16, "null_threshold": -1.5}
    found = sources.write_fine_tuned(tmp_path / "task", checkpoint, "span", record, size=2)
    huggingface.export(found, str(tmp_path / "hf"))
    written = json.loads((tmp_path / "hf" / "config.json").read_text())["bert_jax_task"]
    assert written == {name: value for name, value in found.task.items() if name != "max_seq_len"}
    assert import_checkpoint(str(tmp_path / "hf"), str(tmp_path / "back")).task == found.task


def test_an_export_that_fails_leaves_nothing(vocabulary: list[str], tmp_path: Path):
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary)
    parameters = tmp_path / "checkpoint" / "parameters"
    parameters.rename(tmp_path / "away")
    with pytest.raises(InputError, match=str(tmp_path / "checkpoint")):
        huggingface.export(checkpoint, str(tmp_path / "new" / "hf"))
    assert not (tmp_path / "new" / "hf").exists()
    (tmp_path / "away").rename(parameters)
    (tmp_path / "new" / "hf").mkdir(parents=True)  # an empty folder is as good as none
    huggingface.export(checkpoint, str(tmp_path / "new" / "hf"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["hf"]


@pytest.mark.parametrize("changes", [{"bilstm": 8}, {"features": "last"}], ids=str)
def test_models_without_a_class_are_refused(changes: dict, checkpoint: Checkpoint, tmp_path: Path):
    record = {"name": "text", "classes": ["a", "b"], "texts": [], "id": "id"}
    found = sources.write_fine_tuned(tmp_path / "task", checkpoint, "classify", record, size=2)
    changed = dataclasses.replace(found, task={**(found.task or {}), **changes})
    with pytest.raises(InputError, match=rf"head\.{next(iter(changes))}="):
        huggingface.export(changed, str(tmp_path / "hf"))
