"""The nine GLUE tasks: their distributed files, their metrics, and the leaderboard's submission files.

The formats are those of the benchmark's own download (https://gluebenchmark.com/tasks): tab-separated, UTF-8, without
quoting, with a header line except in CoLA's train and dev. A test file has the columns of the others without the label,
and an `index` before them (QQP: an `id`). Columns are found by name.

MRPC is read from train.tsv, dev.tsv and test.tsv, or from Microsoft's msr_paraphrase_train.txt and
msr_paraphrase_test.txt; the pairs of the training file listed in dev_ids.tsv are GLUE's dev set.

`tfds:glue/sst2` in place of a folder reads TensorFlow Datasets (see `bert_jax.data.corpora.tfds_corpus`).
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.data.corpora import tfds_corpus
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.text_files import named_format
from bert_jax.finetuning.rows import (
    NO_GOLD_LABEL,
    UNKNOWN_LABEL,
    BadLabel,
    BadRows,
    Row,
    read_rows,
    write_lines,
)
from bert_jax.finetuning.task import Labels, Outputs, Split
from bert_jax.finetuning.tasks.text import TextExample, TextTask

log = logging.getLogger(__name__)

SCORE_RANGE = (0.0, 5.0)
"""The range of STS-B's scores."""

_MSR_TRAIN, _MSR_TEST = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
_MSR_FILES = {"train": (_MSR_TRAIN,), "dev": (_MSR_TRAIN,), "test": (_MSR_TEST,)}
_DEV_IDS = "dev_ids.tsv"
_COLA = ("source", "label", "author_label", "sentence")  # train and dev have no header
# The text features of TFDS, where they are not the columns of the files.
_TFDS_TEXTS = {"mrpc": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis")}
_TFDS_NO_LABEL = -1
_NOT_AGREED = "-"  # in SNLI and MultiNLI, where annotators did not agree


@dataclass(frozen=True)
class _Spec:
    """A task of the benchmark.

    Attributes:
      name: the name in `task.name` and in TFDS.
      folders: names of its folder in downloads.
      texts: one or two text columns.
      label: the column of the label.
      classes: label names in the files and on the leaderboard, by class number; empty for a regression.
      metrics: keys of `metrics.METRICS`, that of BERT's paper first; the leaderboard's score is their mean.
      splits: file names of each split, in order of preference.
      submissions: the leaderboard's file for each split without labels.
    """

    name: str
    folders: tuple[str, ...]
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    splits: Mapping[str, tuple[str, ...]]
    submissions: Mapping[str, str]


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
_CORRELATIONS = ("spearman", "pearson")

TASKS = {
    task.name: task
    for task in (
        _Spec("cola", ("CoLA",), _SINGLE, "label", _BINARY, ("matthews",), _SPLITS,
                 {"test": "CoLA.tsv"}),
        _Spec("sst2", ("SST-2", "SST2"), _SINGLE, "label", _BINARY, ("accuracy",), _SPLITS,
                 {"test": "SST-2.tsv"}),
        _Spec("mrpc", ("MRPC",), ("#1 String", "#2 String"), "Quality", _BINARY, _F1, _SPLITS,
                 {"test": "MRPC.tsv"}),
        _Spec("stsb", ("STS-B", "STSB"), _PAIR, "score", (), _CORRELATIONS, _SPLITS,
                 {"test": "STS-B.tsv"}),
        _Spec("qqp", ("QQP",), ("question1", "question2"), "is_duplicate", _BINARY, _F1, _SPLITS,
                 {"test": "QQP.tsv"}),
        _Spec("mnli", ("MNLI",), _PAIR, "gold_label", ("entailment", "neutral", "contradiction"), ("accuracy",),
                 _MNLI_SPLITS, _MNLI_FILES),
        _Spec("qnli", ("QNLI", "QNLIv2"), ("question", "sentence"), "label", _ENTAILMENT, ("accuracy",),
                 _SPLITS, {"test": "QNLI.tsv"}),
        _Spec("rte", ("RTE",), _PAIR, "label", _ENTAILMENT, ("accuracy",), _SPLITS,
                 {"test": "RTE.tsv"}),
        _Spec("wnli", ("WNLI",), _PAIR, "label", _BINARY, ("accuracy",), _SPLITS,
                 {"test": "WNLI.tsv"}),
    )
}  # fmt: skip
"""The tasks by name. Classes are numbered as in TFDS and `datasets`. (The reference's MNLI has contradiction first.)"""


@dataclass(frozen=True, kw_only=True)
class GlueTask(TextTask):
    """A task of GLUE. Files in the benchmark's own formats have its columns; `--text` names those of others."""

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        return cls.of(config.task.name, max_seq_len=config.task.max_seq_len)

    @classmethod
    def of(cls, name: str, **settings: Any) -> Self:
        """Returns the task with a name, in any case, with or without hyphens. InputError for an unknown name."""
        spec = TASKS.get(name.lower().replace("-", "").replace("_", ""))
        if spec is None:
            raise InputError(f"task.name={name!r}: unknown GLUE task; expected one of {', '.join(TASKS)}")
        return cls(
            name=f"glue/{spec.name}", kind="classify" if spec.classes else "regress", classes=spec.classes,
            texts=spec.texts, label=spec.label, **settings,
        )  # fmt: skip

    @property
    def _spec(self) -> _Spec:
        return TASKS[self.name.partition("/")[2]]

    @property
    def metrics(self) -> tuple[str, ...]:
        return self._spec.metrics

    @property
    def positive(self) -> str | None:
        return super().positive if "f1" in self.metrics else None

    # --- Files --------------------------------------------------------------------------------------------------------

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        msr = _MSR_FILES if self._spec.name == "mrpc" else {}
        return {split: (*names, *msr.get(split, ())) for split, names in self._spec.splits.items()}

    def find(self, folder: str, given: Mapping[str, str]) -> dict[str, str]:
        if named := [split for split, name in given.items() if name]:
            raise InputError(
                f"task.{named[0]}={given[named[0]]}: GLUE has the files of its folder; leave it empty, or use "
                "config=finetune/text"
            )
        return dict.fromkeys(self.usual_files, folder) if tfds_corpus.is_tfds(folder) else super().find(folder, given)

    def usual_paths(self, folder: str, split: str) -> list[str]:
        root = epath.Path(folder)
        places = [root, *(root / name for name in self._spec.folders)]
        if split == "diagnostic":  # beside the task's folder, in one of its own
            places += [place / name for place in (root, root.parent) for name in ("diagnostic", "AX")]
        return [str(place / name) for place in places for name in self.usual_files[split]]

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[TextExample]:  # fmt: skip
        if tfds_corpus.is_tfds(path):
            return self._read_tfds(path, split, labels)
        return super().read(path, bad_rows, split=split, labels=labels, columns=columns)

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[TextExample]]:
        return self, self.read(path, bad_rows, split="train")

    def rows_of(self, path: str, split: str, bad_rows: BadRows) -> Iterator[Row]:
        name = os.path.basename(path)
        if name in (_MSR_TRAIN, _MSR_TEST):
            return self._msr_rows(path, split, bad_rows)
        is_headless = self._spec.name == "cola" and named_format(path) == "tsv" and "test" not in (split, name[:-4])
        return read_rows(path, bad_rows, _COLA if is_headless else ())

    def _msr_rows(self, path: str, split: str, bad_rows: BadRows) -> Iterator[Row]:
        """Yields the rows of a split from Microsoft's files. (Its training file holds both train and dev.)"""
        rows = read_rows(path, bad_rows, kind="tsv")
        if split not in ("train", "dev"):
            yield from rows
            return
        ids = os.path.join(os.path.dirname(path), _DEV_IDS)
        if not remote.exists(remote.parse_path(ids)):
            raise InputError(f"{ids}: file not found; it lists the pairs of {path} that are GLUE's dev split")
        keys = ("#1 ID", "#2 ID")
        dev = {tuple(row[key] for key in keys) for _, _, row in read_rows(ids, bad_rows, keys)}
        yield from (row for row in rows if (tuple(map(row[2].get, keys)) in dev) == (split == "dev"))

    def reads_empty(self, labels: Labels) -> bool:
        return labels == "ignored"  # the leaderboard expects every row

    def parse_class(self, value: str | float) -> str:
        if value == _NOT_AGREED:
            raise BadLabel("label '-': annotators did not agree on a gold label", NO_GOLD_LABEL)
        return super().parse_class(value)

    def parse_score(self, value: str | float) -> float:
        score, (low, high) = super().parse_score(value), SCORE_RANGE
        if not low <= score <= high:
            raise BadLabel(f"label {value!s:.60}: expected a score from {low:g} to {high:g}", UNKNOWN_LABEL)
        return score

    def _read_tfds(self, dataset: str, split: str, labels: Labels) -> list[TextExample]:
        """Reads the examples of a split in the order of GLUE's file (TFDS shuffles them).

        `dataset` is `tfds:glue/NAME`, with or without a version; the diagnostic set is its `glue/ax`. Raises InputError
        if the dataset is not prepared as ArrayRecord, is another task's, or lacks labels.
        """
        task, name = self._spec.name, (split or "dev").replace("dev", "validation")
        if split == "diagnostic":
            dataset, name = dataset.replace("/mnli", "/ax"), "test"
        examples = []
        for number, row in tfds_corpus.examples(dataset, name):
            features = _TFDS_TEXTS.get(task, self._spec.texts)
            if missing := {*features, "idx", "label"} - set(row):
                raise InputError(f"{dataset}: missing feature {', '.join(sorted(missing))}; expected GLUE's {task}")
            try:
                a, *rest = (row[key].decode("utf-8") for key in features)
            except UnicodeDecodeError as error:
                raise InputError(f"{dataset}:{name}: example {number} is not valid UTF-8; prepare it again") from error
            value = np.asarray(row["label"]).item()
            label = None
            if value != _TFDS_NO_LABEL and labels != "ignored":
                label = float(value) if self.regression else self.classes[value]
            elif labels == "required":
                raise InputError(f"{dataset}:{name}: example {number} has no label; scoring requires labels")
            examples.append((int(row["idx"]), TextExample(str(int(row["idx"])), a, rest[0] if rest else None, label)))
        if not examples:
            raise InputError(f"{dataset}:{name}: expected at least 1 example, got 0")
        return [example for _, example in sorted(examples, key=lambda pair: pair[0])]

    # --- Submissions --------------------------------------------------------------------------------------------------

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        if split.name in self._spec.submissions:
            self._write_submission(split, outputs, folder)
        else:
            super().write(split, outputs, folder)

    def _write_submission(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        """Writes the leaderboard's file of a test split; scores are clipped to the range of STS-B."""
        if [example.id for example in split.examples] != [str(number) for number in range(len(split.examples))]:
            log.warning(
                "%s %s: ids are not 0, 1, 2, ...; the leaderboard expects every row of the file", self.name, split.name
            )
        predicted = [row["prediction"] for row in self.predictions(split, outputs)]
        if self.regression:
            predicted = [f"{np.clip(score, *SCORE_RANGE):.3f}" for score in predicted]
        rows = (f"{example.id}\t{label}" for example, label in zip(split.examples, predicted, strict=True))
        write_lines(folder / self._spec.submissions[split.name], ["index\tprediction", *rows])
