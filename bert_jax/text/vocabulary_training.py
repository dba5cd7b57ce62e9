"""Trains a vocabulary: `bert-jax vocab`.

WordPiece and BPE are trained by the `tokenizers` library, which merges the most frequent pair of adjacent pieces until
the vocabulary is full; Google's trainer was never released. By default it is not deterministic: it numbers the initial
pieces in the order of a randomized hash table and breaks ties by those numbers. Here words are counted first, and the
trainer gets the initial pieces in sorted order. Unigram (Kudo, 2018, arXiv 1804.10959) is trained by the
`sentencepiece` library on the same counts, with a fixed number of threads, as sums of the model depend on it. The
vocabulary is then deterministic: it depends only on the text, not on the run, the number of threads or the order of
the documents. Memory grows with the number of distinct words.
"""

import io
import itertools
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from bert_jax.errors import InputError
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_jax.text.vocabulary_options import COVERAGE, VocabularyOptions
from bert_jax.text.wordpiece import CONTINUATION, bert_tokenizer

log = logging.getLogger(__name__)

_MAX_WORD_CHARACTERS = 100  # longer words are [UNK] in WordPiece
_CHUNK_CHARACTERS = 1 << 16
_CHUNK = re.compile(rf"(?s).{{1,{_CHUNK_CHARACTERS}}}(?=\s|\Z)|.{{1,{_CHUNK_CHARACTERS}}}")
_MIN_PAIR_COUNT = 2
_THREADS = 16
_SAMPLE_BYTES = 128 << 20  # of distinct words that the trainer of Unigram gets; it takes some ten times as much memory
_TRAINER_MARK = "\u2585"  # the trainer of Unigram drops what contains it

_DROPPED = r"(?![\u200C\u200D])[\p{Cc}\p{Cf}\uFFFD]"  # not the joiners, which Persian, Hindi and emoji need
_SPACES = r"[\s\u200B\u2581]+"
_ACCENTS = r"[\u0300-\u036F\u1AB0-\u1AFF\u1DC0-\u1DFF\u20D0-\u20FF\uFE20-\uFE2F]"
_SPACE = "▁"  # before a word of Unigram and BPE
_WHITE_SPACE = f"{_SPACE}ĠĊĉč"  # as in words of BPE and of byte-level BPE: U+0020, and line ends and tabs


def train_vocabulary(documents: Iterable[str], options: VocabularyOptions) -> Tokenizer:
    """Trains a vocabulary on documents, which are streamed once, and returns its tokenizer.

    The ids 0 to 4 are those of `SPECIAL_TOKENS`. A small corpus may give fewer pieces than `options.size`, which is
    logged.

    Raises:
      InputError: the documents have no words, or `options.size` is too small for their characters.
    """
    fast = _steps_of_kind(options)
    fast.model = _train(count_words(documents, fast), options)
    if options.kind == "byte_bpe":  # a word is masked with the space before it, which is in its first piece
        fast.add_special_tokens([AddedToken("[MASK]", lstrip=True)])
    tokenizer = Tokenizer(json.loads(fast.to_str()))
    if tokenizer.vocab_size > options.size:
        needed = f"expected at least {tokenizer.vocab_size}"
        raise InputError(f"size={options.size}: too small for the characters of this text; {needed}")
    if tokenizer.vocab_size < options.size:
        log.warning("The text gives %d pieces, fewer than --size=%d", tokenizer.vocab_size, options.size)
    return tokenizer


def _steps_of_kind(options: VocabularyOptions) -> tokenizers.Tokenizer:
    """Returns a tokenizer without pieces that normalizes and splits text as that of the options does.

    WordPiece does as BERT does. The text of Unigram and BPE is normalized to NFKC without control characters, and split
    at spaces, which are a part of their pieces. That of byte-level BPE keeps every character.
    """
    accents = False if options.keep_accents else None
    fast = bert_tokenizer(models.WordPiece(unk_token="[UNK]"), lowercase=not options.cased, strip_accents=accents)
    if options.kind == "wordpiece":
        return fast
    case: list[normalizers.Normalizer] = [] if options.cased else [normalizers.Lowercase()]
    if options.strip_accents:
        case += [normalizers.NFD(), normalizers.Replace(Regex(_ACCENTS), ""), normalizers.NFC()]
    if options.kind == "byte_bpe":
        fast.normalizer = normalizers.Sequence(case)
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        fast.decoder = decoders.ByteLevel()
        return fast
    spaces, last = normalizers.Replace(Regex(_SPACES), " "), normalizers.Replace(Regex(" $"), "")
    # A space mark is put before a text only if its first character is still there.
    first, dropped = normalizers.Replace(Regex(f"^({_DROPPED})+"), " "), normalizers.Replace(Regex(_DROPPED), "")
    fast.normalizer = normalizers.Sequence([spaces, first, dropped, normalizers.NFKC(), *case, spaces, last])
    # A space mark is put before the text alone: after a special token in it, the text has its own spaces.
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    return fast


def _train(words: Mapping[str, int], options: VocabularyOptions) -> models.Model:
    """Returns the model of counted words. Raises InputError for no words."""
    is_wordpiece = options.kind == "wordpiece"
    if is_wordpiece:
        words = {word: count for word, count in words.items() if len(word) <= _MAX_WORD_CHARACTERS}
        covered = _alphabet(words)
        words = {word: count for word, count in words.items() if covered.issuperset(word)}
    elif options.kind != "byte_bpe":
        words = _split_at_others(words, (_alphabet(words) | {_SPACE}) - {_TRAINER_MARK})
    if not any(word.strip(_WHITE_SPACE) for word in words):
        fix = ", or pass --kind unigram for text without spaces" if is_wordpiece else ""
        raise InputError(f"input: the corpus has no words to train on; check its files{fix}")
    if options.kind == "unigram":
        return _train_unigram(words, options.size)
    is_byte_level = options.kind == "byte_bpe"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet() if is_byte_level else {c for word in words for c in word})
    continuations = sorted({CONTINUATION + c for word in words for c in word[1:]}) if is_wordpiece else []
    trainer = (trainers.WordPieceTrainer if is_wordpiece else trainers.BpeTrainer)(
        vocab_size=options.size, min_frequency=_MIN_PAIR_COUNT, show_progress=False, initial_alphabet=alphabet,
        special_tokens=[*SPECIAL_TOKENS, *continuations],  # numbered in this order, before any word
    )  # fmt: skip
    empty = models.BPE(unk_token=None if is_byte_level else "[UNK]", fuse_unk=True)
    fast = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]") if is_wordpiece else empty)
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.train_from_iterator(_repeated(words), trainer)
    if not is_wordpiece:
        return fast.model
    ids = fast.get_vocab(with_added_tokens=False)
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *continuations, *sorted(ids, key=ids.__getitem__)])
    return models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")


def _split_at_others(words: Mapping[str, int], covered: set[str]) -> dict[str, int]:
    """Returns the parts of words between characters that are not `covered`: text without spaces is a long word."""
    parts: Counter[str] = Counter()
    for word, count in words.items():
        for is_covered, part in itertools.groupby(word, covered.__contains__):
            if is_covered:
                parts["".join(part)] += count
    return {part: parts[part] for part in sorted(parts)}


def _train_unigram(words: Mapping[str, int], size: int) -> models.Model:
    """Returns the Unigram model of counted words, or of the most frequent ones, with a sample of those as rare."""
    sample = list(words)
    random.Random(0).shuffle(sample)
    sample.sort(key=words.__getitem__, reverse=True)
    ends = itertools.accumulate(len(word.encode()) for word in sample)
    sample = sorted(word for word, end in zip(sample, ends, strict=True) if end <= _SAMPLE_BYTES)
    if len(sample) < len(words):
        log.info("Training on a sample of %s of %s distinct words", f"{len(sample):,}", f"{len(words):,}")
    pad, unk, *control = SPECIAL_TOKENS
    if (needed := len(set().union(*sample)) + len(SPECIAL_TOKENS)) > size:
        raise InputError(f"size={size}: too small for the characters of this text; expected at least {needed}")
    file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{words[word]}" for word in sample), input_format="tsv", model_writer=file,
            model_type="unigram", vocab_size=size, hard_vocab_limit=False, character_coverage=1.0,
            normalization_rule_name="identity", pad_id=0, pad_piece=pad, unk_id=1, unk_piece=unk, bos_id=-1, eos_id=-1,
            control_symbols=control, add_dummy_prefix=False, num_threads=_THREADS, minloglevel=2,
            max_sentence_length=4 * _CHUNK_CHARACTERS,
        )  # fmt: skip
    except RuntimeError as error:
        raise InputError(f"size={size}: {error}") from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    pieces = [(processor.id_to_piece(index), processor.get_score(index)) for index in range(processor.get_piece_size())]
    return models.Unigram(pieces, unk_id=SPECIAL_TOKENS.index(unk), byte_fallback=False)


def count_words(documents: Iterable[str], fast: tokenizers.Tokenizer) -> dict[str, int]:
    """Counts words as a tokenizer splits them, also those that are too long for it and are [UNK].

    The library needs some fifty times the memory of each text. It gets chunks, which end at white space if possible.
    """
    counter = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    fast.train_from_iterator((chunk[0] for document in documents for chunk in _CHUNK.finditer(document)), counter)
    # The trainer exposes its counts only in its pickled state.
    counts = json.loads(counter.__getstate__())["WordPieceTrainer"]["bpe_trainer"]["words"]
    return {word: counts[word] for word in sorted(counts)}


def _alphabet(words: Mapping[str, int]) -> set[str]:
    """Returns the most frequent characters, with at least a share of `COVERAGE` of the text's characters."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    before = itertools.accumulate((counts[character] for character in ordered), initial=0)
    minimum = COVERAGE * counts.total()
    return {character for character, covered in zip(ordered, before, strict=False) if covered < minimum}


def _repeated(words: Mapping[str, int]) -> Iterator[str]:
    """Yields text in which each word occurs as often as counted, since the trainer accepts text but no counts."""
    for word, count in words.items():
        limit = max(1, _CHUNK_CHARACTERS // (len(word) + 1))
        for start in range(0, count, limit):
            yield f"{word} " * min(limit, count - start)
