"""Text classification and regression: GLUE tasks and the user's own files of one or two texts with a label."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning import task_metrics
from bert_jax.finetuning.inputs import text_files
from bert_jax.finetuning.inputs.batching import EncodedExamples, Encoding
from bert_jax.finetuning.inputs.task_files import BadRows, write_lines
from bert_jax.finetuning.task import Outputs, Split, softmax
from bert_jax.finetuning.tasks import glue
from bert_jax.text.sequences import TextExample, encode_examples

log = logging.getLogger(__name__)


def classes_or_scores(outputs: Outputs, *, regression: bool) -> np.ndarray:
    """Converts the outputs of N examples to the most probable classes, int64 [N], or to scores, fp32 [N]."""
    stacked = np.stack(outputs)
    return stacked[:, 0] if regression else stacked.argmax(axis=-1)


@dataclass(frozen=True)
class TextTask:
    """A classification or regression of texts.

    Attributes:
      name: `glue/sst2`, or `text`.
      classes: class names by number; empty for a regression.
      metric_names: keys of `task_metrics.METRICS`.
      examples: the examples of each split; the first split is the training split.
      fields: column names of the user's own files, found or given.
      positive_label: the positive class of `f1`; None if the task has no `f1`, or for GLUE.
      left_out: numbers of skipped rows of each split, by reason.
    """

    name: str
    classes: tuple[str, ...]
    metric_names: tuple[str, ...]
    main_metric: str
    examples: Mapping[str, Sequence[TextExample]]
    encoding: Encoding
    fields: text_files.TextFields | None = None
    glue_task: glue.GlueTask | None = None
    positive_label: str | None = None
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def regression(self) -> bool:
        """True if labels are scores."""
        return not self.classes

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.metric_names

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def kind(self) -> str:
        return "regress" if self.regression else "classify"

    @property
    def size(self) -> int:
        return 1 if self.regression else len(self.classes)

    def record(self) -> dict[str, Any]:
        fields = self.fields or text_files.TextFields()
        is_pair = any(example.text_b is not None for example in self.examples["train"])
        positive = {} if self.positive_label is None else {"positive_label": self.positive_label}
        return {
            "name": self.name, "classes": list(self.classes), "texts": list(fields.texts), "id": fields.id,
            "is_pair": is_pair, **positive,
        }  # fmt: skip

    def train(self) -> EncodedExamples:
        return self._encoded("train")

    def splits(self) -> list[Split]:
        return [self._split(name) for name in self.examples if name != "train"]

    def _encoded(self, name: str) -> EncodedExamples:
        """Encodes a split. Its labels are None if any example has no label."""
        examples, labels = self.examples[name], None
        if all(example.label is not None for example in examples):
            kind = np.float32 if self.regression else np.int32
            labels = np.array([example.label for example in examples], kind)
        sequences = encode_examples(self.encoding.tokenizer, examples, self.encoding.max_seq_len)
        return EncodedExamples(sequences, labels, last_position=self.encoding.last_position)

    def _split(self, name: str) -> Split:
        examples, encoded = self.examples[name], self._encoded(name)

        def score(outputs: Outputs) -> dict[str, float]:
            predicted = classes_or_scores(outputs, regression=self.regression)
            positive = 1 if self.positive_label is None else self.classes.index(self.positive_label)
            labels = np.asarray(encoded.labels).tolist()
            return task_metrics.compute(self.metric_names, labels, predicted, positive=positive)

        def write(outputs: Outputs, folder: epath.Path) -> None:
            predicted = classes_or_scores(outputs, regression=self.regression)
            if self.glue_task is not None and name in self.glue_task.submissions:
                glue.write_submission(folder, self.glue_task, name, examples, predicted.tolist())
                return
            shown = (
                [f"{score:.4f}" for score in predicted]
                if self.regression
                else [self.classes[label] for label in predicted]
            )
            lines = [f"{example.id}\t{label}" for example, label in zip(examples, shown, strict=True)]
            write_lines(folder / f"{name}.tsv", ["id\tprediction", *lines])

        def predictions(outputs: Outputs) -> list[dict[str, Any]]:
            return [
                {"id": example.id, **self._prediction(example_outputs)}
                for example, example_outputs in zip(examples, outputs, strict=True)
            ]

        def inputs() -> list[dict[str, Any]]:
            return [
                {"text": example.text_a}
                if example.text_b is None
                else {"text_a": example.text_a, "text_b": example.text_b}
                for example in examples
            ]

        return Split(
            name, encoded, None if encoded.labels is None else score, write, predictions, inputs, examples,
            self.left_out.get(name, {}),
        )  # fmt: skip

    def _prediction(self, outputs: np.ndarray) -> dict[str, Any]:
        """Returns `prediction` (a class name or a score) and `probabilities` by class, from outputs [labels]."""
        if self.regression:
            return {"prediction": round(float(outputs[0]), 6)}
        by_class = dict(zip(self.classes, softmax(outputs).round(6).tolist(), strict=True))
        return {"prediction": self.classes[int(outputs.argmax())], "probabilities": by_class}


def glue_task(config: FinetuneConfig, encoding: Encoding) -> TextTask:
    """Reads a GLUE task from `data.path`. InputError for an unknown task or a missing file."""
    task = glue.get_task(config.task.name)
    bad_rows = BadRows(strict=config.data.strict)
    # Test sets are optional.
    chosen = [
        split for split in task.splits
        if split.startswith(("train", "dev")) or glue.has_split(config.data.path, task, split)
    ]  # fmt: skip
    examples, left_out = {}, {}
    for split in chosen:
        examples[split] = glue.read_split(config.data.path, task, split, bad_rows)
        left_out[split] = bad_rows.take_reasons()
    bad_rows.report()
    return TextTask(
        f"glue/{task.name}", task.labels, task.metrics, task.main_metric, examples, encoding, glue_task=task,
        left_out=left_out,
    )  # fmt: skip


def own_task(config: FinetuneConfig, encoding: Encoding) -> TextTask:
    """Reads the user's own files `task.train`, `task.dev` and `task.test`. InputError if one cannot be read."""
    task = config.task
    if not task.train:
        raise InputError("task.train is empty; set the training file with --config.task.train=FILE")
    if task.text_pair and not task.text:
        raise InputError(f"task.text_pair={task.text_pair}: the second text requires the first; set task.text")
    texts = tuple(name for name in (task.text, task.text_pair) if name)
    fields = text_files.find_fields(
        os.path.join(config.data.path, task.train), text_files.TextFields(texts, task.label)
    )
    bad_rows = BadRows(strict=config.data.strict)

    def read(file: str, labels: tuple[str, ...] | None, *, labelled: bool = True) -> tuple[Any, ...]:
        return text_files.read_texts(
            os.path.join(config.data.path, file),
            bad_rows,
            fields=fields,
            labels=labels,
            regression=task.regression,
            labelled=labelled,
        )

    train, classes = read(task.train, None)
    if not task.regression and len(classes) < 2:
        raise InputError(f"task.train={task.train}: expected at least 2 different labels, all are {classes[0]!r}")
    if len(classes) > 2 and text_files.are_scores(classes):
        log.warning(
            "The %d labels are numbers but treated as classes; task.regression=True predicts them", len(classes)
        )
    positive_label = choose_positive_label(task.positive_label, classes)
    examples, left_out = {"train": train}, {}
    bad_rows.take_reasons()
    if task.dev:
        examples["dev"], _ = read(task.dev, classes or None)
        left_out["dev"] = bad_rows.take_reasons()
    if task.test:
        examples["test"], _ = read(task.test, classes or None, labelled=False)
        left_out["test"] = bad_rows.take_reasons()
    bad_rows.report()
    if positive_label is not None and task.dev:
        log.info("f1 is that of the label %r (task.positive_label); f1_macro is the mean over labels", positive_label)
    return own_text_task(classes, examples, encoding, fields, positive_label, left_out)


def own_text_task(
    classes: tuple[str, ...],
    examples: Mapping[str, Sequence[TextExample]],
    encoding: Encoding,
    fields: text_files.TextFields,
    positive_label: str | None,
    left_out: Mapping[str, Mapping[str, int]],
) -> TextTask:
    """Returns the task of the user's own examples: a regression if there are no classes."""
    names = ("accuracy", *(("f1",) if positive_label is not None else ()), "f1_macro")
    return TextTask(
        "text", classes, names if classes else ("pearson", "spearman"), "accuracy" if classes else "spearman",
        examples, encoding, fields, positive_label=positive_label, left_out=left_out,
    )  # fmt: skip


def choose_positive_label(given: str, classes: tuple[str, ...]) -> str | None:
    """Returns the positive class of f1: the given or the last of two; None if not binary. InputError if invalid."""
    if given and len(classes) != 2:
        what = f"{len(classes)} labels" if classes else "numbers as labels"
        raise InputError(f"task.positive_label={given}: requires 2 labels, the task has {what}; leave it empty")
    if given and given not in classes:
        raise InputError(f"task.positive_label={given}: expected {' or '.join(classes)}, the labels of task.train")
    return given or (classes[-1] if len(classes) == 2 else None)
