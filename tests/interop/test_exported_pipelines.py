"""Exported folders in the pipelines of `transformers`: the answers of the live model."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import helpers, sources

import bert_jax
from bert_jax.interop import huggingface
from bert_jax.interop.importing import import_checkpoint

torch = pytest.importorskip("torch", reason="needs the parity extra: torch and transformers")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: torch and transformers")

NUMBERS = pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.long)])
CLASSES, TAGS = ["bad", "fair", "good"], ["O", "B-SEA", "I-SEA"]
RECORDS: dict[str, dict[str, Any]] = {
    "classify": {"name": "text", "classes": CLASSES, "texts": [], "id": "id", "is_pair": False},
    "regress": {"name": "text", "classes": [], "texts": [], "id": "id", "is_pair": False},
    "tag": {"name": "ner", "tags": TAGS, "document_context": False},
    "span": {"name": "squad/1.1", "doc_stride": 16, "max_query_length": 16},
}


def texts(count: int) -> list[str]:
    """Sentences, of which one in three is much longer than the others."""
    lines = [line for line in helpers.make_corpus(60).split("\n") if line][: 2 * count]
    return [" ".join(lines[n : n + 3]) if n % 3 == 0 else lines[n] for n in range(count)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Callable[[str], tuple[Any, Path]]:
    """Returns the live model and the exported folder of a kind of head, or of `mlm`, with random parameters."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            checkpoint = sources.write_checkpoint(folder / "checkpoint", vocabulary)
            if kind != "mlm":
                size = {"regress": 1, "span": 2}.get(kind, 3)
                checkpoint = sources.write_fine_tuned(folder / "task", checkpoint, kind, RECORDS[kind], size=size)
            huggingface.export(checkpoint, str(folder / "hf"))
            made[kind] = bert_jax.load(str(checkpoint.path)), folder / "hf"
        return made[kind]

    return make


@NUMBERS
def test_fill_mask(count: int, exported):
    live, folder = exported("mlm")
    masked = [re.sub(r"^(the \w+) \w+", r"\1 [MASK]", text) for text in texts(count)]
    expected = transformers.pipeline("fill-mask", model=str(folder))(masked, top_k=3)
    for text, entries in zip(masked, expected, strict=True):
        (ours,) = live.fill_mask(text, top=3)
        assert [filling.token for filling in ours] == [entry["token_str"] for entry in entries], text
        np.testing.assert_allclose([f.probability for f in ours], [e["score"] for e in entries], rtol=1e-3)


@NUMBERS
def test_text_classification(count: int, exported):
    live, folder = exported("classify")
    given = texts(count)
    pipeline = transformers.pipeline("text-classification", model=str(folder))
    expected = pipeline(given, top_k=None, truncation=True)
    for ours, entries in zip(live.predict(given), expected, strict=True):
        assert ours["prediction"] == entries[0]["label"]
        for entry in entries:
            assert ours["probabilities"][entry["label"]] == pytest.approx(entry["score"], abs=1e-4)


@pytest.mark.parametrize("kind", ["classify", "tag", "span"])
def test_imported_again_it_predicts_the_same(kind: str, exported, tmp_path: Path):
    live, folder = exported(kind)
    back = bert_jax.load(str(import_checkpoint(str(folder), str(tmp_path / "back")).path))
    assert back.record == live.record
    given = (texts(3), texts(3)) if kind == "span" else (texts(3),)
    assert back.predict(*given) == live.predict(*given)
