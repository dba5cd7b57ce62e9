"""Named entities: CoNLL files, the schemes of their tags, and the scores that conlleval gives.

A file has one word a line, with columns between tabs (where the line has one) or spaces; an empty line ends a sentence,
and a line that begins with -DOCSTART- begins a document. CoNLL-2003 has the word first and the tag last; so has
WNUT-17. In a file without -DOCSTART- every sentence is a document of its own.

Within the program tags are BIO (IOB2): B-TYPE begins an entity, I-TYPE goes on with it, O is outside.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike

from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.bad_rows import MISSING_LABEL, UNKNOWN_LABEL, BadLabel, BadRows
from bert_jax.finetuning.inputs.tables import text_lines, write_lines

OUTSIDE = "O"
SCHEMES = ("iob1", "bio", "bioes")

_DOCUMENT = "-DOCSTART-"
_TAG = re.compile(r"O|[BIES]-\S.*")
_SPACES = re.compile(r"[ \t]+")  # no other: a no-break space may be part of a word


@dataclass(frozen=True)
class TaggedSentence:
    """Words and their tags, BIO, or None where the file has none; `document` numbers a file's documents from 0."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int


@dataclass(frozen=True)
class EntityScore:
    """Counts of entities: in the file, predicted, and predicted with the right type and both ends."""

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
    """The sentences of a file; tags of any of SCHEMES become BIO.

    Args:
      path: the file, compressed or not.
      bad_rows: gets lines without such columns or with a tag that is none; the sentence is left out, and named once.
      word_column: counted from 0, or from the end with -1.
      tag_column: the same.
      labelled: False for words to be tagged: no tag is looked at, and there may be but one column.

    Raises:
      InputError: the file cannot be read, or has no usable sentence.
    """
    sentences: list[TaggedSentence] = []
    document, named = -1, False
    for rows in _blocks(str(path), bad_rows):
        if rows[0][1][0].startswith(_DOCUMENT):
            document, named = document + 1, True
            continue
        words, tags = [], []
        for line, columns in rows:
            try:
                words.append(_column(columns, word_column, "word"))
                if labelled:
                    tags.append(_tag(columns, tag_column))
            except ValueError as error:
                problem = f"{error}; its sentence is left out"
                bad_rows.add(path, line, BadLabel(problem, error.reason) if isinstance(error, BadLabel) else problem)
                break
        else:
            document += not named
            bio = tuple(convert_tags(tags, "bio")) if labelled else None
            sentences.append(TaggedSentence(tuple(words), bio, document))
    if not sentences:
        raise InputError(f"{path}: no usable sentence; a line is a word and its tag, an empty line ends a sentence")
    return sentences


def has_tags(path: str | PathLike[str]) -> bool:
    """Returns True if a file's words have anything beside them. InputError where it cannot be read."""
    rows = (
        row for rows in _blocks(str(path), BadRows(quiet=True)) for row in rows if not row[1][0].startswith(_DOCUMENT)
    )
    return any(len(columns) > 1 for _, columns in rows)


def is_conll(path: str | PathLike[str]) -> bool:
    """Tells CoNLL's columns, a word a line, from plain text. InputError where the file cannot be read.

    True where the name ends in .conll, no line has a second column, or every line's last column is a tag.
    """
    if re.search(r"\.conll(\.\w+)?$", str(path).lower()):
        return True
    rows = [row[1] for rows in _blocks(str(path), BadRows(quiet=True)) for row in rows]
    words = [row for row in rows if not row[0].startswith(_DOCUMENT)]
    is_tagged = all(len(row) > 1 and _TAG.fullmatch(row[-1].strip()) for row in words)
    return len(words) < len(rows) or is_tagged or all(len(row) == 1 for row in words)


def read_plain(path: str | PathLike[str], bad_rows: BadRows) -> list[TaggedSentence]:
    """Returns the sentences of plain text, one a line; words stand between spaces.

    InputError where the file cannot be read, or has no sentence.
    """
    lines = [line for _, line in text_lines(str(path), bad_rows) if line.strip()]
    if not lines:
        raise InputError(f"{path}: no sentence; a line of plain text is one, with spaces between its words")
    return [split_words(line, number) for number, line in enumerate(lines)]


def split_words(text: str, document: int) -> TaggedSentence:
    """Returns the words between the spaces of a text, without tags."""
    return TaggedSentence(tuple(word for word in re.split(r"[ \t\r\n]+", text) if word), None, document)


def _blocks(path: str, bad_rows: BadRows) -> Iterator[list[tuple[int, list[str]]]]:
    """(line number, columns) of the lines of each sentence; a -DOCSTART- line by itself."""
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
        raise ValueError(f"no {name} in column {index} of {len(columns)}")
    return columns[index].strip(" ")


def _tag(columns: list[str], index: int) -> str:
    if len(columns) < 2:
        raise BadLabel("a word without a tag", MISSING_LABEL)
    tag = _column(columns, index, "tag")
    if not _TAG.fullmatch(tag):
        raise BadLabel(f"{tag!r:.60} is no tag: tags are O, B-TYPE, I-TYPE, E-TYPE and S-TYPE", UNKNOWN_LABEL)
    return tag


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, start, end) of the entities of a sentence; `end` is the word behind the last.

    As conlleval (https://www.cnts.ua.ac.be/conll2000/chunking/conlleval.txt) takes IOB1, BIO and BIOES, also where
    they are ill-formed: B and S begin an entity; I and E do so behind O, E, S, or another type.
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


def detect_scheme(tags_of_sentences: Iterable[Sequence[str]]) -> str:
    """Which of SCHEMES tags are written in.

    "bioes" where there is an E or S; else "iob1" where I is used, and B only to part an entity from one of the same
    type before it; else "bio".
    """
    inside, parting_only = False, True
    for tags in tags_of_sentences:
        before = OUTSIDE
        for tag in tags:
            prefix, _, kind = tag.partition("-")
            if prefix in "ES":
                return "bioes"
            inside = inside or prefix == "I"
            if prefix == "B" and (before == OUTSIDE or before.partition("-")[2] != kind):
                parting_only = False
            before = tag
    return "iob1" if inside and parting_only else "bio"


def convert_tags(tags: Sequence[str], scheme: str) -> list[str]:
    """The tags of a sentence, in any of SCHEMES and ill-formed or not, in `scheme`: the same `entity_spans`."""
    if scheme not in SCHEMES:
        raise InputError(f"there is no tagging scheme {scheme!r}; there are: {', '.join(SCHEMES)}")
    converted = [OUTSIDE] * len(tags)
    previous: tuple[str, int] = ("", -1)
    for kind, start, end in entity_spans(tags):
        converted[start:end] = [f"I-{kind}"] * (end - start)
        if scheme == "bio" or (scheme == "iob1" and previous == (kind, start)) or scheme == "bioes":
            converted[start] = f"B-{kind}"
        if scheme == "bioes":
            converted[end - 1] = f"S-{kind}" if end == start + 1 else f"E-{kind}"
        previous = (kind, end)
    return converted


def tag_names(sentences: Iterable[TaggedSentence]) -> tuple[str, ...]:
    """What a model chooses from: O, then B and I of every type that there is an entity of, by name."""
    kinds = {tag[2:] for sentence in sentences for tag in sentence.tags or () if tag != OUTSIDE}
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(kinds) for prefix in "BI"))


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> tuple[EntityScore, dict[str, EntityScore]]:
    """The score over all entities, which is the task's, and that of each type, by name; shares, not percent.

    Args:
      gold: the tags of each sentence, in any of SCHEMES.
      predicted: as many tags for as many sentences.
    """
    counts: dict[str, list[int]] = {}
    for right, guess in zip(gold, predicted, strict=True):
        if len(right) != len(guess):
            raise ValueError(f"{len(guess)} tags for {len(right)} words")
        is_right, is_guessed = set(entity_spans(right)), set(entity_spans(guess))
        for index, spans in enumerate((is_right, is_guessed, is_right & is_guessed)):
            for kind, _, _ in spans:
                counts.setdefault(kind, [0, 0, 0])[index] += 1
    totals = [sum(column) for column in zip(*counts.values(), strict=True)] or [0, 0, 0]
    return EntityScore(*totals), {kind: EntityScore(*counts[kind]) for kind in sorted(counts)}


def write_conll(
    path: str | PathLike[str], sentences: Sequence[TaggedSentence], predicted: Sequence[Sequence[str]]
) -> None:
    """Writes word, gold tag (where there is one) and predicted tag a line, an empty line behind each sentence.

    conlleval reads this. Columns are parted by spaces, or by tabs where a word holds a space.
    """
    between = "\t" if any(" " in word for sentence in sentences for word in sentence.words) else " "
    lines: list[str] = []
    for sentence, tags in zip(sentences, predicted, strict=True):
        columns = (sentence.words, *([sentence.tags] if sentence.tags is not None else []), tags)
        lines += [between.join(row) for row in zip(*columns, strict=True)]
        lines.append("")
    write_lines(path, lines)
