"""Trains a SentencePiece model, unigram or BPE: `bert-jax vocab --kind`.

The trainer of the `sentencepiece` library keeps its text in memory. It therefore gets a sample of bounded size: the
lines with the smallest hashes. The sample, and so the model, is a function of the text alone, not of the order of
documents. The number of the trainer's threads is fixed, because sums of the unigram model depend on it.
"""

import hashlib
import heapq
import io
import logging
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from bert_jax.errors import InputError
from bert_jax.text.sentencepiece.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.sentencepiece.text_normalizers import OwnNormalizer
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.vocabulary_options import SAMPLE_BYTES, SENTENCEPIECE_COVERAGE

log = logging.getLogger(__name__)

_LINE_BYTES = 4096  # of a line that the trainer gets; it drops longer ones than `max_sentence_length`
_THREADS = 16


def train_sentencepiece(
    documents: Iterable[str],
    size: int,
    *,
    kind: str,
    lowercase: bool,
    strip_accents: bool,
    character_coverage: float = SENTENCEPIECE_COVERAGE,
    sample_bytes: int = SAMPLE_BYTES,
) -> SentencePieceTokenizer:
    """Trains a model on documents, which are streamed once, and returns its tokenizer.

    The ids 0 to 4 are those of `SPECIAL_TOKENS`.

    Args:
      documents: texts of any length.
      size: the number of pieces. A small corpus may give fewer, which is logged.
      kind: "unigram" or "bpe".
      lowercase, strip_accents: the normalization, see `text_normalizers`.
      character_coverage: the share of the text's characters that are pieces themselves; others are [UNK].
      sample_bytes: the maximum size of the sample that the trainer gets.

    Raises:
      InputError: the documents have no words, or `size` is too small for the characters.
    """
    sample = _Sample(sample_bytes)
    normalizer = OwnNormalizer(lowercase, strip_accents)
    for document in documents:
        for line in document.split("\n"):
            for part in _parts(normalizer.normalize(line).strip(" ")):
                sample.add(part)
    lines = sample.lines()
    if not lines:
        raise InputError(
            "--input: the corpus has no words to train a vocabulary on; check that its files are not empty"
        )
    if sample.is_partial:
        log.info(
            "Training on a sample of %.1f%% of the text: %s of %s bytes",
            100 * sample.share,
            f"{sample.kept:,}",
            f"{sample.seen:,}",
        )
    model = _train(lines, size, kind, character_coverage)
    tokenizer = SentencePieceTokenizer(model, lowercase, strip_accents)
    if tokenizer.vocab_size < size:
        log.warning(
            "The vocabulary has %d pieces, fewer than --size=%d: the text has no more candidates",
            tokenizer.vocab_size,
            size,
        )
    return tokenizer


def _train(lines: Iterable[str], size: int, kind: str, character_coverage: float) -> bytes:
    pad, unk, *control = SPECIAL_TOKENS
    file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            model_type=kind,
            vocab_size=max(size, len(SPECIAL_TOKENS)),  # for fewer it has no message
            hard_vocab_limit=False,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            pad_id=0, pad_piece=pad, unk_id=1, unk_piece=unk, bos_id=-1, eos_id=-1, control_symbols=control,
            max_sentence_length=2 * _LINE_BYTES,
            num_threads=_THREADS,
            minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if not needed:
            raise
        raise InputError(
            f"--size={size}: too small for the characters of this text; expected at least {needed[1]}, or a smaller "
            f"--character_coverage than {character_coverage}"
        ) from error
    return file.getvalue()


class _Sample:
    """The distinct lines with the smallest hashes, up to `limit` bytes; each as often as it was added."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seen = self.kept = 0
        self._counts: dict[str, int] = {}
        self._by_hash: list[tuple[int, str]] = []  # a heap, the largest hash first
        self._bound: int | None = None  # lines of this hash or more are dropped

    @property
    def is_partial(self) -> bool:
        return self._bound is not None

    @property
    def share(self) -> float:
        return self.kept / max(1, self.seen)

    def add(self, line: str) -> None:
        size = len(line.encode())
        self.seen += size
        if line in self._counts:
            self._counts[line] += 1
            self.kept += size
        else:
            key = _hash(line)
            if self._bound is not None and key >= self._bound:
                return
            self._counts[line] = 1
            self.kept += size
            heapq.heappush(self._by_hash, (-key, line))
        while self.kept > self.limit and len(self._by_hash) > 1:
            key, dropped = heapq.heappop(self._by_hash)
            self._bound = -key
            self.kept -= self._counts.pop(dropped) * len(dropped.encode())

    def lines(self) -> list[str]:
        """Returns the lines in the order of their hashes."""
        return [line for _, line in sorted(self._by_hash, reverse=True) for _ in range(self._counts[line])]


def _hash(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "little")


def _parts(line: str) -> Iterator[str]:
    """Yields a normalized line in parts of at most `_LINE_BYTES` bytes, at spaces where it has any."""
    characters = _LINE_BYTES // 4
    while len(line) > characters:
        cut = line.rfind(" ", 1, characters + 1)
        cut = cut if cut > 0 else characters
        yield line[:cut]
        line = line[cut:].lstrip(" ")
    if line:
        yield line
