"""Classification and regression of one or two texts: the user's own, and the nine tasks of GLUE.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files.text_files import named_format
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.results import compute_metrics
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

TEXT_FIELDS = (
    ("text",), ("text_a", "text_b"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("sentence",),
)  # fmt: skip
"""Default names of the text columns: the first of these that a file has."""

SCORE_RANGE = (0.0, 5.0)
"""The range of STS-B's scores, to which submissions are clipped."""

_GREATEST = float(np.finfo(np.float32).max)


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
      texts: names of one or two text columns; those of the training file. If empty, the first of TEXT_FIELDS.
      label: the column of the label.
      id: the column of the row's id, if there is one; see `row_id`.
    """

    test_labels: ClassVar[Labels] = "ignored"

    name: str = "text"
    kind: str = "classify"
    classes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    label: str = "label"
    id: str = "id"

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        task = config.task
        if task.text_pair and not task.text:
            raise InputError(f"task.text_pair={task.text_pair}: the second text requires the first; set task.text")
        return cls(
            kind="regress" if task.regression else "classify", max_seq_len=task.max_seq_len,
            texts=tuple(name for name in (task.text, task.text_pair) if name), label=task.label,
        )  # fmt: skip

    @property
    def regression(self) -> bool:
        """True if labels are scores."""
        return self.kind == "regress"

    @property
    def size(self) -> int:
        return 1 if self.regression else len(self.classes)

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.regression:
            return ("spearman", "pearson")
        return ("accuracy", *(("f1",) if len(self.classes) == 2 else ()), "f1_macro")

    # --- Files --------------------------------------------------------------------------------------------------------

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[TextExample]]:
        texts, examples = self._read(path, bad_rows, "train", "required", ())
        task = dataclasses.replace(self, texts=texts)
        if not self.regression and not self.classes:
            classes = _sorted_classes({str(example.label) for example in examples})
            if len(classes) < 2:
                raise InputError(f"{path}: expected at least 2 different labels, all are {classes[0]!r}")
            task = dataclasses.replace(task, classes=classes)
        if "f1" in task.metrics:
            log.info("f1 is that of the label %r", task.classes[-1])
        return task, examples

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[TextExample]:  # fmt: skip
        texts, examples = self._read(path, bad_rows, split, labels, columns)
        self._check_pairs(path, len(texts), "name the text columns with --text")
        return examples

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[TextExample]:
        for pair in pairs:
            self._check_pairs("the given text", 1 if pair is None else 2, "give a pair to every text, or to none")
        both = zip(texts, pairs, strict=True)
        return [TextExample(str(number), *texts) for number, texts in enumerate(both)]

    def is_labelled(self, example: TextExample) -> bool:
        return example.label is not None

    def texts_of(self, example: TextExample) -> dict[str, Any]:
        if example.text_b is None:
            return {"text": example.text_a}
        return {"text_a": example.text_a, "text_b": example.text_b}

    def header_of(self, path: str, split: str) -> Sequence[str]:
        """Returns the columns of a file without a header line; () for one with it."""
        return ()

    def _read(
        self, path: str, bad_rows: BadRows, split: str, labels: Labels, columns: Sequence[str]
    ) -> tuple[tuple[str, ...], list[TextExample]]:
        """Returns the names of the text columns, and the examples."""
        if len(columns) > 2:
            raise InputError(f"{', '.join(columns)}: expected 1 or 2 text columns, got {len(columns)}")
        names, examples = tuple(columns) or self.texts, []
        for number, place, row in read_rows(path, bad_rows, () if columns else self.header_of(path, split)):
            names = names or next((fields for fields in TEXT_FIELDS if all(name in row for name in fields)), ())
            if not names:
                raise InputError(f"{path}: text columns not found among {list(row)!s:.300}; name one or two")
            try:
                first, *second = (text_in(row, name, may_be_empty=self.reads_empty(labels)) for name in names)
                label = None if labels == "ignored" else self.label_in(row)
            except ValueError as error:
                bad_rows.add(path, place, error)
                continue
            examples.append(TextExample(row_id(row, number, self.id), first, second[0] if second else None, label))
        expected = [*(names or ("a text",)), *([self.label] if labels == "required" else [])]
        bad_rows.check_usable(path, examples, f"the columns {' and '.join(expected)}")
        return names, examples

    def reads_empty(self, labels: Labels) -> bool:
        """Returns whether a row may have an empty text."""
        return False

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
        if not abs(score) <= _GREATEST:
            raise BadLabel(f"label {value!r:.60}: expected a finite number of float32")
        return score

    def _check_pairs(self, where: str, count: int, fix: str) -> None:
        if self.texts and count != len(self.texts):
            raise InputError(f"{where}: got {count} text(s), the model was trained on {len(self.texts)}; {fix}")

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
        predicted = stacked[:, 0] if self.regression else stacked.argmax(axis=-1)
        return compute_metrics(self.metrics, self._labels(split.examples).tolist(), predicted)

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
    try:
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    except ValueError:
        return tuple(sorted(names))


# --- GLUE -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    """A task of the benchmark.

    Attributes:
      folder: its folder in the download, and the name of the leaderboard's file.
      texts: one or two text columns.
      label: the column of the label.
      classes: label names in the files and on the leaderboard, by class number; empty for a regression.
      metrics: keys of `results.METRICS`, that of BERT's paper first; the leaderboard's score is their mean.
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

    def reads_empty(self, labels: Labels) -> bool:
        return labels == "ignored"  # the leaderboard expects every row

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
            predicted = [(key, f"{np.clip(score, *SCORE_RANGE):.3f}") for key, score in predicted]
        name = _SUBMISSIONS[split.name].format(self._spec.folder)
        write_lines(folder / name, ["index\tprediction", *(f"{key}\t{label}" for key, label in predicted)])
