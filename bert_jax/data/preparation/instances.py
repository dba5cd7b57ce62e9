"""Creates BERT's next-sentence-prediction instances, sentence pairs without masks, from documents.

The algorithm is that of the reference's `create_pretraining_data.py` (google-research/bert), on token offsets: a
document is a sequence of sentences and a segment a contiguous range of tokens. An instance is therefore five integers,
and no token is copied until a record is written.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

Document = Sequence[int]
"""Sentence boundaries as token offsets: sentence i is tokens [document[i], document[i + 1])."""

SPECIAL_TOKENS_PER_PAIR = 3  # [CLS] A [SEP] B [SEP]
SPECIAL_TOKENS_PER_SINGLE = 2  # [CLS] A [SEP]


class Instance(NamedTuple):
    """Segments A and B as token offsets [start, stop), and whether B is not the continuation of A ("NotNext").

    Such a B is random; in a pair of `make_ordered_pairs`, A continues B.
    """

    a_start: int
    a_stop: int
    b_start: int
    b_stop: int
    is_random_next: bool


def target_length(longest: int, short_seq_prob: float, rng: Random) -> int:
    """Draws the target length in tokens: `longest`, or with `short_seq_prob` uniform in [2, longest]."""
    return rng.randint(2, longest) if rng.random() < short_seq_prob else longest


def truncate_pair(instance: Instance, max_tokens: int, rng: Random) -> Instance:
    """Drops tokens from the longer segment (tie: B), from its front or back by a fair coin, down to `max_tokens`."""
    a_start, a_stop, b_start, b_stop, label = instance
    while (a_stop - a_start) + (b_stop - b_start) > max_tokens:
        from_front = rng.random() < 0.5
        if a_stop - a_start > b_stop - b_start:
            a_start, a_stop = (a_start + 1, a_stop) if from_front else (a_start, a_stop - 1)
        else:
            b_start, b_stop = (b_start + 1, b_stop) if from_front else (b_start, b_stop - 1)
    return Instance(a_start, a_stop, b_start, b_stop, label)


def _random_segment(documents: Sequence[Document], index: int, length: int, rng: Random) -> tuple[int, int]:
    """Draws consecutive sentences of at least `length` tokens (or to the document's end) from another document."""
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != index:
            break
    document = documents[other]
    first = rng.randint(0, len(document) - 2)
    last = first
    while last < len(document) - 2 and document[last + 1] - document[first] < length:
        last += 1
    return document[first], document[last + 1]


def _pairs(
    documents: Sequence[Document], index: int, target: int, rng: Random, draw: Callable[[bool], bool]
) -> Iterator[Instance]:
    """Yields the pairs of a document, whose chunks of sentences have about `target` tokens.

    At the document's end, a chunk of one sentence is the continuation of the sentence before it.
    """
    document = documents[index]
    sentences = len(document) - 1
    first = i = 0  # the chunk is sentences [first, i]
    while i < sentences:
        if i == sentences - 1 or document[i + 1] - document[first] >= target:
            in_chunk = i + 1 - first
            in_a = rng.randint(1, in_chunk - 1) if in_chunk >= 2 else 1
            a = document[first], document[first + in_a]
            if draw(sentences > 1):
                b = _random_segment(documents, index, target - (a[1] - a[0]), rng)
                yield Instance(*a, *b, True)
                i = first + in_a - 1  # sentences not used for A are reused
            elif in_chunk >= 2:
                yield Instance(*a, a[1], document[i + 1], False)
            elif i + 1 < sentences:
                i += 1
                yield Instance(*a, a[1], document[i + 1], False)
            else:
                yield Instance(document[first - 1], a[0], *a, False)
            first = i + 1
        i += 1


def make_singles(
    documents: Sequence[Document], *, seq_len: int, short_seq_prob: float, rng: Random
) -> Iterator[list[Instance]]:
    """Yields the instances of each document in one pass: one segment of sentences up to the target length, without B.

    The rest of a document is an instance of its own. A sentence longer than the target is split into several. The
    target is drawn for each instance, as the corpus may be one document.
    """
    longest = seq_len - SPECIAL_TOKENS_PER_SINGLE
    for document in documents:
        target = target_length(longest, short_seq_prob, rng)
        ends: list[int] = []
        first = document[0]
        for start, stop in itertools.pairwise(document):
            while stop - first > target:
                first = start if first < start else first + target
                ends.append(first)
                target = target_length(longest, short_seq_prob, rng)
        spans = itertools.pairwise([document[0], *ends, document[-1]])
        yield [Instance(first, end, end, end, False) for first, end in spans]


def make_pairs(
    documents: Sequence[Document], *, seq_len: int, short_seq_prob: float, rng: Random
) -> Iterator[list[Instance]]:
    """Yields the instances of each document in order, in one pass over `documents`.

    Args:
      documents: sentence boundaries of each document, offsets into one token array; no empty document or sentence.
      seq_len: tokens in a finished sequence, with [CLS] and two [SEP].
      short_seq_prob: the probability of a shorter target length, drawn for each document.
      rng: the source of every draw.
    """
    forced = 0  # random B not yet compensated

    def draw(next_exists: bool) -> bool:
        """Draws a random B with probability 0.5, and compensates for forced ones.

        A document of one sentence has no next sentence, so its B must be random. To keep half of all pairs random, as
        in the paper, each such pair is compensated by the next pair that allows both.
        """
        nonlocal forced
        is_random = rng.random() < 0.5
        if not next_exists:
            forced += not is_random
            return True
        if is_random and forced:
            forced -= 1
            return False
        return is_random

    longest = seq_len - SPECIAL_TOKENS_PER_PAIR
    for index in range(len(documents)):
        target = target_length(longest, short_seq_prob, rng)
        # The pairs are drawn lazily: each is truncated before the next is drawn, as the reference orders its draws.
        instances = _pairs(documents, index, target, rng, draw)
        yield [truncate_pair(instance, longest, rng) for instance in instances]


def make_ordered_pairs(
    documents: Sequence[Document], *, seq_len: int, short_seq_prob: float, rng: Random
) -> Iterator[list[Instance]]:
    """Yields pairs for ALBERT's sentence-order prediction (Lan et al. 2020), whose segments are swapped half the time.

    Arguments are those of `make_pairs`. A document of one sentence has no pair.
    """
    longest = seq_len - SPECIAL_TOKENS_PER_PAIR
    for index, document in enumerate(documents):
        target = target_length(longest, short_seq_prob, rng)
        pairs = _pairs(documents, index, target, rng, lambda _: False) if len(document) > 2 else ()
        cut = [truncate_pair(pair, longest, rng) for pair in pairs]
        yield [Instance(*pair[2:4], *pair[:2], True) if rng.random() < 0.5 else pair for pair in cut]


MAKE_INSTANCES = {"nsp": make_pairs, "sop": make_ordered_pairs, "none": make_singles}
"""What makes the instances of each kind of pairs."""


def make_rng(*parts: object) -> Random:
    """Creates a `random.Random` seeded by printable parts, deterministic across versions of Python 3."""
    return Random("\x1f".join(str(part) for part in parts))
