"""Classification and regression of one or two texts: the user's own, and GLUE's nine tasks.

The user's own are rows of CSV, TSV, JSON lines, Parquet or Arrow with a label.

GLUE's files are those of the benchmark's own download (https://gluebenchmark.com/tasks): tab-separated, UTF-8, without
quoting, with a header line except in CoLA's train and dev. A test file has the columns of the others without the label,
and an `index` before them (QQP: an `id`). Columns are found by name.
"""

import dataclasses
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from etils import epath
from numpy.typing import ArrayLike

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files.text_files import named_format
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
from bert_jax.text.sequences import encode_pairs
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# --- Metrics ----------------------------------------------------------------------------------------------------------


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns the share of correct predictions. Both are [N]."""
    return float(np.mean(np.equal(labels, predictions)))


def f1(labels: ArrayLike, predictions: ArrayLike, positive: int = 1) -> float:
    """Returns the F1 of the positive class: 2 TP / (2 TP + FP + FN); 0.0 without one. Both are [N]."""
    y, p = np.equal(labels, positive), np.equal(predictions, positive)
    return 2 * int((y & p).sum()) / int(y.sum() + p.sum()) if y.any() or p.any() else 0.0


def f1_macro(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns the mean F1 of the classes that occur as labels or predictions. Both are [N]."""
    classes = np.union1d(labels, predictions)
    return sum(f1(labels, predictions, one) for one in classes) / len(classes)


def _correlation(name: str) -> Callable[[Sequence[float], ArrayLike], float]:
    """Returns a correlation of `scipy.stats`, which is 0.0 for constant scores or one example."""

    def correlation(labels: Sequence[float], predictions: ArrayLike) -> float:
        from scipy import stats  # takes half a second

        if len(labels) < 2:
            return 0.0
        with warnings.catch_warnings(action="ignore"):  # of constant scores
            return float(np.nan_to_num(getattr(stats, name)(labels, predictions).statistic))

    return correlation


METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy, "f1": f1, "f1_macro": f1_macro, "matthews": _correlation("pearsonr"),
    "pearson": _correlation("pearsonr"), "spearman": _correlation("spearmanr"),
}  # fmt: skip
"""Metrics by name; each takes labels, then predictions. Of two classes Matthews' correlation is Pearson's."""


def compute_metrics(names: Iterable[str], labels: Sequence[float], predictions: ArrayLike) -> dict[str, float]:
    """Computes the metrics with the given names in METRICS, each in [-1, 1] and not in percent.

    `labels` and `predictions` are [N] class numbers, or scores.
    """
    return {name: METRICS[name](labels, predictions) for name in names}


# --- Texts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextExample:
    """An example of one or two texts. `label` is the name of a class or a score; None if it is unknown."""

    id: str
    text_a: str
    text_b: str | None = None
    label: str | float | None = None


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """The user's own texts, with classes or scores.

    Attributes:
      classes: class names by number, those of the training file, sorted; empty for scores.
      texts: names of one or two text columns; empty if unknown, then `text`.
      label: the column of the label.
    """

    test_labels: ClassVar[Labels] = "ignored"

    name: str = "text"
    kind: str = "classify"
    classes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    label: str = "label"

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        task = config.task
        return cls(
            kind="regress" if task.regression else "classify", max_seq_len=task.max_seq_len,
            texts=tuple(filter(None, (task.text, task.text_pair))), label=task.label,
        )  # fmt: skip

    @property
    def regression(self) -> bool:
        """True if labels are scores."""
        return self.kind == "regress"

    @property
    def size(self) -> int:
        return 1 if self.regression else len(self.classes)

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.regression:
            return ("spearman", "pearson")
        return ("accuracy", *(("f1",) if len(self.classes) == 2 else ()), "f1_macro")

    # --- Files --------------------------------------------------------------------------------------------------------

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[TextExample]]:
        examples = self.read(path, bad_rows, split="train")
        if self.regression or self.classes:
            return self, examples
        classes = _sorted_classes({str(example.label) for example in examples})
        if len(classes) < 2:
            raise InputError(f"{path}: expected at least 2 different labels, all are {classes[0]!r}")
        if score := next((name for name in classes if re.fullmatch(r"-?\d*\.\d+", name)), ""):
            log.warning("%s: %d classes, such as %s; for scores set task.regression=True", path, len(classes), score)
        return dataclasses.replace(self, classes=classes), examples

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[TextExample]:  # fmt: skip
        names = tuple(columns) or self.texts or ("text",)
        self._check_count(path, len(names), "name the text columns with --text")

        def example(row: Mapping[str, Any], number: int) -> TextExample:
            first, *second = (text_in(row, name, may_be_empty=labels == "ignored") for name in names)
            label = None if labels == "ignored" else self.label_in(row)
            return TextExample(row_id(row, number), first, second[0] if second else None, label)

        expected = [*names, *([self.label] if labels == "required" else [])]
        header = () if columns else self.header_of(path, split)
        return read_rows(path, bad_rows, example, f"the columns {' and '.join(expected)}", header)

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[TextExample]:
        for pair in pairs:
            count, fix = (1, "give each text a pair") if pair is None else (2, "omit the pair")
            self._check_count("the given text", count, fix)
        return [TextExample(str(number), *both) for number, both in enumerate(zip(texts, pairs, strict=True))]

    def is_labelled(self, example: TextExample) -> bool:
        return example.label is not None

    def header_of(self, path: str, split: str) -> Sequence[str]:
        """Returns the columns of a file without a header line; () for one with it."""
        return ()

    def label_in(self, row: Mapping[str, Any]) -> str | float:
        """Returns the label of a row: a class, one of `classes` if they are known, or a score. ValueError if bad."""
        value = row.get(self.label)
        value = value.strip() if isinstance(value, str) else value
        if value is None or value == "" or value != value:  # NaN, which Parquet and Python's JSON have for none
            raise BadLabel(f"missing label in {self.label!r}")
        if not isinstance(value, str | int | float):
            raise BadLabel(f"label must be a string or a number, got {type(value).__name__}")
        return self._parse_score(value) if self.regression else self._parse_class(value)

    def _parse_class(self, value: str | float) -> str:
        """Returns the class that is a label; 1 and 1.0 are one class."""
        label = re.sub(r"^(-?\d+)\.0$", r"\1", value if isinstance(value, str) else json.dumps(value))
        label = f"{label}.0" if f"{label}.0" in self.classes and label not in self.classes else label
        if self.classes and label not in self.classes:
            raise BadLabel(f"unknown label {label!r:.60}; expected one of {list(self.classes)!s:.300}")
        return label

    def _parse_score(self, value: str | float) -> float:
        """Returns a finite number. Raises ValueError for any other label."""
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, OverflowError):  # a JSON number may have hundreds of digits
            score = math.nan
        if not abs(score) <= float(np.finfo(np.float32).max):
            raise BadLabel(f"label {value!r:.60}: expected a finite number of float32")
        return score

    def _check_count(self, where: str, count: int, fix: str) -> None:
        expected = (len(self.texts),) if self.texts else (1, 2)
        if count not in expected:
            raise InputError(f"{where}: got {count} text(s), expected {' or '.join(map(str, expected))}; {fix}")

    # --- Model --------------------------------------------------------------------------------------------------------

    def encode(self, examples: Sequence[TextExample], tokenizer: Tokenizer, *, labelled: bool) -> EncodedExamples:
        sequences = encode_pairs(tokenizer, [(one.text_a, one.text_b) for one in examples], self.max_seq_len)
        return EncodedExamples(sequences, self._labels(examples) if labelled else None)

    def _labels(self, examples: Sequence[TextExample]) -> np.ndarray:
        """Returns the labels: class numbers, int32 [N], or scores, fp32 [N]."""
        if self.regression:
            return np.array([example.label for example in examples], np.float32)
        numbers = {name: number for number, name in enumerate(self.classes)}
        return np.array([numbers[str(example.label)] for example in examples], np.int32)

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        stacked = np.stack(outputs)
        if self.regression:  # the labels of the file: fp32 has less digits
            return compute_metrics(self.metrics, [example.label for example in split.examples], stacked[:, 0])
        return compute_metrics(self.metrics, self._labels(split.examples).tolist(), stacked.argmax(axis=-1))

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        both = zip(split.examples, outputs, strict=True)
        return [{"id": example.id, **self._prediction(row)} for example, row in both]

    def _prediction(self, outputs: np.ndarray) -> dict[str, Any]:
        """Returns `prediction` (a class name or a score) and `probabilities` by class, from outputs [labels]."""
        if self.regression:
            return {"prediction": round(float(outputs[0]), 6)}
        by_class = dict(zip(self.classes, softmax(outputs).round(6).tolist(), strict=True))
        return {"prediction": self.classes[int(outputs.argmax())], "probabilities": by_class}


def _sorted_classes(names: set[str]) -> tuple[str, ...]:
    """Sorts class names, numerically if all are integers."""
    integers = all(re.fullmatch(r"[+-]?\d+", name) for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if integers else 0, name)))


# --- GLUE -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    """A task of the benchmark.

    Attributes:
      folder: its folder in the download, and the name of the leaderboard's file.
      texts: one or two text columns.
      label: the column of the label.
      classes: label names in the files and on the leaderboard, by class number; empty for a regression.
      metrics: keys of METRICS, that of BERT's paper first; the leaderboard's score is their mean.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "cola": _Spec("CoLA", ("sentence",), "label", ("0", "1"), ("matthews",)),
    "sst2": _Spec("SST-2", ("sentence",), "label", ("0", "1"), ("accuracy",)),
    "mrpc": _Spec("MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"), ("f1", "accuracy")),
    "stsb": _Spec("STS-B", _PAIR, "score", (), ("spearman", "pearson")),
    "qqp": _Spec("QQP", ("question1", "question2"), "is_duplicate", ("0", "1"), ("f1", "accuracy")),
    "mnli": _Spec("MNLI", _PAIR, "gold_label", ("entailment", "neutral", "contradiction"), ("accuracy",)),
    "qnli": _Spec("QNLI", ("question", "sentence"), "label", _ENTAILMENT, ("accuracy",)),
    "rte": _Spec("RTE", _PAIR, "label", _ENTAILMENT, ("accuracy",)),
    "wnli": _Spec("WNLI", _PAIR, "label", ("0", "1"), ("accuracy",)),
}
"""The tasks by name. Classes are numbered as in `datasets`. (The reference's MNLI has contradiction first.)"""

_SPLITS = ("train", "dev", "test")
_MNLI_SPLITS = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched", "diagnostic")
_SUBMISSIONS = {"test": "{}.tsv", "test_matched": "{}-m.tsv", "test_mismatched": "{}-mm.tsv", "diagnostic": "AX.tsv"}
_COLA = ("source", "label", "author_label", "sentence")  # train and dev have no header


@dataclass(frozen=True, kw_only=True)
class GlueTask(TextTask):
    """A task of GLUE. Files in the benchmark's own formats have its columns; `--text` names those of others."""

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        return cls.of(config.task.name, max_seq_len=config.task.max_seq_len)

    @classmethod
    def of(cls, name: str, **settings: Any) -> Self:
        """Returns the task with a name, in any case, with or without hyphens. InputError for an unknown name."""
        known = name.lower().replace("-", "").replace("_", "")
        if known not in TASKS:
            raise InputError(f"task.name={name!r}: unknown GLUE task; expected one of {', '.join(TASKS)}")
        spec = TASKS[known]
        return cls(
            name=f"glue/{known}", kind="classify" if spec.classes else "regress", classes=spec.classes,
            texts=spec.texts, label=spec.label, **settings,
        )  # fmt: skip

    @property
    def _spec(self) -> _Spec:
        return TASKS[self.name.partition("/")[2]]

    @property
    def metrics(self) -> tuple[str, ...]:
        return self._spec.metrics

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        folder = self._spec.folder
        files: dict[str, tuple[str, ...]] = {
            split: (f"{split}.tsv", f"{folder}/{split}.tsv")
            for split in (_MNLI_SPLITS if folder == "MNLI" else _SPLITS)
        }
        if "diagnostic" in files:  # which has a folder of its own beside the tasks'
            files["diagnostic"] += ("diagnostic/diagnostic.tsv", "../diagnostic/diagnostic.tsv")
        return files

    def header_of(self, path: str, split: str) -> Sequence[str]:
        is_test = "test" in (split, os.path.basename(path).partition(".")[0])
        return _COLA if self._spec.folder == "CoLA" and named_format(path) == "tsv" and not is_test else ()

    def label_in(self, row: Mapping[str, Any]) -> str | float:
        if row.get(self.label) == "-":  # in MNLI
            raise ValueError("label '-': annotators did not agree on a gold label")
        return super().label_in(row)

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        """Writes the leaderboard's file of a test split; of another one the same as for any text."""
        if split.name not in _SUBMISSIONS:
            super().write(split, outputs, folder)
            return
        predicted = [(row["id"], row["prediction"]) for row in self.predictions(split, outputs)]
        if self.regression:
            predicted = [(key, f"{np.clip(score, 0, 5):.3f}") for key, score in predicted]  # STS-B's range
        name = _SUBMISSIONS[split.name].format(self._spec.folder)
        write_lines(folder / name, ["index\tprediction", *(f"{key}\t{label}" for key, label in predicted)])
