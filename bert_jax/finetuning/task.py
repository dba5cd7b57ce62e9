"""The interface of a task: examples to train on, and splits to score or predict."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from etils import epath

from bert_jax.data.hashing import key_from
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.batching import EncodedExamples

Outputs = Sequence[np.ndarray]
"""The model's fp32 outputs by example: [labels] of a sequence, [choices], or [T, outputs] of T tokens."""


def softmax(outputs: np.ndarray) -> np.ndarray:
    """Returns the probabilities, fp64 [labels], of an example's outputs [labels]."""
    exponents = np.exp(outputs.astype(np.float64) - outputs.max())
    result: np.ndarray = exponents / exponents.sum()
    return result


@dataclass(frozen=True)
class Split:
    """An evaluation or test split.

    Attributes:
      name: dev, dev_mismatched, test ...
      examples: the model's input.
      score: maps outputs to the official metrics; None without labels.
      write: writes the predictions of outputs to files in a folder.
      predictions: maps outputs to a JSON object for each example, in the file's order: `id`, `prediction` and further
        keys of the task.
      inputs: returns a JSON object for each example with its texts, in the order of `predictions`.
      rows: the examples as they were read, with their labels.
      left_out: number of further examples in the file, by the reason for which they are skipped
        (`task_files.MISSING_LABEL` and others).
    """

    name: str
    examples: EncodedExamples
    score: Callable[[Outputs], dict[str, float]] | None
    write: Callable[[Outputs, epath.Path], None]
    predictions: Callable[[Outputs], list[dict[str, Any]]]
    inputs: Callable[[], list[dict[str, Any]]]
    rows: Sequence[Any]
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def scorable(self) -> int:
        """Number of examples that `score` scores, each counted once regardless of its number of sequences."""
        return len(self.rows)

    def hash(self) -> str:
        """Returns a hash of the examples, in their order, and of their labels."""
        return f"{key_from(*self.rows):016x}"


class Task(Protocol):
    """A task with its data read and encoded."""

    @property
    def name(self) -> str:
        """The task's name, such as `glue/sst2`."""

    @property
    def kind(self) -> str:
        """The kind of head; see `TaskHead`."""

    @property
    def size(self) -> int:
        """The head's number of outputs; see `TaskHead`."""

    @property
    def main_metric(self) -> str:
        """The metric that selects a run or an epoch, taken from the first scored split; higher is better."""

    @property
    def metrics(self) -> Sequence[str]:
        """The metrics that may be the main one, as in the results of `Split.score`; of all, higher is better."""

    @property
    def label_names(self) -> Sequence[str]:
        """The labels by class number, of texts or tokens; empty if the task has none."""

    @property
    def positive_label(self) -> str | None:
        """The positive label of a binary `f1`; None for any other task."""

    def record(self) -> dict[str, Any]:
        """Returns the task's record in checkpoints, as JSON: all that prediction needs."""

    def train(self) -> EncodedExamples:
        """Returns the training examples."""

    def splits(self) -> Sequence[Split]:
        """Returns the splits to score or predict."""


def with_main_metric(task: Task, name: str) -> Task:
    """Returns the task with the main metric `name`, "" for the task's own. InputError if it is not among `metrics`."""
    if not name:
        return task
    if name not in task.metrics:
        raise InputError(
            f"task.main_metric={name}: expected one of {', '.join(task.metrics)}, the metrics of {task.name}"
        )
    result: Task = dataclasses.replace(cast(Any, task), main_metric=name)
    return result
