"""BERT on one page: embeddings, encoder, pooler, masked-LM and next-sentence heads (Devlin et al. 2019, section 3)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.batch import Batch
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.dropout import dropout, row_keys, split_keys
from bert_jax.model.encoder import Encoder, GatherLayer
from bert_jax.model.layers import Key, LayerNorm, activation, bias, parameter, truncated_normal
from bert_jax.model.workarounds import add_bias, vocabulary_product

Parameters = dict[str, Any]
"""A nested dict of arrays: the model's parameters by attribute name."""

HEADS = ("pooler", "mlm_head", "nsp_head")
"""The optional parts of a BERT; `nsp_head` reads the output of `pooler`."""


class Embeddings(nnx.Module):
    """The sum of three embeddings. The word table is [V, D] with V padded; the rows beyond `vocab_size` are zero."""

    def __init__(self, config: BertConfig, *, key: Key):
        words, positions, types = jax.random.split(key, 3)
        size, std = config.hidden_size, config.initializer_range
        table = truncated_normal(words, (config.vocab_size, size), std)
        padding = config.padded_vocab_size - config.vocab_size
        self.word = parameter(jnp.pad(table, ((0, padding), (0, 0))), "vocab", "embed")
        self.position = parameter(
            truncated_normal(positions, (config.max_position_embeddings, size), std), None, "embed"
        )
        self.token_type = parameter(truncated_normal(types, (config.type_vocab_size, size), std), None, "embed")
        self.norm = LayerNorm(size, config.layer_norm_eps)
        self.dropout_rate = config.hidden_dropout_prob

    @jax.named_scope("embeddings")
    def __call__(
        self, input_ids: jax.Array, token_type_ids: jax.Array, positions: jax.Array, *, dtype: jnp.dtype,
        key: Key | None,
    ) -> jax.Array:  # fmt: skip
        """Maps three int32 [B, L] to [B, L, D] of `dtype`."""
        # A gather, not a one-hot product: its gradient is a scatter-add, 15 times cheaper on a CPU.
        x = self.word[...][input_ids] + self.position[...][positions] + self.token_type[...][token_type_ids]
        return dropout(self.norm(x).astype(dtype), self.dropout_rate, key)


class Pooler(nnx.Module):
    """Pooler: tanh(dense([CLS]))."""

    def __init__(self, config: BertConfig, *, key: Key):
        size = config.hidden_size
        self.kernel = parameter(truncated_normal(key, (size, size), config.initializer_range), "embed", "pooled")
        self.bias = bias((size,), "pooled")

    @jax.named_scope("pooler")
    def __call__(self, x: jax.Array, cls_positions: jax.Array) -> jax.Array:
        """Maps x [B, L, D] at cls_positions [B, K] to [B, K, D]."""
        cls = jnp.take_along_axis(x, cls_positions[:, :, None], axis=1)
        return jnp.tanh(
            jnp.einsum("bkd,de->bke", cls, self.kernel[...].astype(x.dtype)) + self.bias[...].astype(x.dtype)
        )


@dataclass(frozen=True)
class VocabularyProjection:
    """The last product of the masked-LM head, which a loss may compute in chunks of predictions.

    Attributes:
      hidden: the predictions before the product, [..., D].
      word_embeddings: fp32 [V, D], with V padded.
      bias: fp32 [V].
      vocab_size: size of the vocabulary without padding.
    """

    hidden: jax.Array
    word_embeddings: jax.Array
    bias: jax.Array
    vocab_size: int

    @jax.named_scope("mlm_head")
    def logits(self) -> jax.Array:
        """Computes fp32 logits [..., V]; those of padding are -inf."""
        x = self.hidden.reshape(-1, self.hidden.shape[-1])
        logits = vocabulary_product(x, self.word_embeddings)
        is_word = jnp.arange(logits.shape[-1]) < self.vocab_size
        logits = jnp.where(is_word, add_bias(logits, self.bias), -jnp.inf)
        return logits.reshape(*self.hidden.shape[:-1], -1)


class MaskedLanguageModelHead(nnx.Module):
    """Masked-LM head at masked positions: dense(D), activation, LayerNorm, transposed word embeddings, bias."""

    def __init__(self, config: BertConfig, *, key: Key):
        size = config.hidden_size
        self.kernel = parameter(truncated_normal(key, (size, size), config.initializer_range), "embed", "pooled")
        self.bias = bias((size,), "pooled")
        self.norm = LayerNorm(size, config.layer_norm_eps)
        self.output_bias = bias((config.padded_vocab_size,), "vocab")
        self.hidden_act = config.hidden_act
        self.vocab_size = config.vocab_size

    @jax.named_scope("mlm_head")
    def __call__(
        self, x: jax.Array, masked_positions: jax.Array, word_embeddings: jax.Array
    ) -> VocabularyProjection:  # fmt: skip
        """Maps x [B, L, D] at masked_positions [B, P] to a projection whose `logits` are fp32 [B, P, V]."""
        dtype = x.dtype
        x = jnp.take_along_axis(x, masked_positions[:, :, None], axis=1)
        x = x.reshape(-1, x.shape[-1])  # all predictions on one axis, for the reason given in `weight_einsum`
        x = jnp.einsum("nd,de->ne", x, self.kernel[...].astype(dtype)) + self.bias[...].astype(dtype)
        x = self.norm(activation(self.hidden_act, x)).reshape(*masked_positions.shape, -1)
        return VocabularyProjection(x, word_embeddings, self.output_bias[...], self.vocab_size)


class NextSentenceHead(nnx.Module):
    """Next-sentence head: dense(2) on the pooled vector; class 0 is the next sentence, 1 a random one."""

    def __init__(self, config: BertConfig, *, key: Key):
        self.kernel = parameter(truncated_normal(key, (config.hidden_size, 2), config.initializer_range), "embed", None)
        self.bias = bias((2,), None)

    @jax.named_scope("nsp_head")
    def __call__(self, pooled: jax.Array) -> jax.Array:
        """Maps [B, K, D] to fp32 logits [B, K, 2]."""
        kernel = self.kernel[...].astype(pooled.dtype)
        return jnp.einsum("bkd,dc->bkc", pooled, kernel, preferred_element_type=jnp.float32) + self.bias[...]


class BertForPreTraining(nnx.Module):
    """BERT: encoder, pooler, masked-LM head (output matrix tied to the word embeddings) and next-sentence head.

    A head that is not in `heads` is None.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        key: Key,
        dtype: jnp.dtype = jnp.float32,
        attention: str = "xla",
        remat: str = "none",
        scan_layers: bool = True,
        heads: Collection[str] = HEADS,
    ):
        """Initializes fp32 parameters; `dtype` is the type of the computation. For the rest see `Encoder`."""
        embeddings, encoder, pooler, mlm, nsp = jax.random.split(key, 5)
        self.embeddings = Embeddings(config, key=embeddings)
        self.encoder = Encoder(config, key=encoder, attention=attention, remat=remat, scan_layers=scan_layers)
        self.pooler = Pooler(config, key=pooler) if "pooler" in heads else None
        self.mlm_head = MaskedLanguageModelHead(config, key=mlm) if "mlm_head" in heads else None
        self.nsp_head = NextSentenceHead(config, key=nsp) if "nsp_head" in heads else None
        self.config = config
        self.dtype = dtype

    def encode(
        self, batch: Batch[jax.Array], key: Key | None = None, *, all_hidden_states: bool = False,
        gather_layer: GatherLayer | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
        """Encodes `input_ids, token_type_ids, positions, sequence_ids`, int32 [B, L], to [B, L, D].

        A key, or one key per row [B], turns dropout on. With `all_hidden_states` it also returns every hidden state
        [layers + 1, B, L, D], the embeddings first. For `gather_layer` see `Encoder`.
        """
        if key is not None and not key.ndim:
            key = row_keys(key, jnp.arange(batch["input_ids"].shape[0]))
        embeddings_key, encoder_key = split_keys(key, 2)
        x = self.embeddings(
            batch["input_ids"], batch["token_type_ids"], batch["positions"], dtype=self.dtype, key=embeddings_key
        )
        last, hidden = self.encoder(
            x, batch["sequence_ids"], encoder_key, all_hidden_states=all_hidden_states, gather_layer=gather_layer
        )
        return last, None if hidden is None else jnp.concatenate([x[None], hidden])

    def __call__(
        self, batch: Batch[jax.Array], key: Key | None = None, *, gather_layer: GatherLayer | None = None,
        mlm_output: Callable[[VocabularyProjection], Any] = VocabularyProjection.logits,
    ) -> tuple[Any, jax.Array | None]:  # fmt: skip
        """Returns fp32 logits of both heads: masked-LM [B, P, V] at `masked_positions`, next-sentence [B, K, 2].

        A missing head returns None. `mlm_output` maps the masked-LM head's projection [B, P, D] to the first result,
        for a loss that needs no logits of all predictions at once. For the other arguments see `encode`.
        """
        x, _ = self.encode(batch, key, gather_layer=gather_layer)
        mlm = nsp_logits = None
        if self.mlm_head is not None:
            mlm = mlm_output(self.mlm_head(x, batch["masked_positions"], self.embeddings.word[...]))
        if self.pooler is not None and self.nsp_head is not None:
            nsp_logits = self.nsp_head(self.pooler(x, batch["cls_positions"]))
        return mlm, nsp_logits
