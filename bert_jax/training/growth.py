"""Growth of a checkpoint's parameters: rows of new words, and of positions beyond the longest of the checkpoint.

A new word's row of the word embeddings is the mean of the rows of its old pieces, and its bias of the masked-LM head is
the mean of theirs. The embeddings are tied to the output, so that its logit is then, at every position, the mean of the
logits of its pieces: its unnormalized probability is their geometric mean, at most their arithmetic mean, and a new
word cannot take more probability than its pieces have. Random rows can take nearly all of it (Hewitt 2021,
"Initializing New Word Embeddings for Pretrained Language Models").

New positions repeat the old ones, from the first: position P + i has the row of position i, as in Longformer (Beltagy
et al. 2020, arXiv:2004.05150, section 5). Attention to neighbours, which heads have learned from the differences of
rows, then works at once everywhere except next to multiples of P.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.model import BertConfig
from bert_jax.model.bert import Parameters
from bert_jax.text.vocabulary_extension import Extension

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Growth:
    """Difference of a run's model to the checkpoint that it is initialized from.

    Attributes:
      old: the sizes of the checkpoint.
      new: the sizes of the run, with at least as many pieces and positions.
      words: the new words of the run's vocabulary.
    """

    old: BertConfig
    new: BertConfig
    words: Extension

    def log(self) -> None:
        """Logs the rows that the run adds, and their initial values."""
        if self.words.ids:
            log.info(
                "Vocabulary: %s new words, %s pieces instead of %s; their embeddings and biases start as the means of "
                "those of their old pieces",
                f"{len(self.words.ids):,}", f"{self.new.vocab_size:,}", f"{self.old.vocab_size:,}",
            )  # fmt: skip
        before, after = self.old.max_position_embeddings, self.new.max_position_embeddings
        if after > before:
            log.info(
                "Positions: %d instead of %d; the embeddings of positions %d to %d start as copies of those from 0",
                after, before, before, after - 1,
            )  # fmt: skip

    def grow(self, parameters: Parameters, shardings: Parameters) -> Parameters:
        """Returns `parameters` with the tables of the new sizes, sharded as `shardings`; other arrays are unchanged."""
        result = {part: dict(value) for part, value in parameters.items()}
        for (part, name), grow in self.programs(shardings).items():
            result[part][name] = grow(result[part][name])
        return result

    def programs(self, shardings: Parameters) -> dict[tuple[str, str], Any]:
        """Returns the jitted functions of the tables that grow, by part of the model and name."""
        return {
            (part, name): jax.jit(grow, out_shardings=shardings[part][name])
            for part, name, grow in self._tables()
            if part in shardings
        }

    def loading_shardings(self, shardings: Parameters) -> Parameters:
        """Returns the shardings in which the old tables are loaded, before they grow.

        An old table need not be divisible by a mesh axis that divides the new one, so its rows are replicated.
        """
        result = {part: dict(value) for part, value in shardings.items()}
        for part, name, _ in self._tables():
            if part in result:
                sharding: NamedSharding = result[part][name]
                result[part][name] = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
        return result

    def _tables(self) -> list[tuple[str, str, Callable[[jax.Array], jax.Array]]]:
        """Returns the part, the name and the function of each table that grows."""
        tables: list[tuple[str, str, Callable[[jax.Array], jax.Array]]] = []
        if self.words.ids:
            tables = [("embeddings", "word", self._grow_words), ("mlm_head", "output_bias", self._grow_words)]
        if self.new.max_position_embeddings > self.old.max_position_embeddings:
            tables.append(("embeddings", "position", self._grow_positions))
        return tables

    def _grow_words(self, table: jax.Array) -> jax.Array:
        """Maps the rows [V, ...] of the old pieces, with V padded, to those of the new vocabulary."""
        places, weights = _piece_weights(self.words)
        kept = table[: self.old.vocab_size]
        shape = (-1,) + (1,) * (table.ndim - 1)
        means = sum(
            (weight.reshape(shape) * table[place] for place, weight in zip(places, weights, strict=True)),
            start=jnp.zeros((len(self.words.ids), *table.shape[1:]), table.dtype),
        )
        grown: Any = jnp.zeros((self.new.padded_vocab_size, *table.shape[1:]), table.dtype)
        result: jax.Array = grown.at[: self.old.vocab_size].set(kept).at[np.array(self.words.ids)].set(means)
        return result

    def _grow_positions(self, table: jax.Array) -> jax.Array:
        """Maps the rows [P, D] of the old positions to more, which repeat them."""
        return table[jnp.arange(self.new.max_position_embeddings) % self.old.max_position_embeddings]


def _piece_weights(words: Extension) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pieces of N words, and their weights in the mean: int32 and float32 [most pieces, N].

    Places after a word's last piece have piece 0 and weight 0.
    """
    most = max(map(len, words.pieces))
    places = np.zeros((most, len(words.ids)), np.int32)
    weights = np.zeros(places.shape, np.float32)
    for word, pieces in enumerate(words.pieces):
        places[: len(pieces), word] = pieces
        weights[: len(pieces), word] = 1 / len(pieces)
    return places, weights
