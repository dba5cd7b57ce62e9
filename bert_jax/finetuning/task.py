"""A task: how its files are read, encoded, scored and predicted.

A kind of task is a subclass of `Task`, and an entry of `KINDS` in `finetuning/fine_tuned.py`. Its fields are the task's
record in checkpoints and exports: all that prediction and evaluation need. They come from a config and the training
file when a model is fine-tuned, and from the record afterwards.

A row of a file is used whole or skipped. A skipped one keeps its number, is counted, and is logged with its place.
"""

import abc
import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.tables import BadRow, read_table
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ID_FIELDS = ("id", "idx", "guid", "index", "")
"""Names of the column with a row's id: the first of these that has a value. SWAG's first column has no name."""

_LOGGED = 5  # rows of each file that are logged one by one

Outputs = Sequence[np.ndarray]
"""The model's fp32 outputs by example: [labels] of a sequence, [choices], or [T, outputs] of T tokens."""

Labels = Literal["required", "optional", "ignored"]

# --- Rows -------------------------------------------------------------------------------------------------------------


class BadLabel(ValueError):
    """A row with a missing or an unknown label."""


class BadRows:
    """Counts and logs skipped rows.

    With `strict` a skipped row is an InputError, with `strict_labels` one with a missing or an unknown label.
    """

    def __init__(self, *, strict: bool = False, strict_labels: bool = False):
        self.counts: Counter[str] = Counter()  # by file
        self._first: dict[str, str] = {}  # problem, by file
        self._refused = InputError, Exception if strict else BadLabel if strict_labels else InputError

    def add(self, path: str, place: int | str, problem: Exception) -> None:
        """Adds a skipped row. `place` is its line, from 1, or text such as "row 3"."""
        where = f"{path}:{place}: {problem}" if isinstance(place, int) else f"{path}: {place}: {problem}"
        if isinstance(problem, self._refused):
            raise InputError(where)
        self.counts[path] += 1
        self._first.setdefault(path, where)
        if self.counts[path] <= _LOGGED:
            log.warning("Skipped a bad row: %s", where)

    def check_usable(self, path: str, examples: Sequence[Any], expected: str) -> None:
        """Logs the number of skipped rows of a file; raises InputError if no example is left."""
        if not examples:
            raise InputError(f"{path}: no usable row; expected {expected}; got {self._first.get(path, 'no rows')}")
        if self.counts[path] > _LOGGED:
            log.warning("Skipped %d bad rows of %s in total", self.counts[path], path)


def read_rows(
    path: str, bad_rows: BadRows, example: Callable[[dict[str, Any], int], Any], expected: str,
    names: Sequence[str] = (),
) -> list[Any]:  # fmt: skip
    """Returns the examples of the rows of a file, in its order.

    Args:
      path: the file, which `read_table` reads.
      bad_rows: collects the rows that are skipped.
      example: makes an example of a row and its number from 1; a ValueError skips the row, an InputError ends.
      expected: what a usable row has, for the error about a file without one.
      names: the columns of a file without a header.
    """
    examples = []
    for number, (place, row) in enumerate(read_table(path, names), 1):
        try:
            if isinstance(row, BadRow):
                raise ValueError(row.problem)
            examples.append(example(row, number))
        except (InputError, ValueError) as error:
            bad_rows.add(path, place, error)
    bad_rows.check_usable(path, examples, expected)
    return examples


def row_id(row: Mapping[str, Any], number: int) -> str:
    """Returns the value of the first column of ID_FIELDS with one, else the row's number."""
    found = (row.get(column) for column in ID_FIELDS)
    return next((str(value) for value in found if value not in (None, "")), str(number))


def text_in(row: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    """Returns the text in a column. Raises ValueError for a missing or an empty one, and for another type."""
    value = row.get(name)
    if value is None:
        raise ValueError(f"missing field {name!r} among {list(row)!s:.200}")
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be a string, got {type(value).__name__}")
    if not may_be_empty and not value.strip():
        raise ValueError(f"{name!r} is empty")
    return value


# --- Tasks ------------------------------------------------------------------------------------------------------------


def softmax(outputs: np.ndarray) -> np.ndarray:
    """Returns the probabilities, fp64 [labels], of an example's outputs [labels]."""
    exponents = np.exp(outputs.astype(np.float64) - outputs.max())
    return exponents / exponents.sum()


@dataclass(frozen=True)
class Split:
    """The examples of a file.

    Attributes:
      name: train, dev, dev_mismatched, test ...
      examples: as they were read, with their labels.
      encoded: the model's input.
      is_labelled: True if every example can be scored.
      left_out: number of skipped rows of the file.
    """

    name: str
    examples: Sequence[Any]
    encoded: EncodedExamples
    is_labelled: bool = False
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A kind of task, with its record.

    Attributes:
      name: the name in records and results; its first part is the key of `KINDS`.
      kind: the kind of head; see `TaskHead`.
      max_seq_len: maximum tokens of a sequence.
    """

    test_labels: ClassVar[Labels] = "optional"
    """Use of labels of a test split in fine-tuning."""

    name: str = ""
    kind: str = ""
    max_seq_len: int = 128

    # --- Records ------------------------------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        """Returns the task of a config, before its training file is read. InputError for an invalid value."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Returns the task of a record, whose missing keys have their defaults. InputError for a value of no use."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        values = {name: record[name] for name in defaults.keys() & record.keys()}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        for name, value in values.items():
            expected = type(defaults[name])
            if defaults[name] is not None and not isinstance(value, expected):
                raise InputError(f"the record of the task: {name}={value!r:.80}: expected a {expected.__name__}")
        return cls(**values)

    def record(self) -> dict[str, Any]:
        """Returns the record, as JSON."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The head's number of outputs; see `TaskHead`."""

    @property
    @abc.abstractmethod
    def metrics(self) -> Sequence[str]:
        """The main metrics of `score`; higher is better. The first one, of the first scored split, selects a run."""

    # --- Files --------------------------------------------------------------------------------------------------------

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        """Names of the files of each split in a folder; the first that exists is used."""
        return {}

    def find(self, folder: str, given: Mapping[str, str]) -> dict[str, str]:
        """Returns the path of each split: that in `given`, in `folder` if relative, or else of a usual name."""
        found = {split: os.path.join(folder, name) for split, name in given.items() if name}
        for split in self.usual_files.keys() - found.keys():
            paths = (os.path.join(folder, name) for name in self.usual_files[split])
            found[split] = next((path for path in paths if remote.exists(remote.parse_path(path))), "")
        return {split: path for split in (*given, *self.usual_files) if (path := found.get(split))}

    @abc.abstractmethod
    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[Any]:  # fmt: skip
        """Returns the examples of a file, in its order.

        Args:
          path: the file.
          bad_rows: collects the rows that are skipped.
          split: the split of the file, "" if unknown.
          labels: "optional" if they may be missing; "ignored" if they are not read.
          columns: names of the text columns, instead of the record's.

        Raises:
          InputError: the file cannot be read, is not in the record's format, or has no usable row.
        """

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[Any]]:
        """Returns the training examples, and the task with what they determine. Raises InputError as `read` does."""
        return self, self.read(path, bad_rows, split="train")

    @abc.abstractmethod
    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[Any]:
        """Returns examples of texts, each with its pair or None. InputError if the task does not support them."""

    @abc.abstractmethod
    def is_labelled(self, example: Any) -> bool:
        """Returns whether an example can be scored."""

    # --- Model --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def encode(self, examples: Sequence[Any], tokenizer: Tokenizer, *, labelled: bool) -> EncodedExamples:
        """Returns the model's input, with the labels that the loss reads if `labelled`."""

    @abc.abstractmethod
    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        """Returns a JSON object for each example, in their order: `id`, `prediction` and further keys of the task."""

    @abc.abstractmethod
    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Returns the official metrics of a labelled split."""

    def tuned(self, scores: Mapping[str, float]) -> Self:
        """Returns the task with the settings that the scores of the first scored split determine."""
        return self

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        """Writes the predictions of a split to files in a folder."""
        write_predictions(folder / f"{split.name}.jsonl", self.predictions(split, outputs))


def read_split(
    task: Task, name: str, path: str, bad_rows: BadRows, tokenizer: Tokenizer, *, split: str = "",
    labels: Labels = "required", columns: Sequence[str] = (),
) -> Split:  # fmt: skip
    """Reads and encodes the file of a split that is scored or predicted. Takes the arguments of `Task.read`."""
    examples = task.read(path, bad_rows, split=split, labels=labels, columns=columns)
    is_labelled = labels != "ignored" and all(map(task.is_labelled, examples))
    encoded = task.encode(examples, tokenizer, labelled=False)
    return Split(name, examples, encoded, is_labelled, bad_rows.counts.pop(path, 0))


def write_predictions(path: epath.Path, predictions: Iterable[Mapping[str, Any]]) -> None:
    """Writes predictions as JSON lines."""
    write_lines(path, (json.dumps(prediction, ensure_ascii=False) for prediction in predictions))


def write_lines(path: epath.Path, lines: Iterable[str]) -> None:
    """Writes a text file atomically, and creates its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_whole(path, "".join(f"{line}\n" for line in lines).encode())
