"""Trains a Unigram vocabulary (Kudo, 2018, arXiv 1804.10959) with the `sentencepiece` library.

Its trainer keeps the text in memory. It therefore gets a sample of bounded size: the lines with the smallest hashes.
The sample, and so the vocabulary, is a function of the text alone, not of the order of documents. The number of the
trainer's threads is fixed, because sums of the model depend on it.
"""

import hashlib
import heapq
import io
import logging
import re
from collections.abc import Iterable, Iterator

import sentencepiece
from tokenizers import models, normalizers

from bert_jax.errors import InputError
from bert_jax.text.tokenizer import SPECIAL_TOKENS
from bert_jax.text.vocabulary_options import VocabularyOptions

log = logging.getLogger(__name__)

_LINE_BYTES = 4096  # of a line that the trainer gets; it drops longer ones than `max_sentence_length`
_THREADS = 16
_UNKNOWN = "\u2585"  # the trainer drops lines with it


def train_unigram(
    documents: Iterable[str], options: VocabularyOptions, normalizer: normalizers.Normalizer
) -> models.Unigram:
    """Trains a model on documents, which are streamed once. Its ids 0 to 4 are those of `SPECIAL_TOKENS`.

    Raises:
      InputError: the documents have no words, or `options.size` is too small for the characters.
    """
    sample = _Sample(options.sample_limit)
    for document in documents:
        for line in document.split("\n"):
            for part in _parts(normalizer.normalize_str(line).replace(_UNKNOWN, " ").strip(" ")):
                sample.add(part)
    lines = sample.lines()
    if not lines:
        raise InputError("input: the corpus has no words to train a vocabulary on; check that its files are not empty")
    if sample.is_partial:
        log.info(
            "Training on a sample of %.1f%% of the text: %s of %s bytes",
            100 * sample.share,
            f"{sample.kept:,}",
            f"{sample.seen:,}",
        )
    processor = sentencepiece.SentencePieceProcessor(model_proto=_train(lines, options.size, options.coverage))
    pieces = [(processor.id_to_piece(index), processor.get_score(index)) for index in range(processor.get_piece_size())]
    return models.Unigram(pieces, unk_id=SPECIAL_TOKENS.index("[UNK]"), byte_fallback=False)


def _train(lines: Iterable[str], size: int, character_coverage: float) -> bytes:
    pad, unk, *control = SPECIAL_TOKENS
    file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            model_type="unigram",
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
            f"size={size}: too small for the characters of this text; expected at least {needed[1]}, or a smaller "
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
    characters, start = _LINE_BYTES // 4, 0
    while len(line) - start > characters:
        cut = line.rfind(" ", start + 1, start + characters + 1)
        cut = cut if cut > 0 else start + characters
        yield line[start:cut]
        start = cut + (line[cut] == " ")
    if start < len(line):
        yield line[start:]
