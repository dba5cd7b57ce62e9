"""Models of every format open in one line, without an import and without a file being written."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support import sources
from support.devices import one_device  # noqa: F401

import bert_jax
from bert_jax import cli
from bert_jax.interop import huggingface

TEXT = "the ship sees the storm ."
HEADS = {"pretraining": ("pooler", "mlm_head", "nsp_head"), "bare": ()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> dict[str, tuple[Path, Path]]:
    """(checkpoint, its folder of `transformers`) of models with each set of heads, and of each task."""
    place = tmp_path_factory.mktemp("models")
    found = {name: sources.write_checkpoint(place / name, vocabulary, heads) for name, heads in HEADS.items()}
    for kind in sources.RECORDS:
        found[kind] = sources.write_fine_tuned(place / kind, found["pretraining"], kind)
    for name, checkpoint in found.items():
        huggingface.export(checkpoint, str(place / f"{name}-hf"))
    return {name: (place / name, place / f"{name}-hf") for name in found}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def parameters_of(model: bert_jax.PreTrained | bert_jax.FineTuned) -> list[np.ndarray]:
    words = model.config.vocab_size  # the rows after it are padding, which `write_fine_tuned` fills, too
    return [np.asarray(leaf)[:words] for leaf in jax.tree.leaves(nnx.state(model.model))]


def assert_same(a: bert_jax.PreTrained | bert_jax.FineTuned, b: bert_jax.PreTrained | bert_jax.FineTuned) -> None:
    assert type(a) is type(b)
    assert (a.config, a.tokenizer.sha256) == (b.config, b.tokenizer.sha256)
    ours, theirs = parameters_of(a), parameters_of(b)
    assert len(ours) == len(theirs) > 0
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", ["pretraining", "bare", *sources.RECORDS])
def test_exported_folder_loads_as_its_checkpoint(name: str, folders: dict[str, tuple[Path, Path]], written: Path):
    checkpoint, folder = folders[name]
    before = sorted(os.listdir(folder))
    loaded, original = bert_jax.load(str(folder)), bert_jax.load(str(checkpoint))
    assert_same(loaded, original)
    np.testing.assert_array_equal(loaded.embed(TEXT), original.embed(TEXT))
    if isinstance(loaded, bert_jax.FineTuned) and isinstance(original, bert_jax.FineTuned):
        text, pair = {"choose": ("the ship", ["sees .", "a star ."]), "span": ("the owl", TEXT)}.get(name, (TEXT, None))
        assert loaded.predict(text, pair) == original.predict(text, pair)
    assert (sorted(os.listdir(folder)), os.listdir(written)) == (before, [])


# --- Commands --------------------------------------------------------------------------------------------------------


def output_of(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_commands_take_a_folder_of_transformers(
    folders: dict[str, tuple[Path, Path]], dataset_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "lines.txt").write_text(f"{TEXT}\n")
    (tmp_path / "dev.csv").write_text("text,label\nthe ship .,a\nthe owl .,b\n")
    results: list[list[Any]] = []
    for place, task in zip(folders["pretraining"], folders["classify"], strict=True):
        features, predictions, exported = (tmp_path / f"{len(results)}.{kind}" for kind in ("npz", "jsonl", "hf"))
        results.append([
            output_of(capsys, "fill-mask", "--checkpoint", place, "the [MASK] ."),
            json.loads(output_of(capsys, "evaluate", "--checkpoint", place, "--data", dataset_dir)),
            json.loads(output_of(capsys, "evaluate", "--checkpoint", task, "--data", tmp_path / "dev.csv"))["scores"],
        ])  # fmt: skip
        output_of(capsys, "features", "--checkpoint", place, "--input", tmp_path / "lines.txt", "--output", features,
                  "--layers=-1")  # fmt: skip
        output_of(capsys, "predict", "--checkpoint", task, "--input", tmp_path / "dev.csv", "--output", predictions)
        output_of(capsys, "export", "--checkpoint", place, "--output", exported)
        results[-1] += [np.load(features)["values"].tolist(), predictions.read_text()]
        results[-1].append((exported / "model.safetensors").read_bytes())
    assert results[0] == results[1]
