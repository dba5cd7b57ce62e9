"""Named entities: a softmax over tags at the first piece of each word, without a CRF, scored as conlleval does.

A CoNLL file has one word per line, which comes first, and its tag last, separated by tabs (if the line has one) or
spaces. An empty line ends a sentence, and a line that starts with -DOCSTART- begins a document. In a file without
-DOCSTART- every sentence is its own document. Internally tags are BIO (IOB2): B-TYPE begins an entity, I-TYPE continues
it, O is outside.

Words are tokenized one by one; a word's first piece carries its tag. A sentence is one sequence between [CLS] and
[SEP]. A longer one is split into parts of half a window, and each is predicted in the middle of a window of its own.
With document context, as in BERT's paper, the remaining space is filled with words of the same document before and
after the sentence, as many on either side as available.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from etils import epath

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files.text_files import COMPRESSED, Utf8, lines_from, named_format, text_format
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.task import BadLabel, BadRows, Labels, Outputs, Split, Task, write_lines
from bert_jax.finetuning.tasks.text import TextTask
from bert_jax.text.sequences import EncodedSequence
from bert_jax.text.tokenizer import Tokenizer

OUTSIDE = "O"

_DOCUMENT = b"-DOCSTART-"
_TAG = re.compile(r"O|[BIESLU]-\S.*")
_WORDS = 65_536  # tokenized at once


@dataclass(frozen=True)
class TaggedSentence:
    """Words and their BIO tags, or None for an untagged file; `document` numbers a file's documents from 0.

    `id` is that of a row with a text, or the number of the sentence in its file.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    id: str


@dataclass(frozen=True, kw_only=True)
class NerTask(Task):
    """Tagging of the words of sentences, scored by complete entities.

    Attributes:
      tags: the tags by number: O, then B and I of each type of the training file.
      document_context: reads a sentence with those around it in its document.
    """

    name: str = "ner"
    kind: str = "tag"
    tags: tuple[str, ...] = ()
    document_context: bool = False
    usual_files: ClassVar[Mapping[str, Sequence[str]]] = {
        "train": ("train.conll", "eng.train", "train.txt"),
        "dev": ("dev.conll", "eng.testa", "valid.txt", "dev.txt", "valid.conll", "val.conll", "val.txt"),
        "test": ("test.conll", "eng.testb", "test.txt"),
    }

    @classmethod
    def from_config(cls, config: FinetuneConfig) -> Self:
        return cls(max_seq_len=config.task.max_seq_len, document_context=config.task.document_context)

    @property
    def size(self) -> int:
        return len(self.tags)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("f1", "precision", "recall", *(f"f1_{tag[2:]}" for tag in self.tags if tag.startswith("B-")))

    # --- Files --------------------------------------------------------------------------------------------------------

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
        """Reads a CoNLL file, or with `columns`, to predict, a table with a text in this column."""
        if columns:
            rows = TextTask(texts=("text",)).read(path, bad_rows, labels="ignored", columns=columns)
            return [_split_words(row.text_a, row.id, number) for number, row in enumerate(rows)]
        name = os.path.basename(path).lower()
        is_usual = name in itertools.chain(*self.usual_files.values()) or named_format(path) == "tsv"
        is_text = name.endswith((".txt", *(f".txt{extension}" for extension in COMPRESSED)))
        if labels == "ignored" and not is_usual and (is_text or named_format(path)):
            raise InputError(f"{path}: expected a word a line (.conll, .tsv); name the column of a table with --text")
        return self._read_conll(path, bad_rows, labels)

    def from_texts(self, texts: Sequence[str], pairs: Sequence[Any]) -> list[TaggedSentence]:
        if any(pair is not None for pair in pairs):
            raise InputError("pair: a tagger does not support pairs of texts; omit the pair")
        return [_split_words(text, str(number), number) for number, text in enumerate(texts)]

    def is_labelled(self, example: TaggedSentence) -> bool:
        return example.tags is not None

    def _read_conll(self, path: str, bad_rows: BadRows, labels: Labels) -> list[TaggedSentence]:
        """Reads the sentences of a file; tags in IOB1, BIO, BIOES or BILOU are converted to BIO.

        A sentence with a line that is not UTF-8 or lacks a word or a valid tag is skipped.
        """
        text_format(path)  # refuses what is not text
        sentences: list[TaggedSentence] = []
        number, document, has_documents = 0, -1, False
        lines = enumerate((line.strip(b" \r") for _, line in lines_from(path, 0, None)), 1)
        for key, block in itertools.groupby(lines, key=_block_of):
            if isinstance(key, str):
                document, has_documents = document + 1, True
            if key is not True:
                continue
            number += 1
            (first, line), *others = block
            try:
                rows = [_columns(Utf8().decode(line)) for line in (line, *(line for _, line in others))]
                is_tagged = labels == "required" or (labels == "optional" and any(len(row) > 1 for row in rows))
                words = tuple(_word(row) for row in rows)
                tags = tuple(to_bio([_tag(row) for row in rows])) if is_tagged else None
            except ValueError as error:
                bad_rows.add(path, first, error)
                continue
            document += not has_documents
            sentences.append(TaggedSentence(words, tags, document, str(number)))
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
        """Returns a tag for every word of every sentence: the predicted one, or O for a word without a piece."""
        tags = [[OUTSIDE] * len(sentence.words) for sentence in split.examples]
        for window, token_outputs in zip(split.encoded.windows, outputs, strict=True):
            for sentence, word, position in window.words:
                tags[sentence][word] = self.tags[int(token_outputs[position].argmax())]
        return tags

    def score(self, split: Split, outputs: Outputs) -> dict[str, float]:
        scores = entity_scores([sentence.tags for sentence in split.examples], self._predicted(split, outputs))
        return {**dict.fromkeys(self.metrics, 0.0), **scores}  # also of types that neither has

    def predictions(self, split: Split, outputs: Outputs) -> list[dict[str, Any]]:
        both = zip(split.examples, self._predicted(split, outputs), strict=True)
        return [{"id": sentence.id, "words": list(sentence.words), "prediction": tags} for sentence, tags in both]

    def write(self, split: Split, outputs: Outputs, folder: epath.Path) -> None:
        write_conll(folder / f"{split.name}.conll", split.examples, self._predicted(split, outputs))


# --- Files ------------------------------------------------------------------------------------------------------------


def _block_of(numbered: tuple[int, bytes]) -> str | bool:
    """Returns the block of a line: True for a word's, False for an empty one, its number for a document's."""
    number, line = numbered
    return str(number) if line.startswith(_DOCUMENT) else bool(line.strip(b"\t"))


def _split_words(text: str, identity: str, document: int) -> TaggedSentence:
    """Splits a text at whitespace into words without tags."""
    return TaggedSentence(tuple(word for word in re.split(r"[ \t\r\n]+", text) if word), None, document, identity)


def _columns(line: str) -> list[str]:
    return [column.strip(" ") for column in line.split("\t")] if "\t" in line else re.split(" +", line)


def _word(columns: Sequence[str]) -> str:
    if not columns[0]:
        raise ValueError("a line of the sentence has no word")
    return columns[0]


def _tag(columns: Sequence[str]) -> str:
    if len(columns) < 2:
        raise BadLabel(f"the word {columns[0]!r:.60} has no tag")
    if not _TAG.fullmatch(columns[-1]):
        raise BadLabel(f"invalid tag {columns[-1]!r:.60}; expected O or a type after B-, I-, E-, S-, L- or U-")
    return columns[-1]


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


# --- Windows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TagWindow:
    """A sequence, and (sentence, word, position) of each word predicted in it.

    Sentences and words are numbered from 0; `position` is the index of the word's first piece in `sequence.input_ids`.
    """

    sequence: EncodedSequence
    words: tuple[tuple[int, int, int], ...]


def encode_windows(
    tokenizer: Tokenizer, sentences: Sequence[TaggedSentence], max_seq_len: int, *, document_context: bool = False
) -> list[TagWindow]:
    """Returns the windows of all sentences, in their order.

    Every word that has a piece is predicted in exactly one window. (A word of control characters only has none.)

    Args:
      tokenizer: tokenizes the words one by one.
      sentences: from a file; the sentences of a document are adjacent.
      max_seq_len: maximum tokens of a window, with [CLS] and [SEP]; at least 3. A word with more pieces than fit into a
        window is truncated.
      document_context: fill the windows with other sentences of the document.
    """
    room = max_seq_len - 2
    pieces = _pieces(tokenizer, sentences, room)
    windows: list[TagWindow] = []
    numbered = enumerate(sentences)
    for _, group in itertools.groupby(numbered, key=lambda pair: pair[1].document if document_context else pair[0]):
        words = [(number, word) for number, sentence in group for word in range(len(sentence.words))]
        ids = [pieces[sentences[number].words[word]] for number, word in words]
        ends = np.cumsum([0, *map(len, ids)])  # of the pieces before each word, and of all
        for start, end in _parts(words, ends, room):
            low, high = _widen(ends, start, end, room)
            input_ids, targets = [tokenizer.cls_id], []
            for index in range(low, high):
                if ids[index] and start <= index < end:
                    targets.append((*words[index], len(input_ids)))
                input_ids += ids[index]
            input_ids.append(tokenizer.sep_id)
            if targets:
                windows.append(TagWindow(EncodedSequence(tuple(input_ids), len(input_ids)), tuple(targets)))
    return windows


def _pieces(tokenizer: Tokenizer, sentences: Sequence[TaggedSentence], limit: int) -> dict[str, list[int]]:
    words = list(dict.fromkeys(word for sentence in sentences for word in sentence.words))
    batches = (words[start : start + _WORDS] for start in range(0, len(words), _WORDS))
    encoded = (pair for batch in batches for pair in zip(batch, tokenizer.encode_words(batch), strict=True))
    return {word: ids[:limit] for word, ids in encoded}


def _parts(words: Sequence[tuple[int, int]], ends: np.ndarray, room: int) -> Iterator[tuple[int, int]]:
    """Yields [start, end) of the words that are predicted in a window of their own: a sentence, or a part of it.

    The parts of one that is longer than a window have half a window of pieces, so that a quarter is on either side.
    """
    start = 0
    for _, group in itertools.groupby(words, key=lambda pair: pair[0]):
        last = start + len(list(group))
        limit = room if ends[last] - ends[start] <= room else room // 2
        for word in range(start + 1, last):
            if ends[word + 1] - ends[start] > limit:
                yield start, word
                start = word
        yield start, last
        start = last


def _widen(ends: np.ndarray, start: int, end: int, room: int) -> tuple[int, int]:
    """Returns the words of the window around words [start, end): equal context on both sides, where available."""
    spare = room - (ends[end] - ends[start])
    low = np.searchsorted(ends, ends[start] - spare // 2)  # complete words: the first one that begins inside
    high = np.searchsorted(ends, ends[low] + room, side="right") - 1
    low = np.searchsorted(ends, ends[high] - room)  # space left after the words goes before them
    return int(low), int(high)


# --- Entities ---------------------------------------------------------------------------------------------------------


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns (type, start, end) of the entities of a sentence; `end` is exclusive.

    Reads IOB1, BIO and BIOES like conlleval (https://www.cnts.ua.ac.be/conll2000/chunking/conlleval.txt), including
    ill-formed tags: B and S begin an entity; I and E do so after O, E, S, or another type. In BILOU, L is E and U is S.
    A type alone, such as PER, is I-PER.
    """
    spans: list[tuple[str, int, int]] = []
    start, before, kind = 0, OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, this = tag.partition("-") if "-" in tag or tag == OUTSIDE else ("I", "", tag)
        begins = prefix != OUTSIDE and (prefix in "BSU" or before in "OESLU" or this != kind)
        if before != OUTSIDE and (begins or prefix == OUTSIDE):
            spans.append((kind, start, index))
        if begins:
            start = index
        before, kind = prefix, this
    return spans


def to_bio(tags: Sequence[str]) -> list[str]:
    """Converts the tags of a sentence, in IOB1, BIO, BIOES or BILOU, to BIO; `entity_spans` are unchanged."""
    converted = [OUTSIDE] * len(tags)
    for kind, start, end in entity_spans(tags):
        converted[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
    return converted


def tag_names(sentences: Iterable[TaggedSentence]) -> tuple[str, ...]:
    """Returns the tag set: O, then B and I of every entity type in the sentences, sorted by type."""
    kinds = {tag[2:] for sentence in sentences for tag in sentence.tags or () if tag != OUTSIDE}
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(kinds) for prefix in "BI"))


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns `f1`, `precision` and `recall` over all entities, and `f1_TYPE` of each type; fractions, not percent.

    Args:
      gold: the tags of each sentence, in IOB1, BIO, BIOES or BILOU.
      predicted: the same number of tags and sentences.
    """
    counts: dict[str, list[int]] = {}  # by type: entities of the file, predicted, and predicted at their place
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        spans = {*entity_spans(gold_tags)}, {*entity_spans(predicted_tags)}
        for number, some in enumerate((*spans, spans[0] & spans[1])):
            for kind, _, _ in some:
                counts.setdefault(kind, [0, 0, 0])[number] += 1
    true, said, correct = (sum(column) for column in zip([0, 0, 0], *counts.values(), strict=True))
    by_type = {f"f1_{kind}": 2 * right / (of_kind + told) for kind, (of_kind, told, right) in sorted(counts.items())}
    return {
        "f1": 2 * correct / (true + said) if correct else 0.0, "precision": correct / said if said else 0.0,
        "recall": correct / true if true else 0.0, **by_type,
    }  # fmt: skip
