"""A task: how its files are read, encoded, scored and predicted.

A kind of task is a subclass of `Task`, and an entry of `KINDS` in `finetuning/tasks`. Its fields are the task's record
in checkpoints and exports: all that prediction and evaluation need. They come from a config and the training file when
a model is fine-tuned, and from the record afterwards.
"""

import abc
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.data.hashing import key_from
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.rows import BadRows, format_predictions
from bert_jax.text.tokenizer import Tokenizer

Outputs = Sequence[np.ndarray]
"""The model's fp32 outputs by example: [labels] of a sequence, [choices], or [T, outputs] of T tokens."""

Labels = Literal["required", "optional", "ignored"]


def softmax(outputs: np.ndarray) -> np.ndarray:
    """Returns the probabilities, fp64 [labels], of an example's outputs [labels]."""
    exponents = np.exp(outputs.astype(np.float64) - outputs.max())
    result: np.ndarray = exponents / exponents.sum()
    return result


@dataclass(frozen=True)
class Split:
    """The examples of a file.

    Attributes:
      name: train, dev, dev_mismatched, test ...
      examples: as they were read, with their labels.
      encoded: the model's input.
      is_labelled: True if every example can be scored.
      left_out: number of skipped rows of the file, by the reason (`rows.MISSING_LABEL` and others).
    """

    name: str
    examples: Sequence[Any]
    encoded: EncodedExamples
    is_labelled: bool = False
    left_out: Mapping[str, int] = field(default_factory=dict)

    def hash(self) -> str:
        """Returns a hash of the examples, in their order, and of their labels."""
        return f"{key_from(*self.examples):016x}"


@dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A kind of task, with its record.

    Attributes:
      name: the name in records and results; its first part is the key of `KINDS`.
      kind: the kind of head; see `TaskHead`.
      max_seq_len: maximum tokens of a sequence.
      main_metric: the metric that selects a run or an epoch, of the first scored split; the first of `metrics` unless
        it is given.
    """

    test_labels: ClassVar[Labels] = "optional"
    """Use of labels of a test split in fine-tuning."""

    name: str = ""
    kind: str = ""
    max_seq_len: int = 128
    main_metric: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "main_metric", self.main_metric or self.metrics[0])

    # --- Records ------------------------------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        """Returns the task of a config, before its training file is read. InputError for an invalid value."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Returns the task of a record, whose missing keys have their defaults. InputError for a value of no use."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls) if field.name != "main_metric"}
        values = {name: record[name] for name in defaults.keys() & record.keys()}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        for name, value in values.items():
            expected = type(defaults[name])
            if defaults[name] is not None and not isinstance(value, expected):
                raise InputError(f"the record of the task: {name}={value!r:.80}: expected a {expected.__name__}")
        task = cls(**values)
        metric = record.get("main_metric", "")
        return dataclasses.replace(task, main_metric=metric) if metric in task.metrics else task

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
        """The metrics that may be the main one, as `score` returns them; of all, higher is better."""

    @property
    def label_names(self) -> Sequence[str]:
        """The labels by class number, of texts or tokens; empty if the task has none."""
        return ()

    @property
    def positive(self) -> str | None:
        """The label that `f1` is of; None for any other task."""
        return None

    # --- Files --------------------------------------------------------------------------------------------------------

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        """Names of the files of each split in a folder; the first that exists is used."""
        return {}

    def find(self, folder: str, given: Mapping[str, str]) -> dict[str, str]:
        """Returns the path of each split: that in `given`, in `folder` if relative, or else of a usual name."""
        found = {split: os.path.join(folder, name) for split, name in given.items() if name}
        for split in self.usual_files.keys() - found.keys():
            paths = self.usual_paths(folder, split)
            found[split] = next((path for path in paths if remote.exists(remote.parse_path(path))), "")
        return {split: path for split in (*self.usual_files, *given) if (path := found.get(split))}

    def usual_paths(self, folder: str, split: str) -> list[str]:
        """Returns the paths at which a split's file may be, in order of preference."""
        return [os.path.join(folder, name) for name in self.usual_files[split]]

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

    def unknown_labels(self, examples: Sequence[Any]) -> str:
        """Describes labels that training did not have, in examples that are scored all the same; "" for none."""
        return ""

    @abc.abstractmethod
    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[Any]:
        """Returns examples of texts, each with its pair or None. InputError if the task does not support them."""

    @abc.abstractmethod
    def is_labelled(self, example: Any) -> bool:
        """Returns whether an example can be scored."""

    @abc.abstractmethod
    def texts_of(self, example: Any) -> dict[str, Any]:
        """Returns the texts of an example, as JSON."""

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
        rows = [{key: row[key] for key in ("id", "prediction")} for row in self.predictions(split, outputs)]
        (folder / f"{split.name}.tsv").write_bytes(format_predictions(".tsv", rows))


def make_split(
    task: Task, name: str, examples: Sequence[Any], tokenizer: Tokenizer, *, labels: Labels = "ignored",
    training: bool = False, last_position: bool = False, left_out: Mapping[str, int] | None = None,
) -> Split:  # fmt: skip
    """Returns a split with its encoded examples; for `training` they have the labels that the loss reads."""
    encoded = task.encode(examples, tokenizer, labelled=training)
    is_labelled = labels != "ignored" and all(map(task.is_labelled, examples))
    return Split(name, examples, dataclasses.replace(encoded, last_position=last_position), is_labelled, left_out or {})
