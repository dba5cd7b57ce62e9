"""Hidden states of texts, and one vector per text, from the encoder of any checkpoint."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.forward import LoadedModel
from bert_jax.model import BertConfig
from bert_jax.text.sequences import EncodedSequence, encode_pairs
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.evaluation import check_batch_size

POOLS = ("mean", "cls")
"""Poolings of hidden states to one vector: see `pool_hidden_states`."""


@dataclass(frozen=True)
class Encoded:
    """Hidden states of N texts, padded to the L tokens of the longest.

    Attributes:
      hidden_states: fp32 [N, L, D], of the last layer; zeros at padding.
      mask: bool [N, L], False at padding. Special tokens are True.
      input_ids: int32 [N, L].
    """

    hidden_states: np.ndarray
    mask: np.ndarray
    input_ids: np.ndarray


def check_pool(name: str, pool: str, config: BertConfig) -> None:
    """Raises InputError, with the `name` of the argument, for an unknown pooling or one that the model lacks."""
    if pool not in POOLS:
        raise InputError(f"{name}={pool}: expected {' or '.join(POOLS)}")
    if pool == "cls" and config.is_decoder:
        raise InputError(f"{name}=cls: the [CLS] of a left-to-right model attends to itself alone; use {name}=mean")


def pool_hidden_states(hidden: jax.Array, batch: Batch[jax.Array], pool: str) -> jax.Array:
    """Reduces hidden states [B, L, ...] to fp32 [B, ...].

    "mean" averages over all tokens but padding, [CLS] and [SEP] included, as sentence-transformers does with the
    attention mask. "cls" takes the first token.
    """
    if pool == "cls":
        return hidden[:, 0].astype(jnp.float32)
    mask = (batch["sequence_ids"] > 0).astype(jnp.float32)
    mask = mask.reshape(*mask.shape, *[1] * (hidden.ndim - 2))
    return (hidden.astype(jnp.float32) * mask).sum(axis=1) / mask.sum(axis=1)


class TextEncoder:
    """The encoder of a loaded model, run on texts in batches.

    It compiles one program per padded length and size of batches. A text that is longer than the model supports is
    truncated, a pair at the end of its longer text.
    """

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, config: BertConfig):
        """Wraps a model whose `encode(batch)` returns the hidden states of the last layer first."""
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._models: dict[tuple[str, int], LoadedModel] = {}  # by pooling and size of batches

    def encode(self, texts: Sequence[str], pairs: Sequence[str | None], batch_size: int) -> Encoded:
        """Returns the hidden states of texts, each alone or with its pair. InputError for a model without segments."""
        sequences = self._sequences(texts, pairs)
        states = self._outputs("", sequences, batch_size)
        longest = max(len(sequence.input_ids) for sequence in sequences)
        hidden = np.zeros((len(sequences), longest, self._config.hidden_size), np.float32)
        input_ids = np.full((len(sequences), longest), self._tokenizer.pad_id, np.int32)
        mask = np.zeros((len(sequences), longest), bool)
        for row, (sequence, values) in enumerate(zip(sequences, states, strict=True)):
            length = len(sequence.input_ids)
            hidden[row, :length], input_ids[row, :length], mask[row, :length] = values, sequence.input_ids, True
        return Encoded(hidden, mask, input_ids)

    def embed(self, texts: Sequence[str], pairs: Sequence[str | None], pool: str, batch_size: int) -> np.ndarray:
        """Returns one vector per text, fp32 [N, D]. InputError as `encode`, and as `check_pool`."""
        check_pool("pool", pool, self._config)
        return np.stack(self._outputs(pool, self._sequences(texts, pairs), batch_size))

    def _sequences(self, texts: Sequence[str], pairs: Sequence[str | None]) -> list[EncodedSequence]:
        check_segments(self._config, pairs)
        both = list(zip(texts, pairs, strict=True))
        return encode_pairs(self._tokenizer, both, self._config.max_position_embeddings)

    def _outputs(self, pool: str, sequences: Sequence[EncodedSequence], batch_size: int) -> list[np.ndarray]:
        check_batch_size(batch_size)
        if (pool, batch_size) not in self._models:
            self._models[pool, batch_size] = self._model.with_forward(text_states(pool), batch_size)
        return self._models[pool, batch_size].outputs(EncodedExamples(sequences, None))


def check_segments(config: BertConfig, pairs: Sequence[Any]) -> None:
    """Raises InputError for a pair that the model has no second segment for."""
    if config.type_vocab_size < 2 and any(pair is not None for pair in pairs):
        raise InputError("pair: the model has no second segment (type_vocab_size=1); give single texts")


@functools.cache
def text_states(pool: str) -> Callable[[Any, Batch[jax.Array]], jax.Array]:
    """Makes the forward pass that returns the hidden states of texts, or one vector of each by `pool`."""

    def encode_texts(model: Any, batch: Batch[jax.Array]) -> jax.Array:
        hidden, _ = model.encode(batch)
        return pool_hidden_states(hidden, batch, pool) if pool else hidden

    return encode_texts
