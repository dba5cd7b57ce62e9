"""BERT on one page: encoder, embeddings, pooler, masked-LM and next-sentence heads (Devlin et al. 2019, section 3).

The encoder has layers of attention and feed-forward, post-LN or pre-LN, their parameters stacked and scanned over.
Switches of `BertConfig` make it a ModernBERT (Warner et al. 2024, arXiv:2412.13663).
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.batch import Batch
from bert_jax.model.attention import SelfAttention, Visibility
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import (
    FeedForward,
    Key,
    LayerNorm,
    activation,
    bias,
    dropout,
    keys_per_row,
    parameter,
    parameter_info,
    split_keys,
    truncated_normal,
)
from bert_jax.model.workarounds import add_bias

# Intermediates that the backward pass reads, by their `checkpoint_name`.
_READ = (
    "qkv", "attention_context", "fused_attention", "dropout_mask", "norm_input", "norm_scale", "norm_output",
    "feed_forward",
)  # fmt: skip
_READ_BY_ATTENTION = ("attention_probabilities", "attention_dropout_mask")  # of L x L

REMAT_POLICIES = {
    # Save the intermediates that the backward pass reads. All others are elementwise work on these, or weights that
    # FSDP gathers, which would be the whole model if they were saved for every layer.
    "none": jax.checkpoint_policies.save_only_these_names(*_READ, *_READ_BY_ATTENTION),
    # Recompute attention's L x L arrays as well (Korthikanti et al. 2022, arXiv:2205.05198).
    "attention": jax.checkpoint_policies.save_only_these_names(*_READ),
    "dots": jax.checkpoint_policies.save_only_these_names("weight_product"),  # the results of `weight_einsum`
    "full": jax.checkpoint_policies.nothing_saveable,  # save only the input of each layer
}
"""What a layer saves for the backward pass, which recomputes the rest."""


LAYER_KEYS = 3
"""Number of dropout keys of a layer."""

GatherLayer = Callable[[dict[str, Any]], dict[str, Any]]
"""All-gathers the parameters of one layer, a nested dict, as FSDP does."""


Carry = tuple[jax.Array, jax.Array | None]
"""The input of a layer, and the residual of pre-LN layers; each is [B, L, D]."""


class Layer(nnx.Module):
    """One Transformer layer. With `stack` it holds the stacked parameters of many layers; it runs on one slice."""

    def __init__(self, config: BertConfig, *, key: Key, stack: tuple[int, ...], attention: str = "xla"):
        attention_key, feed_forward = jax.random.split(key)
        self.attention = SelfAttention(config, key=attention_key, stack=stack, attention=attention)
        norm = functools.partial(
            LayerNorm, config.hidden_size, config.layer_norm_eps, use_bias=config.norm_bias, stack=stack
        )
        self.attention_norm = norm()
        self.feed_forward = FeedForward(config, key=feed_forward, stack=stack)
        self.feed_forward_norm = norm()
        self.pre_norm = config.pre_norm
        self.dropout_rate = config.hidden_dropout_prob
        self.attention_dropout_rate = config.dropout_rate(config.attention_output_dropout)

    def __call__(
        self, x: jax.Array, residual: jax.Array | None, visibility: Visibility, keys: Key | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Maps x [B, L, D], the result of `SelfAttention.visibility` and keys [`LAYER_KEYS`, B] to [B, L, D].

        Both norms come after a sublayer. Post-LN layers add the next sublayer's output to the normalized x. Pre-LN
        layers add it to the `residual`, [B, L, D], which they return as well; x is the input of the next sublayer. So
        the last norm of a layer is that before the next layer's attention, or the encoder's final one, and nothing
        comes between the embeddings' norm and the first attention.
        """
        attention_key, after_attention, after_feed_forward = (None,) * LAYER_KEYS if keys is None else keys
        y = dropout(self.attention(x, visibility, attention_key), self.attention_dropout_rate, after_attention)
        residual = checkpoint_name((x if residual is None else residual) + y, "norm_input")
        x = checkpoint_name(self.attention_norm(residual), "norm_output")
        y = dropout(self.feed_forward(x, after_feed_forward), self.dropout_rate, after_feed_forward)
        residual = checkpoint_name((residual if self.pre_norm else x) + y, "norm_input")
        return self.feed_forward_norm(residual), residual if self.pre_norm else None


class Encoder(nnx.Module):
    """`num_hidden_layers` layers, each parameter stacked over them on axis 0."""

    def __init__(
        self, config: BertConfig, *, key: Key, attention: str = "xla", remat: str = "none", scan_layers: bool = True
    ):
        """`attention` is one of `ATTENTIONS`, `remat` of `REMAT_POLICIES`; `scan_layers` scans or unrolls layers."""
        self.layers = Layer(config, key=key, stack=(config.num_hidden_layers,), attention=attention)
        self.num_layers = config.num_hidden_layers
        self.period = config.global_attn_every_n_layers
        self.remat = remat
        self.scan_layers = scan_layers

    @jax.named_scope("encoder")
    def __call__(
        self, x: jax.Array, sequence_ids: jax.Array, positions: jax.Array, key: Key | None, *,
        all_hidden_states: bool = False, gather_layer: GatherLayer | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
        """Maps x [B, L, D], sequence_ids and positions [B, L] to the last layer's output [B, L, D].

        With `all_hidden_states` it also returns the outputs of all layers [layers, B, L, D]: of pre-LN layers the
        residual, and of the last one what the final norm makes of it. `gather_layer` is applied to a layer's parameters
        before they are used, in the forward pass and again in the backward pass.
        """
        # Once for all layers: of a global one, and of the local ones between two of them.
        visibilities = [
            self.layers.attention.visibility(sequence_ids, positions, is_local=bool(place))
            for place in range(min(self.period, 2))
        ]
        graph, state = nnx.split(self.layers)
        stacked = nnx.to_pure_dict(state)
        # Keys are scan inputs: a stateful generator would give every layer the same dropout mask.
        split: Callable[[Key], Key] = jax.vmap(
            lambda key: jax.random.split(key, (self.num_layers, LAYER_KEYS)), out_axes=2
        )
        keys = None if key is None else split(key)  # [layers, LAYER_KEYS, B]

        def run_layer(visibility: Visibility, carry: Carry, parameters_and_keys: tuple[Any, ...]) -> Any:
            parameters, layer_keys = parameters_and_keys
            if gather_layer is not None:
                parameters = gather_layer(parameters)
            x, residual = nnx.merge(graph, parameters)(*carry, visibility, layer_keys)
            return (x, residual), (x if residual is None else residual) if all_hidden_states else None

        run: list[Any] = [functools.partial(run_layer, visibility) for visibility in visibilities]
        if self.remat != "none" or gather_layer is not None:
            # A scan over single layers keeps XLA from merging the recomputation with the forward pass (prevent_cse).
            options = {"policy": REMAT_POLICIES[self.remat], "prevent_cse": not self.scan_layers or self.period > 1}
            run = [jax.checkpoint(run_one, **options) for run_one in run]
        carry, layers = (x, x if self.layers.pre_norm else None), (stacked, keys)
        period, alone = self.period, self.num_layers % self.period
        unroll = 1 if self.scan_layers else max(self.num_layers // period, 1)

        def run_some(first: int, count: int, carry: Carry, layers: Any) -> tuple[Carry, jax.Array | None]:
            """Runs `count` layers, of which the first is the encoder's layer `first`, or of the same kind."""
            outputs: list[Any] = []
            for place in range(count):
                layer = jax.tree.map(lambda leaf, place=place: leaf[place], layers)
                carry, output = run[(first + place) % period > 0](carry, layer)
                outputs.append(output)
            return carry, jnp.stack(outputs) if all_hidden_states and outputs else None

        if period == 1:
            carry, hidden = jax.lax.scan(run[0], carry, layers, unroll=unroll)
        else:  # local layers have other programs than global ones: scan over periods, after what is left of one
            carry, before = run_some(0, alone, carry, layers)
            periods = jax.tree.map(lambda leaf: leaf[alone:].reshape(-1, period, *leaf.shape[1:]), layers)
            carry, hidden = jax.lax.scan(functools.partial(run_some, alone, period), carry, periods, unroll=unroll)
            if hidden is not None:
                hidden = hidden.reshape(-1, *x.shape)
                hidden = hidden if before is None else jnp.concatenate([before, hidden])
        last = carry[0]
        return last, hidden.at[-1].set(last) if self.layers.pre_norm and hidden is not None else hidden


Parameters = dict[str, Any]
"""A nested dict of arrays: the model's parameters by attribute name."""

HEADS = ("pooler", "mlm_head", "nsp_head")
"""The optional parts of a BERT; `nsp_head` reads the output of `pooler`."""


def heads_of(config: BertConfig) -> tuple[str, ...]:
    """Returns the heads that a model has in pre-training."""
    return HEADS if config.pooler else ("mlm_head",)


class Embeddings(nnx.Module):
    """The sum of up to three embeddings. The word table is [V, D], V padded; the rows beyond `vocab_size` are zero."""

    def __init__(self, config: BertConfig, *, key: Key):
        words, positions, types = jax.random.split(key, 3)
        size, std = config.hidden_size, config.initializer_range
        table = truncated_normal(words, (config.vocab_size, size), std)
        padding = config.padded_vocab_size - config.vocab_size
        self.word = parameter(jnp.pad(table, ((0, padding), (0, 0))), "vocab", "embed")

        def small_table(key: Key, rows: int) -> nnx.Param[jax.Array] | None:
            return parameter(truncated_normal(key, (rows, size), std), None, "embed") if rows else None

        learned = config.position_embedding_type == "absolute"
        self.position = small_table(positions, config.max_position_embeddings if learned else 0)
        self.token_type = small_table(types, config.type_vocab_size)
        self.norm = LayerNorm(size, config.layer_norm_eps, use_bias=config.norm_bias)
        self.dropout_rate = config.dropout_rate(config.embedding_dropout)

    @jax.named_scope("embeddings")
    def __call__(self, batch: Batch[jax.Array], keys: Key | None, *, dtype: jnp.dtype) -> jax.Array:
        """Maps `input_ids, token_type_ids, positions`, int32 [B, L], to [B, L, D] of `dtype`."""
        # A gather, not a one-hot product: its gradient is a scatter-add, 15 times cheaper on a CPU.
        x = self.word[...][batch["input_ids"]]
        if self.position is not None:
            x += self.position[...][batch["positions"]]
        if self.token_type is not None:
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
        return jnp.tanh(add_bias(jnp.einsum("bkd,de->bke", cls, self.kernel[...].astype(x.dtype)), self.bias[...]))


@dataclass(frozen=True)
class VocabularyProjection:
    """The last product of the masked-LM head, which a loss may compute in chunks of predictions.

    Attributes:
      hidden: the predictions before the product, [..., D].
      word_embeddings: fp32 [V, D], with V padded.
      bias: fp32 [V], or None.
      vocab_size: size of the vocabulary without padding.
    """

    hidden: jax.Array
    word_embeddings: jax.Array
    bias: jax.Array | None
    vocab_size: int

    @jax.named_scope("mlm_head")
    def logits(self) -> jax.Array:
        """Computes fp32 logits [..., V]; those of padding are -inf."""
        x = self.hidden.reshape(-1, self.hidden.shape[-1])
        words = self.word_embeddings.astype(x.dtype)
        logits = jnp.einsum("nd,vd->nv", x, words, preferred_element_type=jnp.float32)
        is_word = jnp.arange(logits.shape[-1]) < self.vocab_size
        logits = jnp.where(is_word, logits if self.bias is None else add_bias(logits, self.bias), -jnp.inf)
        return logits.reshape(*self.hidden.shape[:-1], -1)


class Transform(nnx.Module):
    """Layers before an output: dense(D), activation, LayerNorm. A ModernBERT has them in all of its heads."""

    def __init__(self, config: BertConfig, *, key: Key):
        size = config.hidden_size
        self.kernel = parameter(truncated_normal(key, (size, size), config.output_range), "embed", "pooled")
        self.bias = bias((size,), "pooled") if config.classifier_bias else None
        self.norm = LayerNorm(size, config.layer_norm_eps, use_bias=config.norm_bias)
        self.hidden_act = config.hidden_act

    def transform(self, x: jax.Array) -> jax.Array:
        """Maps [N, D] to [N, D]."""
        x = jnp.einsum("nd,de->ne", x, self.kernel[...].astype(x.dtype))
        x = x if self.bias is None else add_bias(x, self.bias[...])
        return self.norm(activation(self.hidden_act, x))


class MaskedLanguageModelHead(Transform):
    """Masked-LM head at masked positions: dense(D), activation, LayerNorm, transposed word embeddings, bias."""

    def __init__(self, config: BertConfig, *, key: Key):
        super().__init__(config, key=key)
        self.output_bias = bias((config.padded_vocab_size,), "vocab") if config.decoder_bias else None
        self.vocab_size = config.vocab_size

    @jax.named_scope("mlm_head")
    def __call__(self, x: jax.Array, masked_positions: jax.Array, word_embeddings: jax.Array) -> VocabularyProjection:
        """Maps x [B, L, D] at masked_positions [B, P] to a projection whose `logits` are fp32 [B, P, V]."""
        x = jnp.take_along_axis(x, masked_positions[:, :, None], axis=1)
        x = x.reshape(-1, x.shape[-1])  # all predictions on one axis, for the reason given in `weight_einsum`
        x = self.transform(x).reshape(*masked_positions.shape, -1)
        output_bias = None if self.output_bias is None else self.output_bias[...]
        return VocabularyProjection(x, word_embeddings, output_bias, self.vocab_size)


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
            x, batch["sequence_ids"], batch["positions"], encoder_keys, all_hidden_states=all_hidden_states,
            gather_layer=gather_layer,
        )  # fmt: skip
        return last, None if hidden is None else jnp.concatenate([x[None], hidden])


class BertForPreTraining(Bert):
    """BERT: encoder, pooler, masked-LM head (output matrix tied to the word embeddings) and next-sentence head.

    A head that is not in `heads`, by default `heads_of` the config, is None.
    """

    def __init__(self, config: BertConfig, *, key: Key, heads: Collection[str] | None = None, **settings: Any):
        """Initializes fp32 parameters; for `settings` see `Bert`."""
        super().__init__(config, key=key, **settings)
        heads = heads_of(config) if heads is None else heads
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
    return padded - padding * (model_config.hidden_size + model_config.decoder_bias)
