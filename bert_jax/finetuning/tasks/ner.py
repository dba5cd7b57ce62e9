"""Named entities: a softmax over tags at the first piece of each word, without a CRF, scored as conlleval does.

A CoNLL file has one word per line, with columns separated by tabs (if the line has one) or spaces. An empty line ends a
sentence, and a line that starts with -DOCSTART- begins a document. CoNLL-2003 and WNUT-17 have the word first and the
tag last. In a file without -DOCSTART- every sentence is its own document.

Internally tags are BIO (IOB2): B-TYPE begins an entity, I-TYPE continues it, O is outside.
"""

import dataclasses
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files.text_files import COMPRESSED, Utf8, lines_from, named_format, text_format
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.rows import MISSING_LABEL, UNKNOWN_LABEL, BadLabel, BadRows, write_lines
from bert_jax.finetuning.task import Labels, Outputs, Split, Task
from bert_jax.finetuning.tasks.ner_windows import OUTSIDE, TaggedSentence, collect_tags, encode_windows
from bert_jax.finetuning.tasks.text import TextTask
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_DOCUMENT = "-DOCSTART-"
_TAG = re.compile(r"O|[BIES]-\S.*")
_SPACES = re.compile(r"[ \t]+")  # no other: a no-break space may be part of a word
_FILES = {
    "train": ("train.conll", "eng.train", "train.txt"),
    "dev": ("dev.conll", "eng.testa", "valid.txt", "dev.txt"),
    "test": ("test.conll", "eng.testb", "test.txt"),
}


@dataclass(frozen=True, kw_only=True)
class NerTask(Task):
    """Tagging of the words of sentences, scored by complete entities.

    Attributes:
      tags: the tags by number: O, then B and I of each type of the training file.
      document_context: reads a sentence with those around it in its document.
      word_column, tag_column: numbered from 0, or from the end with -1.
      conll_files: names of the files of the run, which are in columns whatever their extension.
    """

    name: str = "ner"
    kind: str = "tag"
    tags: tuple[str, ...] = ()
    document_context: bool = False
    word_column: int = 0
    tag_column: int = -1
    conll_files: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        task = config.task
        names = (_stem(name) for name in (task.train, task.dev, task.test) if name)
        return cls(
            max_seq_len=task.max_seq_len, document_context=task.document_context, word_column=task.word_column,
            tag_column=task.tag_column, conll_files=tuple(sorted({*names})),
        )  # fmt: skip

    @property
    def size(self) -> int:
        return len(self.tags)

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.tags

    @property
    def types(self) -> list[str]:
        """The types of entities."""
        return sorted({tag[2:] for tag in self.tags if tag != OUTSIDE})

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("f1", "precision", "recall", *(f"f1_{kind}" for kind in self.types))

    # --- Files --------------------------------------------------------------------------------------------------------

    @property
    def usual_files(self) -> Mapping[str, Sequence[str]]:
        return _FILES

    def read_training(self, path: str, bad_rows: BadRows) -> tuple[Self, list[TaggedSentence]]:
        sentences = self.read(path, bad_rows, split="train")
        tags = tag_names(sentences)
        if tags == (OUTSIDE,):
            raise InputError(f"{path}: no usable sentence has an entity; expected tags such as B-PER and I-PER")
        return dataclasses.replace(self, tags=tags), sentences

    def read(
        self, path: str, bad_rows: BadRows, *, split: str = "", labels: Labels = "required",
        columns: Sequence[str] = (),
    ) -> list[TaggedSentence]:  # fmt: skip
        """Reads a CoNLL file; to predict, also rows of a table or plain text, which the name of the file says.

        Rows have a text in one of `columns`. Plain text (.txt, unless the run or CoNLL-2003 has a file of its name) has
        a sentence per line, with spaces between words.
        """
        name = _stem(path)
        if labels == "ignored" and (columns or named_format(path) in ("csv", "json", "parquet", "arrow")):
            if len(columns) > 1:
                raise InputError(f"text={' '.join(columns)}: expected 1 column for a tagger, got {len(columns)}")
            rows = TextTask().read(path, bad_rows, labels="ignored", columns=columns)
            return [_split_words(row.text_a, row.id, number) for number, row in enumerate(rows)]
        usual = {usual for names in _FILES.values() for usual in names}
        if labels == "ignored" and name.endswith(".txt") and name not in {*usual, *self.conll_files}:
            log.info("%s: reading plain text, one sentence per line; rename it to .conll to read it as columns", path)
            return _read_plain(path, bad_rows)
        return self._read_conll(path, bad_rows, labels)

    def unknown_labels(self, examples: Sequence[TaggedSentence]) -> str:
        kinds = Counter(kind for sentence in examples for kind, _, _ in entity_spans(sentence.tags or ()))
        unknown = {kind: count for kind, count in kinds.items() if kind not in self.types}
        if not unknown:
            return ""
        listed = ", ".join(sorted(unknown))
        return f"{sum(unknown.values())} entities of types that training did not have, each counts as missed: {listed}"

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[TaggedSentence]:
        if any(pair is not None for pair in pairs):
            raise InputError("pair: a tagger does not support pairs of texts; omit the pair")
        return [_split_words(text, str(number), number) for number, text in enumerate(texts)]

    def is_labelled(self, example: TaggedSentence) -> bool:
        return example.tags is not None

    def texts_of(self, example: TaggedSentence) -> dict[str, Any]:
        return {"text": " ".join(example.words)}

    def _read_conll(self, path: str, bad_rows: BadRows, labels: Labels) -> list[TaggedSentence]:
        """Reads the sentences of a file; tags in IOB1, BIO or BIOES are converted to BIO.

        A sentence with a line that is not UTF-8, lacks a column or has an invalid tag is skipped.
        """
        sentences: list[TaggedSentence] = []
        number, document, has_documents = 0, -1, False
        for block in _blocks(path):
            if block[0][1].startswith(_DOCUMENT):
                document, has_documents = document + 1, True
                continue
            number += 1
            line = block[0][0]
            try:
                words, tags = [], []
                has_tags = labels == "required" or (
                    labels == "optional" and any(len(_split(text)) > 1 for _, text, _ in block)
                )
                for line, text, problem in block:  # noqa: B007 - the line of an error
                    if problem:
                        raise ValueError(problem)
                    words.append(_column(text, self.word_column, "word_column"))
                    if has_tags:
                        tags.append(_tag(text, self.tag_column))
            except ValueError as error:
                bad_rows.add(path, line, error)
                continue
            document += not has_documents
            bio = tuple(to_bio(tags)) if has_tags else None
            sentences.append(TaggedSentence(tuple(words), bio, document, str(number)))
        bad_rows.check_usable(path, sentences, "a word and its tag per line, and an empty line after a sentence")
        return sentences

    # --- Model --------------------------------------------------------------------------------------------------------

    def encode(self, examples: Sequence[TaggedSentence], tokenizer: Tokenizer, *, labelled: bool) -> EncodedExamples:
        windows = encode_windows(tokenizer, examples, self.max_seq_len, document_context=self.document_context)
        sequences, labels = [window.sequence for window in windows], None
        if labelled:
            numbers = {name: number for number, name in enumerate(self.tags)}
            labels = [np.full(len(sequence.input_ids), -1, np.int32) for sequence in sequences]
            for window, token_labels in zip(windows, labels, strict=True):
                for sentence, word, position in window.words:
                    tags = examples[sentence].tags
                    assert tags is not None
                    token_labels[position] = numbers[tags[word]]
        return EncodedExamples(sequences, labels, windows=windows)

    def _predicted(self, split: Split, outputs: Outputs) -> list[list[str]]:
        windows = split.encoded.windows
        window_tags = [
            [self.tags[int(token_outputs[position].argmax())] for _, _, position in window.words]
            for window, token_outputs in zip(windows, outputs, strict=True)
        ]
        return collect_tags(split.examples, windows, window_tags)

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        gold = [list(sentence.tags) for sentence in split.examples]
        overall, by_type = entity_scores(gold, self._predicted(split, outputs))
        type_scores = {f"f1_{kind}": type_score.f1 for kind, type_score in by_type.items()}
        scores = {"f1": overall.f1, "precision": overall.precision, "recall": overall.recall, **type_scores}
        scores.setdefault(self.main_metric, 0.0)  # a type that is neither in the split nor predicted
        return scores

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        both = zip(split.examples, self._predicted(split, outputs), strict=True)
        return [{"id": sentence.id, "words": list(sentence.words), "prediction": tags} for sentence, tags in both]

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        write_conll(folder / f"{split.name}.conll", split.examples, self._predicted(split, outputs))


# --- Files ------------------------------------------------------------------------------------------------------------


def _stem(path: str) -> str:
    """Returns the name of a file in lower case, without the extension of its compression."""
    stem, extension = os.path.splitext(os.path.basename(path).lower())
    return stem if extension in COMPRESSED else stem + extension


def _decoded_lines(path: str) -> Iterator[tuple[int, str, str]]:
    """Yields (number from 1, line, problem) of each line; one that is not UTF-8 has a problem."""
    text_format(path)  # refuses what is not text
    utf8 = Utf8()
    for number, (_, line) in enumerate(lines_from(path, 0, None), 1):
        line = line.removesuffix(b"\r")
        try:
            yield number, utf8.decode(line), ""
        except ValueError as error:
            yield number, line.decode(errors="replace"), str(error)


def _blocks(path: str) -> Iterator[list[tuple[int, str, str]]]:
    """Yields the lines of each sentence; a -DOCSTART- line is a block by itself."""
    block: list[tuple[int, str, str]] = []
    for row in _decoded_lines(path):
        content = row[1].strip(" \t")
        starts = content.startswith(_DOCUMENT)
        if block and (starts or not content):
            yield block
            block = []
        if starts:
            yield [(row[0], content, row[2])]
        elif content:
            block.append(row)
    if block:
        yield block


def _read_plain(path: str, bad_rows: BadRows) -> list[TaggedSentence]:
    """Returns the sentences of plain text, one per line."""
    sentences = []
    for number, (line, text, problem) in enumerate((row for row in _decoded_lines(path) if row[1].strip()), 1):
        if problem:
            bad_rows.add(path, line, problem)
        else:
            sentences.append(_split_words(text, str(number), number))
    bad_rows.check_usable(path, sentences, "one sentence per line, with spaces between words")
    return sentences


def _split_words(text: str, identity: str, document: int) -> TaggedSentence:
    """Splits a text at whitespace into words without tags."""
    return TaggedSentence(tuple(word for word in re.split(r"[ \t\r\n]+", text) if word), None, document, identity)


def _split(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else _SPACES.split(line.strip(" "))


def _column(line: str, index: int, name: str) -> str:
    columns = _split(line)
    if not -len(columns) <= index < len(columns) or not columns[index].strip():
        raise ValueError(f"{name}={index}: missing or empty, the line has {len(columns)} columns")
    return columns[index].strip(" ")


def _tag(line: str, index: int) -> str:
    if len(_split(line)) < 2:
        raise BadLabel("the word has no tag", MISSING_LABEL)
    tag = _column(line, index, "tag_column")
    if not _TAG.fullmatch(tag):
        raise BadLabel(f"invalid tag {tag!r:.60}; expected O, B-TYPE, I-TYPE, E-TYPE or S-TYPE", UNKNOWN_LABEL)
    return tag


def write_conll(path: epath.Path, sentences: Sequence[TaggedSentence], predicted: Sequence[Sequence[str]]) -> None:
    """Writes one line per word: word, gold tag (if any), predicted tag; and an empty line after each sentence.

    conlleval reads this. Columns are separated by spaces, or by tabs if any word contains a space.
    """
    between = "\t" if any(" " in word for sentence in sentences for word in sentence.words) else " "
    lines: list[str] = []
    for sentence, tags in zip(sentences, predicted, strict=True):
        columns = (sentence.words, *([sentence.tags] if sentence.tags is not None else []), tags)
        lines += [between.join(row) for row in zip(*columns, strict=True)]
        lines.append("")
    write_lines(path, lines)


# --- Entities ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntityScore:
    """Counts of entities: in the file, predicted, and predicted with correct type and boundaries."""

    gold: int
    predicted: int
    correct: int

    @property
    def precision(self) -> float:
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        return 2 * self.correct / (self.gold + self.predicted) if self.correct else 0.0


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns (type, start, end) of the entities of a sentence; `end` is exclusive.

    Reads IOB1, BIO and BIOES like conlleval (https://www.cnts.ua.ac.be/conll2000/chunking/conlleval.txt), including
    ill-formed tags: B and S begin an entity; I and E do so after O, E, S, or another type.
    """
    spans: list[tuple[str, int, int]] = []
    start, before, kind = 0, OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, this = tag.partition("-")
        begins = prefix != OUTSIDE and (prefix in "BS" or before in "OES" or this != kind)
        if before != OUTSIDE and (begins or prefix == OUTSIDE):
            spans.append((kind, start, index))
        if begins:
            start = index
        before, kind = prefix, this
    return spans


def to_bio(tags: Sequence[str]) -> list[str]:
    """Converts the tags of a sentence, in IOB1, BIO or BIOES, to BIO; `entity_spans` are unchanged."""
    converted = [OUTSIDE] * len(tags)
    for kind, start, end in entity_spans(tags):
        converted[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
    return converted


def tag_names(sentences: Iterable[TaggedSentence]) -> tuple[str, ...]:
    """Returns the tag set: O, then B and I of every entity type in the sentences, sorted by type."""
    kinds = {tag[2:] for sentence in sentences for tag in sentence.tags or () if tag != OUTSIDE}
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(kinds) for prefix in "BI"))


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> tuple[EntityScore, dict[str, EntityScore]]:
    """Returns the score over all entities, which is the task's, and the score of each type; fractions, not percent.

    Args:
      gold: the tags of each sentence, in IOB1, BIO or BIOES.
      predicted: the same number of tags and sentences.
    """
    counts: dict[str, list[int]] = {}
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        if len(gold_tags) != len(predicted_tags):
            raise ValueError(f"expected {len(gold_tags)} tags, one per word, got {len(predicted_tags)}")
        gold_spans, predicted_spans = set(entity_spans(gold_tags)), set(entity_spans(predicted_tags))
        for index, spans in enumerate((gold_spans, predicted_spans, gold_spans & predicted_spans)):
            for kind, _, _ in spans:
                counts.setdefault(kind, [0, 0, 0])[index] += 1
    totals = [sum(column) for column in zip(*counts.values(), strict=True)] or [0, 0, 0]
    return EntityScore(*totals), {kind: EntityScore(*counts[kind]) for kind in sorted(counts)}
