"""BERT on one page: embeddings, encoder, pooler, masked-LM and next-sentence heads (Devlin et al. 2019, section 3)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.batch import Batch
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.dropout import dropout, keys_per_row, split_keys
from bert_jax.model.encoder import Encoder, GatherLayer
from bert_jax.model.layers import Key, LayerNorm, activation, bias, parameter, parameter_info, truncated_normal
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
    def __call__(self, batch: Batch[jax.Array], keys: Key | None, *, dtype: jnp.dtype) -> jax.Array:
        """Maps `input_ids, token_type_ids, positions`, int32 [B, L], to [B, L, D] of `dtype`."""
        # A gather, not a one-hot product: its gradient is a scatter-add, 15 times cheaper on a CPU.
        x = self.word[...][batch["input_ids"]] + self.position[...][batch["positions"]]
        x += self.token_type[...][batch["token_type_ids"]]
        return dropout(self.norm(x).astype(dtype), self.dropout_rate, keys)


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


class Output(nnx.Module):
    """Dense layer to fp32 logits, of next-sentence prediction (0: the next sentence, 1: a random one) or of a task."""

    def __init__(self, size: int, outputs: int, initializer_range: float, *, key: Key):
        self.kernel = parameter(truncated_normal(key, (size, outputs), initializer_range), "embed", None)
        self.bias = bias((outputs,), None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] to fp32 [..., outputs]."""
        kernel = self.kernel[...].astype(x.dtype)
        return jnp.einsum("...d,do->...o", x, kernel, preferred_element_type=jnp.float32) + self.bias[...]


class Bert(nnx.Module):
    """Embeddings and encoder, without outputs."""

    def __init__(
        self,
        config: BertConfig,
        *,
        key: Key,
        dtype: jnp.dtype = jnp.float32,
        attention: str = "xla",
        remat: str = "none",
        scan_layers: bool = True,
    ):
        """Initializes fp32 parameters; `dtype` is the type of the computation. For the rest see `Encoder`."""
        embeddings, encoder, *_ = jax.random.split(key, 5)  # a subclass takes the last three
        self.embeddings = Embeddings(config, key=embeddings)
        self.encoder = Encoder(config, key=encoder, attention=attention, remat=remat, scan_layers=scan_layers)
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
        embeddings_keys, encoder_keys = split_keys(keys_per_row(key, batch["input_ids"].shape[0]), 2)
        x = self.embeddings(batch, embeddings_keys, dtype=self.dtype)
        last, hidden = self.encoder(
            x, batch["sequence_ids"], encoder_keys, all_hidden_states=all_hidden_states, gather_layer=gather_layer
        )
        return last, None if hidden is None else jnp.concatenate([x[None], hidden])


class BertForPreTraining(Bert):
    """BERT: encoder, pooler, masked-LM head (output matrix tied to the word embeddings) and next-sentence head.

    A head that is not in `heads` is None.
    """

    def __init__(self, config: BertConfig, *, key: Key, heads: Collection[str] = HEADS, **settings: Any):
        """Initializes fp32 parameters; for `settings` see `Bert`."""
        super().__init__(config, key=key, **settings)
        _, _, pooler, mlm, nsp = jax.random.split(key, 5)
        self.pooler = Pooler(config, key=pooler) if "pooler" in heads else None
        self.mlm_head = MaskedLanguageModelHead(config, key=mlm) if "mlm_head" in heads else None
        size, std = config.hidden_size, config.initializer_range
        self.nsp_head = Output(size, 2, std, key=nsp) if "nsp_head" in heads else None

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
            pooled = self.pooler(x, batch["cls_positions"])
            with jax.named_scope("nsp_head"):
                nsp_logits = self.nsp_head(pooled)
        return mlm, nsp_logits


def initialize(
    model_config: BertConfig, key: Key, *, build: Callable[..., nnx.Module] = BertForPreTraining, **settings: Any
) -> tuple[nnx.GraphDef[Any], Parameters]:
    """Initializes a model and returns (graph, parameters); `settings` go to `build`, the model's class.

    `nnx.merge(graph, parameters)` returns the model. Works under `jax.jit` and `jax.eval_shape`.
    """
    graph, state = nnx.split(build(model_config, key=key, **settings))
    return graph, nnx.to_pure_dict(state)


def abstract_parameters(
    model_config: BertConfig, *, build: Callable[..., nnx.Module] = BertForPreTraining, **settings: Any
) -> tuple[nnx.GraphDef[Any], Parameters, Parameters]:
    """Returns (graph, shapes, info): two trees, of `jax.ShapeDtypeStruct`s and of `ParameterInfo`s.

    Takes the arguments of `initialize`, without the key.
    """
    model = nnx.eval_shape(lambda: build(model_config, key=jax.random.key(0), **settings))
    graph, state = nnx.split(model)
    return graph, nnx.to_pure_dict(state), parameter_info(model)


def parameter_count(model_config: BertConfig) -> int:
    """Counts the parameters of the model, heads included, vocabulary padding excluded."""
    _, shapes, _ = abstract_parameters(model_config)
    padded = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    padding = model_config.padded_vocab_size - model_config.vocab_size
    result: int = padded - padding * (model_config.hidden_size + 1)
    return result
