"""Kinds of tasks: read from a config for training, and rebuilt from the record of a fine-tuned checkpoint.

A rebuilt task reads new files, or texts in memory, for its model.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

from bert_jax.config_keys import FinetuneConfig
from bert_jax.data.corpora.tfds_corpus import is_tfds
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs import conll
from bert_jax.finetuning.inputs.batching import Encoding
from bert_jax.finetuning.inputs.choice_files import ChoiceExample, read_choices
from bert_jax.finetuning.inputs.squad_files import Question, read_questions
from bert_jax.finetuning.inputs.task_files import MISSING_LABEL, UNKNOWN_LABEL, BadLabel, BadRows, usual_files
from bert_jax.finetuning.inputs.text_files import TextFields, format_of, read_texts
from bert_jax.finetuning.task import Task, with_main_metric
from bert_jax.finetuning.tasks import choice, glue, ner
from bert_jax.finetuning.tasks.class_weights import check_class_weights
from bert_jax.finetuning.tasks.squad import METRICS, SquadTask, squad_task
from bert_jax.finetuning.tasks.text_tasks import TextTask, choose_positive_label, glue_task, own_task, own_text_task
from bert_jax.text.sequences import TextExample

log = logging.getLogger(__name__)

Record = Mapping[str, Any]
"""A checkpoint's `task`, completed with the keys of the config's `task` section that it lacks."""
Examples = Mapping[str, Sequence[Any]]
LeftOut = Mapping[str, Mapping[str, int]]


class TrainedTask(Protocol):
    """One kind of task, with its record and its encoding of texts."""

    def files(self, folder: str) -> dict[str, str]:
        """Returns the labelled files of a folder by split, found by their usual names. InputError if there are none."""

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labelled: bool, columns: Sequence[str] = ()
    ) -> Sequence[Any]:
        """Returns the examples of a file. InputError if it cannot be read.

        `split` is a key of `files`; labels are ignored unless `labelled`; `columns` name the text columns.
        """

    def from_texts(self, texts: Sequence[Any], pairs: Sequence[Any]) -> Sequence[Any]:
        """Returns examples of texts, each with its pair or None. InputError if the task does not support them."""

    def make_task(self, examples: Examples, left_out: LeftOut) -> Task:
        """Returns the task that scores and predicts the examples of each split."""


@dataclass(frozen=True)
class TrainedText:
    """The user's own text files, read like the training file."""

    record: Record
    encoding: Encoding

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names by number; empty for a regression."""
        return tuple(self.record["classes"])

    def files(self, folder: str) -> dict[str, str]:
        raise InputError(f"--data={folder}: expected a file, got a folder; text files have no usual names")

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labelled: bool, columns: Sequence[str] = ()
    ) -> Sequence[Any]:
        examples, _ = read_texts(
            path, bad_rows, fields=self._fields(columns), labels=self.classes or None, regression=not self.classes,
            labelled=labelled,
        )  # fmt: skip
        self._check_pairs(path, examples[0].text_b is not None)
        return examples

    def from_texts(self, texts: Sequence[Any], pairs: Sequence[Any]) -> Sequence[Any]:
        self._check_pairs("the given text", any(pair is not None for pair in pairs))
        both = zip(texts, pairs, strict=True)
        return [TextExample(str(number), text, pair, None) for number, (text, pair) in enumerate(both)]

    def make_task(self, examples: Examples, left_out: LeftOut) -> Task:
        positive = choose_positive_label(self.record["positive_label"], self.classes)
        return own_text_task(self.classes, examples, self.encoding, self._fields(), positive, left_out)

    def _fields(self, columns: Sequence[str] = ()) -> TextFields:
        return TextFields(tuple(columns or self.record["texts"]), self.record["label"], self.record["id"])

    def _check_pairs(self, where: str, is_pair: bool) -> None:
        if is_pair != self.record.get("is_pair", is_pair):
            expected, got = (2, 1) if self.record["is_pair"] else (1, 2)
            raise InputError(
                f"--text: the model was trained on {expected} text(s) per row, got {got} in {where}; "
                "name the text columns"
            )


@dataclass(frozen=True)
class TrainedGlue(TrainedText):
    """A GLUE task: labelled files have the benchmark's format; others are read as the user's own texts."""

    @property
    def glue_task(self) -> glue.GlueTask:
        """The task's description in `glue.TASKS`."""
        return glue.get_task(self.record["name"].partition("/")[2])

    def files(self, folder: str) -> dict[str, str]:
        scored = [split for split in self.glue_task.splits if split.startswith("dev")]
        return {split: glue.find_split(folder, self.glue_task, split) for split in scored}

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labelled: bool, columns: Sequence[str] = ()
    ) -> Sequence[Any]:
        if not labelled or (format_of(path) in (".csv", ".jsonl", ".json") and not is_tfds(path)):
            return super().read(path, bad_rows, labelled=labelled, columns=columns)
        split = split or glue.split_named(path, self.glue_task)
        examples = glue.read_file(path, self.glue_task, split, bad_rows)
        if unlabelled := [example.id for example in examples if example.label is None]:
            _add_missing(path, bad_rows, f"{len(unlabelled)} rows without a label")
            examples = [example for example in examples if example.label is not None]
        return examples

    def make_task(self, examples: Examples, left_out: LeftOut) -> Task:
        task = self.glue_task
        return TextTask(
            self.record["name"], task.labels, task.metrics, task.main_metric, examples, self.encoding, glue_task=task,
            left_out=left_out,
        )  # fmt: skip


@dataclass(frozen=True)
class TrainedChoice:
    """A choice among the number of endings that the model was trained on; any number if its record has size 0."""

    record: Record
    encoding: Encoding

    def files(self, folder: str) -> dict[str, str]:
        return _scored_files(folder, choice.FILES)

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labelled: bool, columns: Sequence[str] = ()
    ) -> Sequence[Any]:
        _refuse_columns(columns)
        examples = read_choices(path, bad_rows, labels="required" if labelled else "ignored")
        self._check_endings(path, len(examples[0].endings), self.record["size"])
        return examples

    def from_texts(self, texts: Sequence[Any], pairs: Sequence[Any]) -> Sequence[Any]:
        examples: list[ChoiceExample] = []
        for number, (text, endings) in enumerate(zip(texts, pairs, strict=True)):
            expected = self.record["size"] or (len(examples[0].endings) if examples else 0)
            count = 0 if endings is None or isinstance(endings, str) else len(endings)
            self._check_endings("the given pair", count, expected)
            examples.append(ChoiceExample(str(number), text, "", tuple(endings), None))
        return examples

    def make_task(self, examples: Examples, left_out: LeftOut) -> Task:
        return choice.ChoiceTask(examples, self.encoding, left_out)

    def _check_endings(self, where: str, count: int, expected: int) -> None:
        if count != expected and (expected or count < 2):
            raise InputError(f"{where}: expected {expected or 'at least 2'} endings, got {count}")


@dataclass(frozen=True)
class TrainedNer:
    """A tagger of CoNLL files, of rows with a text, and of plain text with one sentence per line."""

    record: Record
    encoding: Encoding

    def files(self, folder: str) -> dict[str, str]:
        found = _scored_files(folder, ner.FILES)
        usual = usual_files(folder, {"test": ner.FILES["test"]})
        return found | {split: path for split, path in usual.items() if conll.has_tags(path)}

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labelled: bool, columns: Sequence[str] = ()
    ) -> Sequence[Any]:
        if not labelled and (columns or format_of(path) in (".csv", ".jsonl", ".json")):
            if len(columns) > 1:
                raise InputError(f"--text {' '.join(columns)}: expected 1 column for a tagger, got {len(columns)}")
            examples, _ = read_texts(path, bad_rows, fields=TextFields(tuple(columns)), labelled=False)
            sentences = self.from_texts([example.text_a for example in examples], [])
            both = zip(sentences, examples, strict=True)
            return [dataclasses.replace(sentence, id=example.id) for sentence, example in both]
        if not labelled and not conll.is_conll(path):
            log.info("%s: reading plain text, one sentence per line; rename it to .conll to read it as columns", path)
            return conll.read_plain(path, bad_rows)
        columns_of = {"word_column": self.record["word_column"], "tag_column": self.record["tag_column"]}
        sentences = conll.read_conll(path, bad_rows, labelled=labelled, **columns_of)
        unknown = ner.unknown_types(sentences, self.record["tags"])
        if unknown:
            problem = f"{sum(unknown.values())} entities of types unknown to the model: "
            bad_rows.add(path, None, BadLabel(problem + ", ".join(sorted(unknown)), UNKNOWN_LABEL))
        return sentences

    def from_texts(self, texts: Sequence[Any], pairs: Sequence[Any]) -> Sequence[Any]:
        if any(pair is not None for pair in pairs):
            raise InputError("pair: a tagger does not support pairs of texts; omit the pair")
        return [conll.split_words(text, number) for number, text in enumerate(texts)]

    def make_task(self, examples: Examples, left_out: LeftOut) -> Task:
        record = self.record
        return ner.NerTask(
            examples, tuple(record["tags"]), self.encoding, record["document_context"], left_out
        )  # fmt: skip


@dataclass(frozen=True)
class TrainedSquad:
    """Questions about paragraphs."""

    record: Record
    encoding: Encoding

    @property
    def version_2(self) -> bool:
        """True if a question may have no answer (SQuAD 2.0)."""
        result: bool = self.record["name"].endswith("/2.0")
        return result

    def files(self, folder: str) -> dict[str, str]:
        return _scored_files(folder, {"dev": (f"dev-v{'2.0' if self.version_2 else '1.1'}.json",)})

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labelled: bool, columns: Sequence[str] = ()
    ) -> Sequence[Any]:
        _refuse_columns(columns)
        questions = read_questions(path, bad_rows, training=False)
        if labelled:
            unanswered = [
                question.id for question in questions
                if not question.answers and not (self.version_2 and question.is_impossible)
            ]  # fmt: skip
            if unanswered:
                _add_missing(path, bad_rows, f"{len(unanswered)} questions without an answer, such as {unanswered[0]}")
        return questions

    def from_texts(self, texts: Sequence[Any], pairs: Sequence[Any]) -> Sequence[Any]:
        if not all(isinstance(pair, str) for pair in pairs):
            raise InputError("pair: expected a paragraph as the pair of each question")
        both = zip(texts, pairs, strict=True)
        return [Question(str(number), "", text, pair, ()) for number, (text, pair) in enumerate(both)]

    def make_task(self, examples: Examples, left_out: LeftOut) -> Task:
        record = self.record
        return SquadTask(
            (), examples, self.encoding, version_2=self.version_2, doc_stride=record["doc_stride"],
            max_query_length=record["max_query_length"], n_best=record["n_best"],
            max_answer_length=record["max_answer_length"], null_threshold=record["null_threshold"], left_out=left_out,
            main_metric=METRICS[self.version_2][0],
        )  # fmt: skip


def _scored_files(folder: str, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    found = usual_files(folder, {"dev": usual["dev"]})
    if not found:
        raise InputError(f"--data={folder}: found none of {', '.join(usual['dev'])}; give the labelled file")
    return found


def _add_missing(path: str | PathLike[str], bad_rows: BadRows, problem: str) -> None:
    bad_rows.add(path, None, BadLabel(problem, MISSING_LABEL))


def _refuse_columns(columns: Sequence[str]) -> None:
    if columns:
        raise InputError(f"--text {' '.join(columns)}: not supported for this task, whose columns are fixed; omit it")


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    Attributes:
      from_config: reads the files of a config, for training.
      from_record: makes the task of a fine-tuned checkpoint from its record.
    """

    from_config: Callable[[FinetuneConfig, Encoding], Task]
    from_record: Callable[[Record, Encoding], TrainedTask]


TASK_KINDS = {
    "glue": TaskKind(glue_task, TrainedGlue),
    "text": TaskKind(own_task, TrainedText),
    "squad": TaskKind(squad_task, TrainedSquad),
    "choice": TaskKind(choice.choice_task, TrainedChoice),
    "ner": TaskKind(ner.ner_task, TrainedNer),
}
"""By `task.kind`, which is the first part of a record's `name` as well."""


def read_task(config: FinetuneConfig, encoding: Encoding) -> Task:
    """Reads the files of a config, for training.

    Raises InputError if a file cannot be read, or if the task lacks the main metric or the labels of the config.
    """
    task = TASK_KINDS[config.task.kind].from_config(config, encoding)
    check_class_weights(config.task.class_weights, task.label_names)
    return with_main_metric(task, config.task.main_metric)
