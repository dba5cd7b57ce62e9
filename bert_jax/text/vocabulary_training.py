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
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from bert_jax.errors import InputError
from bert_jax.text import bert_rules
from bert_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_jax.text.vocabulary_options import VocabularyOptions
from bert_jax.text.wordpiece import CONTINUATION, MAX_WORD_CHARACTERS

log = logging.getLogger(__name__)

_CHUNK_CHARACTERS = 1 << 14
_MIN_PAIR_COUNT = 2
_THREADS = 16
_SAMPLE_BYTES = 128 << 20  # of distinct words that the trainer of Unigram gets; it takes some ten times as much memory
_TRAINER_MARK = "\u2585"  # the trainer of Unigram drops what contains it

_DROPPED = (
    r"[\u0000-\u0008\u000E-\u001F\u007F-\u0084\u0086-\u009F\uFFFD"
    r"\u00AD\u0600-\u0605\u061C\u06DD\u070F\u0890\u0891\u08E2\u180E\u200E\u200F\u202A-\u202E\u2060-\u2064\u2066-\u206F"
    r"\uFEFF\uFFF9-\uFFFB]"
)
_ACCENTS = r"[\u0300-\u036F\u1AB0-\u1AFF\u1DC0-\u1DFF\u20D0-\u20FF\uFE20-\uFE2F]"
_SPACES = r"[\s\u200B\u2581]+"
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
    fast.model = _train(count_words(_chunks(documents), fast), options)
    tokenizer = Tokenizer(json.loads(fast.to_str()))
    if tokenizer.vocab_size < options.size:
        log.warning("The text gives %d pieces, fewer than --size=%d", tokenizer.vocab_size, options.size)
    return tokenizer


def _steps_of_kind(options: VocabularyOptions) -> tokenizers.Tokenizer:
    """Returns a tokenizer without pieces that normalizes and splits text as that of the options does.

    WordPiece does as BERT does. The text of Unigram and BPE is normalized to NFKC without control characters, and split
    at spaces, which are a part of their pieces. That of byte-level BPE keeps every character.
    """
    lowercase, strip_accents = not options.cased, options.strip_accents
    fast = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 1}, unk_token="[UNK]"))
    if options.kind == "wordpiece":
        fast.normalizer = bert_rules.normalizer(lowercase, None if strip_accents == lowercase else strip_accents)
        fast.pre_tokenizer = bert_rules.pre_tokenizer()
        fast.decoder = decoders.WordPiece(prefix=CONTINUATION)
        return fast
    case: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lowercase else []
    if strip_accents:
        case += [normalizers.NFD(), *_drop(_ACCENTS), normalizers.NFC()]
    if options.kind == "byte_bpe":
        fast.normalizer = normalizers.Sequence(case)
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        fast.decoder = decoders.ByteLevel()
        return fast
    spaces = [normalizers.Replace(Regex(_SPACES), " "), normalizers.Replace(Regex(" $"), "")]
    fast.normalizer = normalizers.Sequence([*_drop(_DROPPED), normalizers.NFKC(), *case, *spaces])
    # A space mark is put before the text alone: after a special token in it, the text has its own spaces.
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    return fast


def follows_training(tokenizer: Tokenizer) -> bool:
    """Returns True for a tokenizer with the steps of Unigram or BPE here, and no tokens besides the pieces."""
    if tokenizer.kind not in ("unigram", "bpe") or len(tokenizer.content["added_tokens"]) > len(SPECIAL_TOKENS):
        return False
    rules = {"cased": not tokenizer.lowercase, "keep_accents": not tokenizer.strip_accents}
    expected = json.loads(_steps_of_kind(VocabularyOptions(kind=tokenizer.kind, **rules)).to_str())
    return all(tokenizer.content[part] == expected[part] for part in ("normalizer", "pre_tokenizer"))


def _drop(characters: str) -> list[normalizers.Normalizer]:
    """Returns steps that drop characters; those at the beginning become a space.

    `tokenizers` puts the space mark before a text only if the text's first character is still there.
    """
    return [normalizers.Replace(Regex(f"^{characters}+"), " "), normalizers.Replace(Regex(characters), "")]


def _train(words: Mapping[str, int], options: VocabularyOptions) -> models.Model:
    """Returns the model of counted words. Raises InputError for no words, or for too small a size."""
    is_wordpiece, is_unigram = options.kind == "wordpiece", options.kind == "unigram"
    if is_wordpiece:  # longer words are [UNK]
        words = {word: count for word, count in words.items() if len(word) <= MAX_WORD_CHARACTERS}
    if options.kind == "byte_bpe":
        alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    else:
        covered = _alphabet(words, options.coverage) | (set() if is_wordpiece else {_SPACE})
        covered -= {_TRAINER_MARK} if is_unigram else set()
        if is_wordpiece:  # a word with another character is [UNK]
            words = {word: count for word, count in words.items() if covered.issuperset(word)}
        else:
            words = _split_at_others(words, covered)
        alphabet = {character for word in words for character in word}
    if not any(word.strip(_WHITE_SPACE) for word in words):
        fix = ", or pass --kind unigram for text without spaces" if is_wordpiece else ""
        raise InputError(f"input: the corpus has no words to train on; check its files{fix}")
    continuations = sorted({c for word in words for c in word[1:]}) if is_wordpiece else []
    needed = len(SPECIAL_TOKENS) + len(alphabet) + len(continuations)
    if options.size < needed:
        raise InputError(f"size={options.size}: too small for the characters of this text; expected at least {needed}")
    if is_wordpiece:
        return _merge_wordpieces(words, sorted(alphabet), [CONTINUATION + c for c in continuations], options.size)
    if is_unigram:
        return _train_unigram(words, options.size)
    trainer = trainers.BpeTrainer(
        vocab_size=options.size, min_frequency=_MIN_PAIR_COUNT, show_progress=False,
        special_tokens=list(SPECIAL_TOKENS), initial_alphabet=sorted(alphabet),
    )  # fmt: skip
    model = models.BPE(unk_token=None if options.kind == "byte_bpe" else "[UNK]", fuse_unk=True)
    return _merge(words, model, trainer)


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
    if sum(len(word.encode()) for word in sample) > _SAMPLE_BYTES:
        random.Random(0).shuffle(sample)
        sample.sort(key=words.__getitem__, reverse=True)
        ends = itertools.accumulate(len(word.encode()) for word in sample)
        sample = [word for word, end in zip(sample, ends, strict=True) if end <= _SAMPLE_BYTES]
        log.info("Training on a sample of %s of %s distinct words", f"{len(sample):,}", f"{len(words):,}")
    pad, unk, *control = SPECIAL_TOKENS
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{words[word]}" for word in sample),
        input_format="tsv", model_writer=file, model_type="unigram", vocab_size=size, hard_vocab_limit=False,
        character_coverage=1.0, normalization_rule_name="identity", pad_id=0, pad_piece=pad, unk_id=1, unk_piece=unk,
        bos_id=-1, eos_id=-1, control_symbols=control, add_dummy_prefix=False, num_threads=_THREADS, minloglevel=2,
        max_sentence_length=16 * _CHUNK_CHARACTERS,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    pieces = [(processor.id_to_piece(index), processor.get_score(index)) for index in range(processor.get_piece_size())]
    return models.Unigram(pieces, unk_id=SPECIAL_TOKENS.index(unk), byte_fallback=False)


def _merge_wordpieces(
    words: Mapping[str, int], alphabet: list[str], continuations: list[str], size: int
) -> models.Model:
    """Returns the WordPiece model: special tokens, the alphabet, its continuations, merges from the most frequent."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=_MIN_PAIR_COUNT,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS, *continuations],  # Numbered in this order, before any word.
    )
    ids = json.loads(_merge(words, models.WordPiece(unk_token="[UNK]"), trainer).__getstate__())["vocab"]
    first = [*SPECIAL_TOKENS, *alphabet, *continuations]
    merged = [piece for piece in sorted(ids, key=ids.__getitem__) if piece not in {*first}]
    pieces = {piece: index for index, piece in enumerate([*first, *merged])}
    return models.WordPiece(
        pieces, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS,
        continuing_subword_prefix=CONTINUATION,
    )  # fmt: skip


def _merge(words: Mapping[str, int], model: models.Model, trainer: Any) -> models.Model:
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.train_from_iterator(_repeated(words), trainer)
    trained: models.Model = fast.model
    return trained


def count_words(documents: Iterable[str], splitting: tokenizers.Tokenizer) -> dict[str, int]:
    """Counts words as a tokenizer splits them, also those that are too long for it and are [UNK]."""
    fast = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    if splitting.normalizer is not None:
        fast.normalizer = splitting.normalizer
    fast.pre_tokenizer = splitting.pre_tokenizer
    counter = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    fast.train_from_iterator(documents, counter)
    # The trainer exposes its counts only in its pickled state.
    counts = json.loads(counter.__getstate__())["WordPieceTrainer"]["bpe_trainer"]["words"]
    return {word: counts[word] for word in sorted(counts)}


def _chunks(documents: Iterable[str]) -> Iterator[str]:
    """Yields text in chunks that end at white space, since the library needs some fifty times the memory of each.

    Where there is no white space, one ends anywhere: a word of that length is [UNK] in any case.
    """
    white_space = re.compile(r"\s")
    for document in documents:
        start = 0
        while len(document) - start > 4 * _CHUNK_CHARACTERS:
            found = white_space.search(document, start + _CHUNK_CHARACTERS, start + 4 * _CHUNK_CHARACTERS)
            end = found.start() if found else start + 4 * _CHUNK_CHARACTERS
            yield document[start:end]
            start = end
        yield document[start:]


def _alphabet(words: Mapping[str, int], coverage: float) -> set[str]:
    """Returns the most frequent characters, with at least a share of `coverage` of the text's characters."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    before = itertools.accumulate((counts[character] for character in ordered), initial=0)
    minimum = coverage * counts.total()
    return {character for character, covered in zip(ordered, before, strict=False) if covered < minimum}


def _repeated(words: Mapping[str, int]) -> Iterator[str]:
    """Yields text in which each word occurs as often as counted, since the trainer accepts text but no counts."""
    chunk: list[str] = []
    characters = 0
    for word, count in words.items():
        limit = max(1, _CHUNK_CHARACTERS // (len(word) + 1))
        while count:
            repeats = min(count, limit)
            chunk.append(" ".join([word] * repeats))
            characters += (len(word) + 1) * repeats
            count -= repeats
            if characters >= _CHUNK_CHARACTERS:
                yield " ".join(chunk)
                chunk, characters = [], 0
    yield " ".join(chunk)
