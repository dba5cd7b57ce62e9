"""Classification and regression of one or two texts: rows of CSV, TSV, JSON lines, Parquet or Arrow with a label."""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files.text_files import named_format
from bert_jax.finetuning import metrics
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.rows import MISSING_LABEL, UNKNOWN_LABEL, BadLabel, BadRows, Row, read_rows, row_id, text_in
from bert_jax.finetuning.task import Labels, Outputs, Split, Task, softmax
from bert_jax.text.sequences import encode_pairs
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TEXT_FIELDS = (
    ("text",), ("text_a", "text_b"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("sentence",),
)  # fmt: skip
"""Default names of the text columns: the first of these that a file has."""

_LISTED = 20  # maximum names in a message
_GREATEST = float(np.finfo(np.float32).max)
_WHOLE = re.compile(r"(-?\d+)(\.0)?")


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
      positive_label: of two classes, the one that `f1` is of; "" is the last.
    """

    test_labels: ClassVar[Labels] = "ignored"

    name: str = "text"
    kind: str = "classify"
    classes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    label: str = "label"
    id: str = "id"
    positive_label: str = ""

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        task = config.task
        if task.text_pair and not task.text:
            raise InputError(f"task.text_pair={task.text_pair}: the second text requires the first; set task.text")
        return cls(
            kind="regress" if task.regression else "classify", max_seq_len=task.max_seq_len,
            texts=tuple(name for name in (task.text, task.text_pair) if name), label=task.label,
            positive_label=task.positive_label,
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
    def positive(self) -> str | None:
        if len(self.classes) != 2:
            return None
        return self.positive_label if self.positive_label in self.classes else self.classes[-1]

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.regression:
            return ("spearman", "pearson")
        return ("accuracy", *(("f1",) if self.positive is not None else ()), "f1_macro")

    # --- Files --------------------------------------------------------------------------------------------------------

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[TextExample]]:
        texts, examples = self._read(path, bad_rows, "train", "required", ())
        return dataclasses.replace(self, texts=texts)._with_classes(path, examples), examples

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

    def rows_of(self, path: str, split: str, bad_rows: BadRows) -> Iterator[Row]:
        """Yields the rows of a file."""
        return read_rows(path, bad_rows)

    def _read(
        self, path: str, bad_rows: BadRows, split: str, labels: Labels, columns: Sequence[str]
    ) -> tuple[tuple[str, ...], list[TextExample]]:
        """Returns the names of the text columns, and the examples."""
        if len(columns) > 2:
            raise InputError(f"{', '.join(columns)}: expected 1 or 2 text columns, got {len(columns)}")
        given, is_table = tuple(columns) or self.texts, named_format(path) != "json"
        names: tuple[str, ...] = ()
        examples = []
        for number, place, row in read_rows(path, bad_rows) if columns else self.rows_of(path, split, bad_rows):
            if not names:
                names = given or next((fields for fields in TEXT_FIELDS if all(name in row for name in fields)), ())
                required = [*names, *([self.label] if labels == "required" else [])] if is_table else []
                if missing := [name for name in required if name not in row]:
                    raise InputError(f"{path}: missing column {missing[0]!r}; expected one of {_listed(row)}")
                if not names:
                    raise InputError(f"{path}: text columns not found among {_listed(row)}; name one or two")
            try:
                texts = [text_in(row, name, may_be_empty=self.reads_empty(labels)) for name in names]
                label = None if labels == "ignored" else self.label_in(row)
            except ValueError as error:
                bad_rows.add(path, place, error)
                continue
            examples.append(TextExample(row_id(row, number, self.id), texts[0], texts[1] if texts[1:] else None, label))
        expected = [*(names or ("a text",)), *([self.label] if labels == "required" else [])]
        bad_rows.check_usable(path, examples, " and ".join(expected))
        return names, examples

    def reads_empty(self, labels: Labels) -> bool:
        """Returns whether a row may have an empty text."""
        return False

    def label_in(self, row: Mapping[str, Any]) -> str | float:
        """Returns the label of a row: a class, one of `classes` if they are known, or a score. ValueError if bad."""
        value = row.get(self.label)
        value = value.strip() if isinstance(value, str) else value
        if value is None or value == "" or value != value:  # NaN, which Parquet and Python's JSON have for none
            raise BadLabel(f"missing label in {self.label!r}", MISSING_LABEL)
        if not isinstance(value, str | int | float):
            raise BadLabel(f"label must be a string or a number, got {type(value).__name__}", UNKNOWN_LABEL)
        return self.parse_score(value) if self.regression else self.parse_class(value)

    def parse_class(self, value: str | float) -> str:
        """Returns the class that is a label, or the same whole number: 1 and 1.0 are one class."""
        label = value if isinstance(value, str) else json.dumps(value)
        found = _same(label, self.classes)
        if self.classes and found not in self.classes:
            raise BadLabel(f"unknown label {label!r:.60}; expected one of {_listed(self.classes)}", UNKNOWN_LABEL)
        return found

    def parse_score(self, value: str | float) -> float:
        """Returns a finite number. Raises ValueError for any other label."""
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, OverflowError):  # a JSON number may have hundreds of digits
            score = math.nan
        if not abs(score) <= _GREATEST:
            raise BadLabel(f"label {value!r:.60}: expected a finite number of float32", UNKNOWN_LABEL)
        return score

    def _with_classes(self, path: str, examples: Sequence[TextExample]) -> Self:
        """Returns the task with the classes of its training examples. InputError for fewer than two."""
        task = self
        if not self.regression:
            classes = _sorted_classes({str(example.label) for example in examples})
            if len(classes) < 2:
                raise InputError(f"{path}: expected at least 2 different labels, all are {classes[0]!r}")
            if len(classes) > 2 and are_scores(classes):
                log.warning(
                    "The %d labels are numbers but treated as classes; task.regression=True predicts them", len(classes)
                )
            task = dataclasses.replace(self, classes=classes, main_metric="")
        if (given := self.positive_label) and given != task.positive:
            known = ", ".join(task.classes) or "numbers"
            raise InputError(f"task.positive_label={given}: expected one of two labels, got {known} in task.train")
        if task.positive is not None:
            log.info("f1 is that of the label %r (task.positive_label)", task.positive)
        return dataclasses.replace(task, positive_label=task.positive or "")

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
        return np.array([numbers[_same(str(example.label), numbers)] for example in examples], np.int32)

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        positive = 1 if self.positive is None else self.classes.index(self.positive)
        labels = self._labels(split.examples).tolist()
        return metrics.compute(self.metrics, labels, self._predicted(outputs), positive=positive)

    def _predicted(self, outputs: Outputs) -> np.ndarray:
        """Converts the outputs of N examples to the most probable classes, int64 [N], or to scores, fp32 [N]."""
        stacked = np.stack(outputs)
        return stacked[:, 0] if self.regression else stacked.argmax(axis=-1)

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        both = zip(split.examples, outputs, strict=True)
        return [{"id": example.id, **self._prediction(row)} for example, row in both]

    def _prediction(self, outputs: np.ndarray) -> dict[str, Any]:
        """Returns `prediction` (a class name or a score) and `probabilities` by class, from outputs [labels]."""
        if self.regression:
            return {"prediction": round(float(outputs[0]), 6)}
        by_class = dict(zip(self.classes, softmax(outputs).round(6).tolist(), strict=True))
        return {"prediction": self.classes[int(outputs.argmax())], "probabilities": by_class}


def are_scores(labels: Iterable[str]) -> bool:
    """Returns True if labels are numbers and not all are integers."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return not all(number.is_integer() for number in numbers)


def _same(label: str, classes: Collection[str]) -> str:
    """Returns the class that is a label or the same whole number; the label without one."""
    whole = None if label in classes else _WHOLE.fullmatch(label)
    forms = (whole[1], f"{whole[1]}.0") if whole else ()
    return next((form for form in forms if form in classes), label)


def _sorted_classes(names: set[str]) -> tuple[str, ...]:
    """Sorts class names, numerically if all are integers; 1 and 1.0 are one class."""
    names = {name for name in names if not (name.endswith(".0") and _WHOLE.fullmatch(name) and name[:-2] in names)}
    try:
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    except ValueError:
        return tuple(sorted(names))


def _listed(names: Iterable[str]) -> str:
    """Joins names, quoted to show spaces, and truncates a long list."""
    shown = [repr(name) for name in names]
    return ", ".join(shown if len(shown) <= _LISTED else [*shown[:_LISTED], f"... {len(shown)} in total"])
