"""Named entities: CoNLL files, tagging schemes, and the scores of conlleval.

A file has one word per line, with columns separated by tabs (if the line has one) or spaces. An empty line ends a
sentence, and a line that starts with -DOCSTART- begins a document. CoNLL-2003 and WNUT-17 have the word first and the
tag last. In a file without -DOCSTART- every sentence is its own document.

Internally tags are BIO (IOB2): B-TYPE begins an entity, I-TYPE continues it, O is outside.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike

from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.task_files import (
    MISSING_LABEL,
    UNKNOWN_LABEL,
    BadLabel,
    BadRows,
    text_lines,
    write_lines,
)

OUTSIDE = "O"

_DOCUMENT = "-DOCSTART-"
_TAG = re.compile(r"O|[BIES]-\S.*")
_SPACES = re.compile(r"[ \t]+")  # no other: a no-break space may be part of a word


@dataclass(frozen=True)
class TaggedSentence:
    """Words and their BIO tags, or None for an untagged file; `document` numbers a file's documents from 0.

    `id` is that of a row with a text, empty for a sentence of a file without rows.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    id: str = ""


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


def read_conll(
    path: str | PathLike[str],
    bad_rows: BadRows,
    *,
    word_column: int = 0,
    tag_column: int = -1,
    labelled: bool = True,
) -> list[TaggedSentence]:
    """Reads the sentences of a file; tags in IOB1, BIO or BIOES are converted to BIO.

    Args:
      path: the file, optionally compressed.
      bad_rows: collects lines with a missing column or an invalid tag; their sentence is skipped and logged once.
      word_column: numbered from 0, or from the end with -1.
      tag_column: the same.
      labelled: False for words to predict: tags are ignored, and a single column is allowed.

    Raises:
      InputError: the file cannot be read, or has no usable sentence.
    """
    sentences: list[TaggedSentence] = []
    document, has_documents = -1, False
    for rows in _blocks(str(path), bad_rows):
        if rows[0][1][0].startswith(_DOCUMENT):
            document, has_documents = document + 1, True
            continue
        words, tags = [], []
        for line, columns in rows:
            try:
                words.append(_column(columns, word_column, "word_column"))
                if labelled:
                    tags.append(_tag(columns, tag_column))
            except ValueError as error:
                problem = f"{error}; skipping its sentence"
                bad_rows.add(path, line, BadLabel(problem, error.reason) if isinstance(error, BadLabel) else problem)
                break
        else:
            document += not has_documents
            bio = tuple(to_bio(tags)) if labelled else None
            sentences.append(TaggedSentence(tuple(words), bio, document))
    if not sentences:
        raise InputError(
            f"{path}: no usable sentence; expected a word and its tag per line, and an empty line after a sentence"
        )
    return sentences


def has_tags(path: str | PathLike[str]) -> bool:
    """Returns True if any word of a file has a second column. InputError if it cannot be read."""
    rows = (
        row for rows in _blocks(str(path), BadRows(quiet=True)) for row in rows if not row[1][0].startswith(_DOCUMENT)
    )
    return any(len(columns) > 1 for _, columns in rows)


def is_conll(path: str | PathLike[str]) -> bool:
    """Distinguishes CoNLL columns, one word per line, from plain text. InputError if the file cannot be read.

    True if the name ends in .conll, a line starts with -DOCSTART-, no line has a second column, or every line's last
    column is a tag.
    """
    if re.search(r"\.conll(\.\w+)?$", str(path).lower()):
        return True
    rows = [row[1] for rows in _blocks(str(path), BadRows(quiet=True)) for row in rows]
    words = [row for row in rows if not row[0].startswith(_DOCUMENT)]
    is_tagged = all(len(row) > 1 and _TAG.fullmatch(row[-1].strip()) for row in words)
    return len(words) < len(rows) or is_tagged or all(len(row) == 1 for row in words)


def read_plain(path: str | PathLike[str], bad_rows: BadRows) -> list[TaggedSentence]:
    """Returns the sentences of plain text, one per line; words are separated by spaces.

    Raises InputError if the file cannot be read, or has no sentence.
    """
    lines = [line for _, line in text_lines(str(path), bad_rows) if line.strip()]
    if not lines:
        raise InputError(f"{path}: no sentence; expected one sentence per line, with spaces between words")
    return [split_words(line, number) for number, line in enumerate(lines)]


def split_words(text: str, document: int) -> TaggedSentence:
    """Splits a text at whitespace into words without tags."""
    return TaggedSentence(tuple(word for word in re.split(r"[ \t\r\n]+", text) if word), None, document)


def _blocks(path: str, bad_rows: BadRows) -> Iterator[list[tuple[int, list[str]]]]:
    """Yields (line number, columns) of the lines of each sentence; a -DOCSTART- line is a block by itself."""
    rows: list[tuple[int, list[str]]] = []
    for number, line in text_lines(path, bad_rows):
        content = line.strip(" \t")
        starts = content.startswith(_DOCUMENT)
        if rows and (starts or not content):
            yield rows
            rows = []
        if content:
            rows.append((number, line.split("\t") if "\t" in line else _SPACES.split(content)))
        if starts:
            yield rows
            rows = []
    if rows:
        yield rows


def _column(columns: list[str], index: int, name: str) -> str:
    if not -len(columns) <= index < len(columns) or not columns[index].strip():
        raise ValueError(f"{name}={index}: missing or empty, the line has {len(columns)} columns")
    return columns[index].strip(" ")


def _tag(columns: list[str], index: int) -> str:
    if len(columns) < 2:
        raise BadLabel("the word has no tag", MISSING_LABEL)
    tag = _column(columns, index, "tag_column")
    if not _TAG.fullmatch(tag):
        raise BadLabel(f"invalid tag {tag!r:.60}; expected O, B-TYPE, I-TYPE, E-TYPE or S-TYPE", UNKNOWN_LABEL)
    return tag


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


def write_conll(
    path: str | PathLike[str], sentences: Sequence[TaggedSentence], predicted: Sequence[Sequence[str]]
) -> None:
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
