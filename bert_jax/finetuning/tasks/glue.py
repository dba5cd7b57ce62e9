r"""The nine GLUE tasks: their distributed files, their metrics, and the leaderboard's submission files.

The formats are those of the benchmark's own download (https://gluebenchmark.com/tasks): tab-separated, UTF-8, without
quoting, with a header line except in CoLA's train and dev. A test file has the columns of the others without the label,
and an `index` before them (QQP: an `id`). Columns are found by name.

MRPC is read from train.tsv, dev.tsv and test.tsv, or from Microsoft's msr_paraphrase_train.txt and
msr_paraphrase_test.txt; the pairs of the training file listed in dev_ids.tsv are GLUE's dev set.

`tfds:glue/sst2` in place of a folder reads TensorFlow Datasets (see `bert_jax.data.corpora.tfds_corpus`).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
from etils import epath

from bert_jax.data.corpora import tfds_corpus
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.task_files import (
    MISSING_LABEL,
    NO_GOLD_LABEL,
    UNKNOWN_LABEL,
    BadLabel,
    BadRows,
    columns_of,
    text_lines,
    tsv_rows,
    write_lines,
)
from bert_jax.text.sequences import TextExample

log = logging.getLogger(__name__)

SCORE_RANGE = (0.0, 5.0)
"""The range of STS-B's scores."""

_COLA = ("source", "label", "author_label", "sentence")  # train and dev have no header
_MSR_FILES = {"train": "msr_paraphrase_train.txt", "dev": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}
_DEV_IDS = "dev_ids.tsv"
# The text features of TFDS, where they are not the columns of the files.
_TFDS_TEXTS = {"mrpc": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis")}
_TFDS_NO_LABEL = -1
_NOT_AGREED = "-"  # in SNLI and MultiNLI, where annotators did not agree


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task.

    Attributes:
      name: the name in `task.name` and in TFDS.
      folders: names of its folder in downloads.
      texts: one or two text columns.
      label_column: the column of the label.
      labels: label names in the files and on the leaderboard, by class number; empty for a regression.
      metrics: keys of `task_metrics.METRICS`; the leaderboard's score is their mean.
      main_metric: the metric in BERT's paper.
      splits: file names of each split, in order of preference.
      submissions: the leaderboard's file for each split without labels.
    """

    name: str
    folders: tuple[str, ...]
    texts: tuple[str, ...]
    label_column: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    main_metric: str
    splits: Mapping[str, tuple[str, ...]]
    submissions: Mapping[str, str]

    @property
    def regression(self) -> bool:
        return not self.labels


_SPLITS = {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
_MNLI_SPLITS = {
    "train": ("train.tsv",), "dev_matched": ("dev_matched.tsv",), "dev_mismatched": ("dev_mismatched.tsv",),
    "test_matched": ("test_matched.tsv",), "test_mismatched": ("test_mismatched.tsv",),
    "diagnostic": ("diagnostic.tsv", "AX.tsv", "ax.tsv"),
}  # fmt: skip
_MNLI_FILES = {"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv", "diagnostic": "AX.tsv"}
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_SINGLE = ("sentence",)
_F1 = ("f1", "accuracy")
_CORRELATIONS = ("pearson", "spearman")

TASKS = {
    task.name: task
    for task in (
        GlueTask("cola", ("CoLA",), _SINGLE, "label", _BINARY, ("matthews",), "matthews", _SPLITS,
                 {"test": "CoLA.tsv"}),
        GlueTask("sst2", ("SST-2", "SST2"), _SINGLE, "label", _BINARY, ("accuracy",), "accuracy", _SPLITS,
                 {"test": "SST-2.tsv"}),
        GlueTask("mrpc", ("MRPC",), ("#1 String", "#2 String"), "Quality", _BINARY, _F1, "f1", _SPLITS,
                 {"test": "MRPC.tsv"}),
        GlueTask("stsb", ("STS-B", "STSB"), _PAIR, "score", (), _CORRELATIONS, "spearman", _SPLITS,
                 {"test": "STS-B.tsv"}),
        GlueTask("qqp", ("QQP",), ("question1", "question2"), "is_duplicate", _BINARY, _F1, "f1", _SPLITS,
                 {"test": "QQP.tsv"}),
        GlueTask("mnli", ("MNLI",), _PAIR, "gold_label", ("entailment", "neutral", "contradiction"), ("accuracy",),
                 "accuracy", _MNLI_SPLITS, _MNLI_FILES),
        GlueTask("qnli", ("QNLI", "QNLIv2"), ("question", "sentence"), "label", _ENTAILMENT, ("accuracy",), "accuracy",
                 _SPLITS, {"test": "QNLI.tsv"}),
        GlueTask("rte", ("RTE",), _PAIR, "label", _ENTAILMENT, ("accuracy",), "accuracy", _SPLITS,
                 {"test": "RTE.tsv"}),
        GlueTask("wnli", ("WNLI",), _PAIR, "label", _BINARY, ("accuracy",), "accuracy", _SPLITS,
                 {"test": "WNLI.tsv"}),
    )
}  # fmt: skip
"""The tasks by name. Classes are numbered as in TFDS and `datasets`. (The reference's MNLI has contradiction first.)"""


def get_task(name: str) -> GlueTask:
    """Returns the task with this name, in any case, with or without hyphens.

    Raises:
      InputError: unknown task.
    """
    task = TASKS.get(name.lower().replace("-", "").replace("_", ""))
    if task is None:
        raise InputError(f"task.name={name!r}: unknown GLUE task; expected one of {', '.join(TASKS)}")
    return task


def read_split(folder: str | PathLike[str], task: GlueTask, split: str, bad_rows: BadRows) -> list[TextExample]:
    """Reads the examples of a split, in the file's order.

    Labels are None in the test files, except in Microsoft's of MRPC.

    Args:
      folder: the task's folder, or the parent of all tasks' folders; or `tfds:glue/NAME`.
      task: a value of TASKS.
      split: a key of `task.splits`.
      bad_rows: collects rows with a wrong number of columns, an unknown label, a score out of range, or (in labelled
        files) an empty text.

    Raises:
      InputError: unknown split, file not found, missing columns, or no usable row.
    """
    if split not in task.splits:
        raise InputError(f"{task.name}: unknown split {split!r}; expected one of {', '.join(task.splits)}")
    return read_file(find_split(folder, task, split), task, split, bad_rows)


def find_split(folder: str | PathLike[str], task: GlueTask, split: str) -> str:
    """Returns the path of a split's file, or `folder` for a TFDS dataset. InputError if not found."""
    return str(folder) if tfds_corpus.is_tfds(str(folder)) else _find(folder, task, split)[0]


def split_named(path: str | PathLike[str], task: GlueTask) -> str:
    """Returns the split of a labelled file: by its name, preferring dev splits, or else the first dev split."""
    name = epath.Path(path).name
    matching = [split for split in task.splits if name in (*task.splits[split], _MSR_FILES.get(split))]
    scored = [split for split in task.splits if split.startswith("dev")]
    return next((split for split in (*scored, *matching) if split in matching), scored[0])


def read_file(path: str, task: GlueTask, split: str, bad_rows: BadRows) -> list[TextExample]:
    """Returns the examples of a file at any path, as `read_split` does; `split` determines its columns."""
    if tfds_corpus.is_tfds(path):
        return _read_tfds(path, task.name, split, task.texts)
    name = epath.Path(path).name
    headless = task.name == "cola" and split != "test"
    if not headless:
        _check_columns(path, columns_of(path), task, split)
    rows = (
        _msr_rows(path, split, bad_rows)
        if name in _MSR_FILES.values()
        else tsv_rows(path, bad_rows, _COLA if headless else None)
    )
    examples = []
    for line, row in rows:
        number = line - 1 if headless else line - 2  # from 0, including bad rows, as the leaderboard counts
        try:
            examples.append(_example(row, number, task, required=split not in task.submissions))
        except ValueError as error:
            bad_rows.add(path, line, error)
    if not examples:
        raise InputError(f"{path}: no usable row; expected the {split} split of {task.name}")
    return examples


def _read_tfds(dataset: str, task: str, split: str, texts: Sequence[str]) -> list[TextExample]:
    """Reads the examples of a split in the order of GLUE's file (TFDS shuffles them).

    Args:
      dataset: `tfds:glue/NAME`, with or without a version.
      task: a key of TASKS.
      split: a key of the task's `splits`; the diagnostic set is TFDS's `glue/ax`.
      texts: the text columns of GLUE's own files.

    Raises:
      InputError: the dataset is not prepared as ArrayRecord, or is another task's.
    """
    name = split.replace("dev", "validation")
    if split == "diagnostic":
        dataset, name = dataset.replace("/mnli", "/ax"), "test"
    examples = []
    for number, row in tfds_corpus.examples(dataset, name):
        features = _TFDS_TEXTS.get(task, tuple(texts))
        if missing := {*features, "idx", "label"} - set(row):
            raise InputError(f"{dataset}: missing feature {', '.join(sorted(missing))}; expected GLUE's {task}")
        try:
            a, *rest = (row[key].decode("utf-8") for key in features)
        except UnicodeDecodeError as error:
            raise InputError(f"{dataset}:{name}: example {number} is not valid UTF-8; prepare it again") from error
        value = np.asarray(row["label"]).item()
        label = None if value == _TFDS_NO_LABEL else value
        examples.append((int(row["idx"]), TextExample(str(int(row["idx"])), a, rest[0] if rest else None, label)))
    if not examples:
        raise InputError(f"{dataset}:{name}: expected at least 1 example, got 0")
    return [example for _, example in sorted(examples, key=lambda pair: pair[0])]


def has_split(folder: str | PathLike[str], task: GlueTask, split: str) -> bool:
    """Returns True if `folder` has a split's file; a TFDS dataset has all."""
    if tfds_corpus.is_tfds(str(folder)):
        return True
    try:
        _find(folder, task, split)
    except InputError:
        return False
    return True


def _find(folder: str | PathLike[str], task: GlueTask, split: str) -> tuple[str, str]:
    """Returns the path and the name of a split's file."""
    root = epath.Path(folder)
    folders = [root, *(root / name for name in task.folders)]
    if split == "diagnostic":  # beside the task's folder, in one of its own
        folders += [place / name for place in (root, root.parent) for name in ("diagnostic", "AX")]
    names = task.splits[split]
    if task.name == "mrpc":
        names += (_MSR_FILES[split],)
    for place in folders:
        for name in names:
            if (place / name).exists():
                return str(place / name), name
    raise InputError(
        f"{root}: {split} split of {task.name} not found; looked for {' or '.join(names)} in it and in its folders "
        f"{', '.join(str(place.name) for place in folders[1:])}"
    )


def _check_columns(path: str, columns: list[str], task: GlueTask, split: str) -> None:
    required = [*task.texts, *(() if split in task.submissions else (task.label_column,))]
    if missing := [name for name in required if name not in columns]:
        raise InputError(
            f"{path}:1: missing column {', '.join(missing)}, got {', '.join(columns)}; "
            f"expected the {split} split of {task.name}"
        )


def _msr_rows(path: str, split: str, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a split from Microsoft's files. (Its train file holds both train and dev.)"""
    rows = tsv_rows(path, bad_rows)
    if split == "test":
        yield from rows
        return
    ids = epath.Path(path).parent / _DEV_IDS
    if not ids.exists():
        raise InputError(f"{ids}: file not found; it lists the pairs of {path} that are GLUE's dev split")
    dev = {tuple(line.split("\t")[:2]) for _, line in text_lines(str(ids), bad_rows)}
    for number, row in rows:
        if ((row.get("#1 ID"), row.get("#2 ID")) in dev) == (split == "dev"):
            yield number, row


def _example(row: Mapping[str, str], number: int, task: GlueTask, *, required: bool) -> TextExample:
    """Converts a row to an example. Raises ValueError for a bad row; empty texts are allowed if labels are optional."""
    texts = [row[name] for name in task.texts]
    if required and (empty := [name for name, text in zip(task.texts, texts, strict=True) if not text.strip()]):
        raise ValueError(f"{empty[0]} is empty")
    text = row.get(task.label_column)
    label = None if text is None and not required else parse_label(text or "", task)
    return TextExample(
        row.get("index") or row.get("id") or str(number), texts[0], texts[1] if len(texts) > 1 else None, label
    )


def parse_label(text: str, task: GlueTask) -> int | float:
    """Returns the class number, or the score, of a label in a file. Raises ValueError for an invalid label."""
    if not text:
        raise BadLabel("label '' is empty", MISSING_LABEL)
    if not task.regression:
        if text in task.labels:
            return task.labels.index(text)
        if text == _NOT_AGREED:
            raise BadLabel("label '-': annotators did not agree on a gold label", NO_GOLD_LABEL)
        raise BadLabel(f"unknown label {text!r:.60}; expected one of {', '.join(task.labels)}", UNKNOWN_LABEL)
    try:
        score = float(text)
    except ValueError:
        raise BadLabel(f"label {text!r:.60}: expected a number", UNKNOWN_LABEL) from None
    low, high = SCORE_RANGE
    if not low <= score <= high:
        raise BadLabel(f"label {text:.60}: expected a score from {low:g} to {high:g}", UNKNOWN_LABEL)
    return score


def write_submission(
    folder: str | PathLike[str],
    task: GlueTask,
    split: str,
    examples: Sequence[TextExample],
    predictions: Sequence[int] | Sequence[float],
) -> str:
    """Writes the leaderboard's submission file of a test split into `folder`, and returns its path.

    Args:
      folder: created if missing.
      task: a value of TASKS.
      split: a key of `task.submissions`.
      examples: [N], from `read_split`.
      predictions: [N] class numbers; for a regression scores, which are clipped to the range of STS-B.

    Raises:
      InputError: the leaderboard does not accept this split.
    """
    if split not in task.submissions:
        raise InputError(
            f"{task.name}: GLUE does not accept predictions for {split}; expected one of {', '.join(task.submissions)}"
        )
    if [example.id for example in examples] != [str(number) for number in range(len(examples))]:
        log.warning("%s %s: ids are not 0, 1, 2, ...; the leaderboard expects every row of the file", task.name, split)
    lines = ["index\tprediction"]
    for example, prediction in zip(examples, predictions, strict=True):
        if task.regression:
            low, high = SCORE_RANGE
            lines.append(f"{example.id}\t{min(max(float(prediction), low), high):.3f}")
        else:
            lines.append(f"{example.id}\t{task.labels[int(prediction)]}")
    path = epath.Path(folder) / task.submissions[split]
    write_lines(path, lines)
    return str(path)
