"""The folder that export writes: its modes, its config, and what a killed export leaves."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file
from support import child_processes, helpers, sources
from support.torch_models import require_torch

import bert_jax
from bert_jax import cli
from bert_jax.errors import InputError
from bert_jax.files.atomic import whole_folder
from bert_jax.interop import huggingface, stablehlo
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
    found = sources.write_fine_tuned(tmp_path / "task", checkpoint, "classify")
    changed = dataclasses.replace(found, task={**(found.task or {}), **changes})
    with pytest.raises(InputError, match=rf"head\.{next(iter(changes))}="):
        huggingface.export(changed, str(tmp_path / "hf"))


# --- Pipelines of `transformers` ---------------------------------------------------------------------------------


NUMBERS = pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.long)])


def texts(count: int) -> list[str]:
    """Sentences, of which one in three is much longer than the others."""
    lines = [line for line in helpers.make_corpus(60).split("\n") if line][: 2 * count]
    return [" ".join(lines[n : n + 3]) if n % 3 == 0 else lines[n] for n in range(count)]


def exported(kind: str, folder: Path, vocabulary: list[str]) -> tuple[Any, Path]:
    """Returns a live model with random parameters, of masked words or of classes, and its exported folder."""
    checkpoint = sources.write_checkpoint(folder / "checkpoint", vocabulary)
    if kind == "classify":
        checkpoint = sources.write_fine_tuned(folder / "task", checkpoint, kind)
    huggingface.export(checkpoint, str(folder / "hf"))
    return bert_jax.load(str(checkpoint.path)), folder / "hf"


@NUMBERS
def test_fill_mask(count: int, vocabulary: list[str], tmp_path: Path):
    _, transformers = require_torch()
    live, folder = exported("mlm", tmp_path, vocabulary)
    masked = [re.sub(r"^(the \w+) \w+", r"\1 [MASK]", text) for text in texts(count)]
    expected = transformers.pipeline("fill-mask", model=str(folder))(masked, top_k=3)
    for text, entries in zip(masked, expected, strict=True):
        (ours,) = live.fill_mask(text, top=3)
        assert [filling.token for filling in ours] == [entry["token_str"] for entry in entries], text
        np.testing.assert_allclose([f.probability for f in ours], [e["score"] for e in entries], rtol=1e-3)


@NUMBERS
def test_text_classification(count: int, vocabulary: list[str], tmp_path: Path):
    _, transformers = require_torch()
    live, folder = exported("classify", tmp_path, vocabulary)
    given = texts(count)
    pipeline = transformers.pipeline("text-classification", model=str(folder))
    expected = pipeline(given, top_k=None, truncation=True)
    for ours, entries in zip(live.predict(given), expected, strict=True):
        assert ours["prediction"] == entries[0]["label"]
        for entry in entries:
            assert ours["probabilities"][entry["label"]] == pytest.approx(entry["score"], abs=1e-4)


# --- StableHLO ---------------------------------------------------------------------------------------------------


NEEDS_FLATBUFFERS = "needs the stablehlo extra: flatbuffers"
TEXTS = ["A text.", "Another, longer text."]  # of the guide


def run_the_guide(folder: Path) -> dict[str, np.ndarray]:
    """Runs the code of the guide in a fresh process beside the folder `hlo`, and returns its result."""
    guide = (helpers.REPOSITORY / "docs" / "guides" / "import_export_formats.md").read_text()
    (code,) = re.findall(r"```python\n(import jax, numpy\n.*?)```", guide, re.DOTALL)
    code += "import sys\nassert 'bert_jax' not in sys.modules\nnumpy.savez('result.npz', **result)\n"
    helpers.run_python(f"import os\nos.chdir({str(folder)!r})\n{code}")
    return dict(np.load(folder / "result.npz"))


def test_a_pre_trained_model_in_a_fresh_process(vocabulary: list[str], tmp_path: Path):
    pytest.importorskip("flatbuffers", reason=NEEDS_FLATBUFFERS)
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary)
    command = ["export", "--format=stablehlo", f"--checkpoint={checkpoint.path}", f"--output={tmp_path / 'hlo'}"]
    assert cli.main(command) == 0
    (made,) = json.loads((tmp_path / "hlo" / "provenance.json").read_text())["runs"]
    assert made["inputs"]["checkpoint"]["path"] == str(checkpoint.path)
    result = run_the_guide(tmp_path)
    live = bert_jax.load(str(checkpoint.path))
    batch = live.batch(TEXTS)
    mlm, nsp = jax.jit(lambda batch: live.model(batch))(batch)
    np.testing.assert_allclose(result["mlm"], mlm[..., : live.config.vocab_size], atol=1e-5)
    np.testing.assert_allclose(result["nsp"], nsp[:, 0], atol=1e-5)
    np.testing.assert_allclose(result["hidden"], live.model.encode(batch)[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["pooler", "classify", "tag"])
def test_batch_and_length_are_free(kind: str, vocabulary: list[str], tmp_path: Path):
    pytest.importorskip("flatbuffers", reason=NEEDS_FLATBUFFERS)
    checkpoint = sources.write_checkpoint(tmp_path / "checkpoint", vocabulary, ("pooler",))
    if kind != "pooler":
        checkpoint = sources.write_fine_tuned(tmp_path / "task", checkpoint, kind)
    stablehlo.export(checkpoint, str(tmp_path / "hlo"))
    program = jax.export.deserialize(bytearray((tmp_path / "hlo" / "model.stablehlo").read_bytes()))
    assert {"cpu", "cuda", "tpu"} <= set(program.platforms)
    parameters = load_file(tmp_path / "hlo" / "parameters.safetensors")
    live = bert_jax.load(str(checkpoint.path))
    for texts in (["the ship"], ["the old clock and the baker .", "a storm", "the moon hears a ghost ."]):
        batch = live.batch(texts)
        result = program.call(parameters, batch["input_ids"], batch["token_type_ids"], batch["sequence_ids"])
        name, expected = ("hidden", live.model.encode(batch)[0]) if kind == "pooler" else ("outputs", live.model(batch))
        assert [*result] == [name]
        np.testing.assert_allclose(result[name], expected, atol=1e-5)
