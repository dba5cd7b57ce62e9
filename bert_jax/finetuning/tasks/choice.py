"""Multiple choice: SWAG, CODAH, and the user's own.

    .csv     SWAG: train.csv, val.csv and test.csv of https://github.com/rowanz/swagaf, with the columns `sent1`,
             `sent2`, `ending0` to `ending3` and (except in test.csv) `label`, numbered from 0; others are ignored
    .tsv     CODAH: category, prompt, four endings and the correct one's number, from 0; no header, no quoting
    others   the user's own: objects with `context`, `endings` (a list of at least two, as many in every object),
             `label` (a number from 0) and optionally `start` (the beginning of every ending) and `id`

The encoder reads one sequence per ending: the context, then the start and the ending.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files.text_files import lines_from, named_format
from bert_jax.finetuning import metrics
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.rows import (
    MISSING_LABEL,
    UNKNOWN_LABEL,
    BadLabel,
    BadRows,
    Row,
    read_rows,
    row_id,
    text_in,
    write_lines,
)
from bert_jax.finetuning.task import Labels, Outputs, Split, Task, softmax
from bert_jax.text.sequences import encode_pairs
from bert_jax.text.tokenizer import Tokenizer

_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
_SWAG = ("sent1", "sent2", *_ENDINGS)
_CODAH = ("category", "context", *_ENDINGS, "label")


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
    """A choice of the correct one of `size` endings; of any number if it is 0."""

    name: str = "choice"
    kind: str = "choose"
    size: int = 0  # a field here, a property in Task

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        return cls(max_seq_len=config.task.max_seq_len)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy",)

    # --- Files --------------------------------------------------------------------------------------------------------

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        return {
            "train": ("train.csv", "train.tsv", "train.jsonl"),
            "dev": ("val.csv", "dev.csv", "dev.tsv", "dev.jsonl"),
            "test": ("test.csv", "test.tsv", "test.jsonl"),
        }

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[ChoiceExample]]:
        examples = self.read(path, bad_rows, split="train")
        return dataclasses.replace(self, size=len(examples[0].endings)), examples

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[ChoiceExample]:  # fmt: skip
        if columns:
            raise InputError(f"text={' '.join(columns)}: a choice has fixed columns; omit it")
        examples: list[ChoiceExample] = []
        for number, place, row in _rows(path, bad_rows, labels):
            try:
                examples.append(self._same_size(_example(row, number, labels), examples))
            except ValueError as error:
                bad_rows.add(path, place, error)
        bad_rows.check_usable(path, examples, f"a context and {self.size or 'at least 2'} endings")
        return examples

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[ChoiceExample]:
        examples: list[ChoiceExample] = []
        for number, (text, endings) in enumerate(zip(texts, pairs, strict=True)):
            row = {"context": text, "endings": [*endings] if isinstance(endings, tuple) else endings}
            try:
                examples.append(self._same_size(_example(row, number, "ignored"), examples))
            except ValueError as error:
                raise InputError(f"pair {number}: {error}") from error
        return examples

    def _same_size(self, example: ChoiceExample, before: Sequence[ChoiceExample]) -> ChoiceExample:
        """Returns an example. ValueError if it has another number of endings than the model or the examples before."""
        expected = self.size or len((*before, example)[0].endings)
        if len(example.endings) != expected:
            raise ValueError(f"expected {expected} endings, got {len(example.endings)}")
        return example

    def is_labelled(self, example: ChoiceExample) -> bool:
        return example.label is not None

    def texts_of(self, example: ChoiceExample) -> dict[str, Any]:
        return {"context": example.context, "start": example.start, "endings": dict(enumerate(example.endings))}

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
        return metrics.compute(self.metrics, labels, np.stack(outputs).argmax(axis=-1))

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        return [
            {"id": example.id, "prediction": int(row.argmax()), "probabilities": softmax(row).round(6).tolist()}
            for example, row in zip(split.examples, outputs, strict=True)
        ]

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        """Writes the chosen endings in the format of SWAG's leaderboard (rowanz/swagaf `csv_predict.py`)."""
        rows = (f"{row['id']},{row['prediction']}" for row in self.predictions(split, outputs))
        write_lines(folder / f"{split.name}.csv", [",pred", *rows])


def _rows(path: str, bad_rows: BadRows, labels: Labels) -> Iterator[Row]:
    """Yields rows with `context`, `start`, `endings` and, if the file has one, `label`."""
    kind, is_checked = named_format(path), False
    if kind not in ("csv", "tsv"):
        yield from read_rows(path, bad_rows)
        return
    names: Sequence[str] = _CODAH if kind == "tsv" else ()
    if kind == "tsv" and labels != "required":  # the last column may be missing, in the whole file
        names = names[: max(next(lines_from(path, 0, None), (0, b""))[1].count(b"\t") + 1, len(_CODAH) - 1)]
    for number, place, row in read_rows(path, bad_rows, names):
        required = (*_SWAG, *(("label",) if labels == "required" else ()))
        if kind == "csv" and not is_checked and (missing := [name for name in required if name not in row]):
            raise InputError(f"{path}:1: missing column {', '.join(missing)}; expected a SWAG file")
        is_checked = True
        texts = {"context": row["sent1"], "start": row["sent2"]} if kind == "csv" else {"context": row["context"]}
        # The first column of SWAG, which has no name, is the row's number.
        identity = {"id": row.get("") or row.get("id")}
        yield number, place, {
            **row, **texts, **identity, "endings": [row[name] for name in _ENDINGS], "label": row.get("label") or None,
        }  # fmt: skip


def _example(row: Mapping[str, Any], number: int, labels: Labels) -> ChoiceExample:
    """Converts a row to an example. Raises ValueError for a bad row."""
    start, endings = row.get("start") or "", row.get("endings")
    context = text_in(row, "context")
    if not isinstance(start, str):
        raise ValueError("start must be a string")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise ValueError("endings must be a list of at least 2 strings")
    if empty := [index for index, ending in enumerate(endings) if not ending.strip()]:
        raise ValueError(f"endings[{empty[0]}] is empty")
    example = ChoiceExample(row_id(row, number), context, start, tuple(endings))
    label = row.get("label") if labels != "ignored" else None
    if label is None:
        if labels == "required":
            raise BadLabel("label is missing", MISSING_LABEL)
        return example
    if str(label).removesuffix(".0") not in map(str, range(len(endings))) or isinstance(label, bool):
        raise BadLabel(f"label {label!r:.60}: expected 0 to {len(endings) - 1}", UNKNOWN_LABEL)
    return dataclasses.replace(example, label=int(float(label)))
