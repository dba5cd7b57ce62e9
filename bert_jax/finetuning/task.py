"""What a task is to the run that trains on it: rows to train on, and splits to be scored or predicted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from etils import epath

from bert_jax.finetuning.encoded_rows import Rows

Outputs = Sequence[np.ndarray]
"""Of each example what the model says: fp32 [labels] of a sequence, [choices], or of its tokens [T, outputs]."""


@dataclass(frozen=True)
class Split:
    """A split that is not trained on.

    Attributes:
      name: what it is called: dev, dev_mismatched, test ...
      rows: what the model reads.
      score: outputs to the official metrics; None where there are no labels.
      write: outputs, as files in a folder.
    """

    name: str
    rows: Rows
    score: Callable[[Outputs], dict[str, float]] | None
    write: Callable[[Outputs, epath.Path], None]


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

    def about(self) -> dict[str, Any]:
        """What has to be known to predict with the model: JSON."""

    def train(self) -> Rows:
        """What is trained on."""

    def splits(self) -> Sequence[Split]:
        """What is scored or predicted."""
