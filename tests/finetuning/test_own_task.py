"""A task of one's own, in one file: how many of the words of a text are long."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from support import helpers

import bert_jax
from bert_jax.cli import main
from bert_jax.config import FinetuneConfig, load_config
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.fine_tuned import KINDS
from bert_jax.finetuning.finetune import finetune
from bert_jax.finetuning.task import BadRows, Labels, Outputs, Split, Task, read_rows, text_in
from bert_jax.finetuning.tasks.text import compute_metrics
from bert_jax.text.sequences import encode_pairs
from bert_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class LongWords(Task):
    """The number of words of at least `letters` letters, which no file has to name."""

    name: str = "long"
    kind: str = "regress"
    letters: int = 4
    size = 1
    metrics = ("pearson",)
    usual_files = {"train": ("train.csv",), "dev": ("dev.csv",)}  # noqa: RUF012

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        return cls(max_seq_len=config.task.max_seq_len, letters=int(config.task.name or 4))

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[str]:  # fmt: skip
        return read_rows(path, bad_rows, lambda row, number: text_in(row, "text"), "a text")

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[str]:
        return [*texts]

    def is_labelled(self, example: str) -> bool:
        return True

    def _labels(self, examples: Sequence[str]) -> np.ndarray:
        return np.array([sum(len(word) >= self.letters for word in one.split()) for one in examples], np.float32)

    def encode(self, examples: Sequence[str], tokenizer: Tokenizer, *, labelled: bool) -> EncodedExamples:
        sequences = encode_pairs(tokenizer, [(text, None) for text in examples], self.max_seq_len)
        return EncodedExamples(sequences, self._labels(examples) if labelled else None)

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        return [{"id": str(number), "prediction": float(row[0])} for number, row in enumerate(outputs, 1)]

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        return compute_metrics(self.metrics, self._labels(split.examples), np.stack(outputs)[:, 0])


def test_own_task_is_trained_scored_exported_and_predicts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setitem(KINDS, "long", LongWords)
    texts = [" ".join([word] * (number % 5 + 1)) for number, word in enumerate(helpers.SMALL_WORDS * 4)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.csv").write_text("\n".join(["text", *texts]) + "\n")
    values = {
        "init": checkpoint, "data.path": tmp_path, "task.kind": "long", "task.name": "3", "task.max_seq_len": 32,
        "num_epochs": 1, "global_batch_size": 16, "optimizer.learning_rate": 1e-3,
    }  # fmt: skip
    run, hf = str(tmp_path / "run"), str(tmp_path / "hf")
    scores = finetune(load_config("finetune/default", values, kind=FinetuneConfig), run)
    assert main(["export", "--checkpoint", run, "--output", hf]) == 0
    for model in (run, hf):
        capsys.readouterr()
        assert main(["evaluate", "--checkpoint", model, "--data", str(tmp_path)]) == 0
        assert json.loads(capsys.readouterr().out)["scores"]["dev"] == pytest.approx(scores["dev"], abs=1e-4)
        output = str(tmp_path / "said.jsonl")
        assert main(["predict", "--checkpoint", model, "--input", str(tmp_path / "dev.csv"), "--output", output]) == 0
        assert bert_jax.load(model).record["letters"] == 3
        (said,) = bert_jax.load(model).predict(texts[0])
        first = json.loads(Path(output).read_text().split("\n")[0])
        assert first["prediction"] == pytest.approx(said["prediction"], abs=1e-3)
