"""Multiple choice, as in SWAG (the paper's section 4.4): one of several endings continues a context.

A row of multiple choice has `context`, `label` (the number of the correct ending, from 0), optionally `start` (the
beginning of every ending) and `id`, and two or more endings: a list `endings`, or the columns `ending0`, `ending1` and
so on. SWAG's train.csv, val.csv and test.csv (https://github.com/rowanz/swagaf) name the first two `sent1` and `sent2`.
"""

import csv
import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.task import (
    BadLabel,
    BadRows,
    Labels,
    Outputs,
    Split,
    Task,
    read_rows,
    row_id,
    softmax,
    text_in,
    write_lines,
)
from bert_jax.finetuning.tasks.text import accuracy
from bert_jax.text.sequences import encode_pairs
from bert_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChoiceExample:
    """`endings` continue `start`, which follows `context`; `label` is the correct one's number, from 0, or None."""

    id: str
    context: str
    start: str
    endings: tuple[str, ...]
    label: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChoiceTask(Task):
    """A choice of the correct one of `size` endings; of any number if it is 0.

    The encoder reads one sequence per ending: the context, then the start and the ending.
    """

    name: str = "choice"
    kind: str = "choose"
    size: int = 0  # a field here, a property in Task
    metrics: ClassVar[Sequence[str]] = ("accuracy",)
    usual_files: ClassVar[Mapping[str, Sequence[str]]] = {
        "train": ("train.csv", "train.tsv", "train.jsonl"),
        "dev": ("val.csv", "dev.csv", "dev.tsv", "dev.jsonl", "validation.csv", "validation.tsv", "validation.jsonl"),
        "test": ("test.csv", "test.tsv", "test.jsonl"),
    }

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        return cls(max_seq_len=config.task.max_seq_len)

    # --- Files --------------------------------------------------------------------------------------------------------

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[ChoiceExample]]:
        examples = self.read(path, bad_rows, split="train")
        return dataclasses.replace(self, size=len(examples[0].endings)), examples

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[ChoiceExample]:  # fmt: skip
        if columns:
            raise InputError(f"text={' '.join(columns)}: a choice has fixed columns; omit it")
        size = self.size

        def example(row: Mapping[str, Any], number: int) -> ChoiceExample:
            nonlocal size
            found = _choice(row, number, labels, size)
            size = len(found.endings)  # of the first row, if the model does not have it
            return found

        return read_rows(path, bad_rows, example, f"a context and {size or 'at least 2'} endings")

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[ChoiceExample]:
        examples: list[ChoiceExample] = []
        for number, (text, endings) in enumerate(zip(texts, pairs, strict=True)):
            row = {"context": text, "endings": [*endings] if isinstance(endings, tuple) else endings}
            size = len(examples[0].endings) if examples else self.size
            try:
                examples.append(_choice(row, number, "ignored", size))
            except ValueError as error:
                raise InputError(f"pair {number}: {error}") from error
        return examples

    def is_labelled(self, example: ChoiceExample) -> bool:
        return example.label is not None

    # --- Model --------------------------------------------------------------------------------------------------------

    def encode(self, examples: Sequence[ChoiceExample], tokenizer: Tokenizer, *, labelled: bool) -> EncodedExamples:
        """Encodes one sequence per ending: [CLS] context [SEP] start ending [SEP]."""
        size, labels = len(examples[0].endings), None
        pairs = [(one.context, f"{one.start} {ending}".strip()) for one in examples for ending in one.endings]
        if labelled:
            correct = np.array([example.label for example in examples])
            labels = (np.arange(size) == correct[:, None]).astype(np.int32).reshape(-1)
        return EncodedExamples(encode_pairs(tokenizer, pairs, self.max_seq_len), labels, group=size)

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        labels = [example.label for example in split.examples]
        return {"accuracy": accuracy(labels, np.stack(outputs).argmax(axis=-1))}

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        return [
            {"id": example.id, "prediction": int(row.argmax()), "probabilities": softmax(row).round(6).tolist()}
            for example, row in zip(split.examples, outputs, strict=True)
        ]

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        """Writes the chosen endings in the format of SWAG's leaderboard (rowanz/swagaf `csv_predict.py`)."""
        text = io.StringIO()
        rows = ((row["id"], row["prediction"]) for row in self.predictions(split, outputs))
        csv.writer(text, lineterminator="\n").writerows([("", "pred"), *rows])
        write_lines(folder / f"{split.name}.csv", [text.getvalue().removesuffix("\n")])


def _choice(row: Mapping[str, Any], number: int, labels: Labels, size: int) -> ChoiceExample:
    """Converts a row with `size` endings, or any number of at least two if that is 0. ValueError for a bad row."""
    context = text_in(row, "sent1" if "sent1" in row else "context")
    start = row.get("sent2", row.get("start")) or ""
    columns = sorted((name for name in row if re.fullmatch("ending[0-9]+", name)), key=lambda name: int(name[6:]))
    endings = row.get("endings", [row[name] for name in columns])
    if not isinstance(start, str):
        raise ValueError("start must be a string")
    if not isinstance(endings, list) or not all(isinstance(ending, str) and ending.strip() for ending in endings):
        raise ValueError("endings must be a list of strings that are not empty")
    if len(endings) != (expected := size or max(2, len(endings))):
        raise ValueError(f"expected {expected} endings, got {len(endings)}")
    return ChoiceExample(row_id(row, number), context, start, tuple(endings), _label(row, labels, len(endings)))


def _label(row: Mapping[str, Any], labels: Labels, size: int) -> int | None:
    """Returns the number of the correct ending; None without one. BadLabel for another value, or a missing one.

    InputError for the number of endings: the labels of the file then count from 1, and all would be read wrongly.
    """
    label = None if labels == "ignored" else row.get("label")
    if label is None or str(label).removesuffix(".0") in ("", "-1", "nan"):
        if labels == "required":
            raise BadLabel("label is missing")
        return None
    if str(label).removesuffix(".0") == str(size):
        raise InputError(f"label {label!r:.60}: labels must count from 0, the last of {size} endings is {size - 1}")
    if str(label).removesuffix(".0") not in map(str, range(size)) or isinstance(label, bool):
        raise BadLabel(f"label {label!r:.60}: expected 0 to {size - 1}")
    return int(float(label))
