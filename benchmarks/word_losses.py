"""Losses of masked words in nats per word and per character, which vocabularies have in common.

The loss per token is not comparable between vocabularies: a word of one token is one hard prediction, and the same word
in three pieces is three, of which two see the other pieces. Here the same words of the same texts are masked for every
model, and the loss of a word is that of all its pieces, by the chain rule from left to right: its first piece is
predicted with all pieces masked, and each later one with those before it visible and those after it masked (as
PLL-word-l2r of Kauf and Ivanova 2023, arXiv:2305.10588). The sum is the loss of the word given the other words and the
number of its pieces, which the masks show: a hint that only words of several pieces have.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.model import abstract_parameters
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import open_checkpoint

SEQ_LEN = 32
WORDS = 18
"""Words of a text, separated by white space."""
MASK_RATE = 0.15
BATCH = 256
_MOST_PIECES = 10
_MASKED = 6  # maximum masked words in a text


@dataclass(frozen=True)
class Text:
    """A text, and the numbers of its masked words, counted as the tokenizer splits words."""

    text: str
    masked: tuple[int, ...]


@dataclass(frozen=True)
class WordLoss:
    """Mean losses of masked words, and the tokens that an average word has."""

    nats_per_word: float
    nats_per_character: float
    tokens_per_word: float
    words: int


def choose_texts(files: Sequence[str], tokenizers: Sequence[Tokenizer], count: int, seed: int = 0) -> list[Text]:
    """Returns up to `count` texts of the files, evenly spread, that all tokenizers encode whole and without [UNK]."""
    rng = np.random.default_rng(seed)
    texts = list(_windows(files))
    chosen = []
    for text in (texts[place] for place in np.linspace(0, len(texts) - 1, min(3 * count, len(texts))).astype(int)):
        encoded = [tokenizer.encode_batch([text])[0] for tokenizer in tokenizers]
        words = [group_words(ids, tokenizer) for ids, tokenizer in zip(encoded, tokenizers, strict=True)]
        fits = all(len(ids) <= SEQ_LEN - 2 for ids in encoded) and len({len(each) for each in words}) == 1
        known = all(tokenizer.unk_id not in ids for ids, tokenizer in zip(encoded, tokenizers, strict=True))
        short = all(len(word) <= _MOST_PIECES for each in words for word in each)
        if fits and known and short and len(chosen) < count:
            masked = np.flatnonzero(rng.random(len(words[0])) < MASK_RATE)[:_MASKED]
            if len(masked):
                chosen.append(Text(text, tuple(masked.tolist())))
    return chosen


def _windows(files: Iterable[str]) -> Iterator[str]:
    """Yields the texts of `WORDS` words in each line of the files."""
    reading = CorpusOptions()
    for piece in corpus.plan(list(files), reading):
        for document in corpus.read(piece, reading):
            for line in document.split("\n"):
                words = line.split()
                for start in range(0, len(words) - WORDS + 1, WORDS):
                    yield " ".join(words[start : start + WORDS])


def group_words(ids: Sequence[int], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the places in `ids` of each word's pieces."""
    words: list[list[int]] = []
    for place, token in enumerate(ids):
        if tokenizer.is_attached(token) and words:
            words[-1].append(place)
        else:
            words.append([place])
    return words


def word_loss(location: str, texts: Sequence[Text], tokenizer: Tokenizer | None = None) -> WordLoss:
    """Returns the losses of a checkpoint; `tokenizer` encodes the texts, by default with the checkpoint's own."""
    checkpoint = open_checkpoint(location)
    tokenizer = tokenizer or checkpoint.tokenizer
    graph, _, _ = abstract_parameters(checkpoint.bert_config, heads=checkpoint.heads)
    parameters = checkpoint.load_parameters()

    @jax.jit
    def losses(parameters: dict, batch: dict) -> jax.Array:
        logits, _ = nnx.merge(graph, parameters)(batch)
        found = -jax.nn.log_softmax(logits, axis=-1)
        return (jax.numpy.take_along_axis(found, batch["masked_ids"][..., None], axis=-1)[..., 0] * batch["used"]).sum()

    encoded = [tokenizer.encode_batch([text.text])[0] for text in texts]
    words = [group_words(ids, tokenizer) for ids in encoded]
    nats, characters, masked, tokens = 0.0, 0, 0, 0
    for start in range(0, len(texts), BATCH):
        part = slice(start, start + BATCH)
        for number in range(_MOST_PIECES):
            batch = _mask(encoded[part], words[part], texts[part], tokenizer, number)
            if batch["used"].any():
                nats += float(losses(parameters, batch))
    for text, ids, places in zip(texts, encoded, words, strict=True):
        tokens += len(ids)
        masked += len(text.masked)
        pieces = [tokenizer.vocab[ids[place]] for word in text.masked for place in places[word]]
        characters += sum(len(piece.removeprefix("##")) for piece in pieces)
    return WordLoss(nats / masked, nats / characters, tokens / sum(map(len, words)), masked)


def _mask(
    encoded: Sequence[list[int]], words: Sequence[list[list[int]]], texts: Sequence[Text],
    tokenizer: Tokenizer, number: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Returns a batch that predicts piece `number` of each masked word: it and the pieces after it are masked."""
    shape = (BATCH, SEQ_LEN)
    batch = {
        "input_ids": np.full(shape, tokenizer.pad_id, np.int32), "token_type_ids": np.zeros(shape, np.int32),
        "positions": np.tile(np.arange(SEQ_LEN, dtype=np.int32), (BATCH, 1)),
        "sequence_ids": np.zeros(shape, np.int32), "cls_positions": np.zeros((BATCH, 1), np.int32),
        "masked_positions": np.zeros((BATCH, _MASKED), np.int32), "masked_ids": np.zeros((BATCH, _MASKED), np.int32),
        "used": np.zeros((BATCH, _MASKED), np.float32),
    }  # fmt: skip
    for row, (ids, places, text) in enumerate(zip(encoded, words, texts, strict=True)):
        tokens = [tokenizer.cls_id, *ids, tokenizer.sep_id]
        batch["sequence_ids"][row, : len(tokens)] = 1
        for slot, word in enumerate(text.masked):
            pieces = places[word]
            for place in pieces[number:]:
                tokens[place + 1] = tokenizer.mask_id
            if number < len(pieces):
                batch["masked_positions"][row, slot] = pieces[number] + 1
                batch["masked_ids"][row, slot] = ids[pieces[number]]
                batch["used"][row, slot] = 1
        batch["input_ids"][row, : len(tokens)] = tokens
    return batch
