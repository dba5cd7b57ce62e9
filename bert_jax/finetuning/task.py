"""What a task is to the run that trains on it: rows to train on, and splits to be scored or predicted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from etils import epath

from bert_jax.finetuning.inputs.batching import Rows

Outputs = Sequence[np.ndarray]
"""Of each example what the model says: fp32 [labels] of a sequence, [choices], or of its tokens [T, outputs]."""


def softmax(outputs: np.ndarray) -> np.ndarray:
    """Returns fp64 [labels]: probabilities, of an example's outputs [labels]."""
    exponents = np.exp(outputs.astype(np.float64) - outputs.max())
    return exponents / exponents.sum()


@dataclass(frozen=True)
class Split:
    """A split that is not trained on.

    Attributes:
      name: what it is called: dev, dev_mismatched, test ...
      rows: what the model reads.
      score: outputs to the official metrics; None where there are no labels.
      write: outputs, as files in a folder.
      predictions: outputs to a JSON object for each example, in the file's order: `id`, `prediction`, and what else
        there is to say of it.
      scorable: examples that `score` scores, each counted once whatever its rows.
      left_out: how many more the file has that nothing scores, by reason (`bad_rows.MISSING_LABEL` and the like).
    """

    name: str
    rows: Rows
    score: Callable[[Outputs], dict[str, float]] | None
    write: Callable[[Outputs, epath.Path], None]
    predictions: Callable[[Outputs], list[dict[str, Any]]]
    scorable: int
    left_out: Mapping[str, int] = field(default_factory=dict)


class Task(Protocol):
    """A task with its data read and encoded."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def kind(self) -> str:
        """As of `TaskHead`."""

    @property
    def size(self) -> int:
        """As of `TaskHead`."""

    @property
    def main_metric(self) -> str:
        """What is reported, and selected by, of the first split with a score: more is better."""

    @property
    def positive_label(self) -> str | None:
        """The label that `f1` is of, where it is of one of two; else None."""

    def about(self) -> dict[str, Any]:
        """What has to be known to predict with the model: JSON."""

    def train(self) -> Rows:
        """What is trained on."""

    def splits(self) -> Sequence[Split]:
        """What is scored or predicted."""
