"""The encoder: post-LN Transformer layers, their parameters stacked on a leading axis and scanned over."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.attention import SelfAttention
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import (
    Key,
    LayerNorm,
    activation,
    bias,
    dense,
    parameter,
    rematerialized,
    truncated_normal,
)
from bert_jax.model.workarounds import weight_einsum

_NAMES = (
    "qkv", "attention_context", "fused_attention", "dropout_mask", "norm_input", "norm_scale", "norm_output",
    "feed_forward",
)  # fmt: skip
_NAMES_OF_LENGTH_BY_LENGTH = ("attention_probabilities", "attention_dropout_mask")

REMAT_POLICIES = {
    # Save the intermediates that the backward pass reads, by `checkpoint_name`. All others are elementwise work on
    # these, or weights that FSDP gathers, which would be the whole model if they were saved for every layer.
    "none": jax.checkpoint_policies.save_only_these_names(*_NAMES, *_NAMES_OF_LENGTH_BY_LENGTH),
    # Recompute attention's L x L arrays as well (Korthikanti et al. 2022, arXiv:2205.05198).
    "attention": jax.checkpoint_policies.save_only_these_names(*_NAMES),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # save products with weights
    "full": jax.checkpoint_policies.nothing_saveable,  # save only the input of each layer
}


class FeedForward(nnx.Module):
    """Feed-forward block: dense(F), activation, dense(D)."""

    def __init__(self, config: BertConfig, *, key: Key, stack: tuple[int, ...]):
        up, down = jax.random.split(key)
        size, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.up_kernel = parameter(
            truncated_normal(up, (*stack, size, inner), std), "layers", "embed", "mlp", compute_cast=True
        )
        self.up_bias = bias((*stack, inner), "layers", "mlp")
        self.down_kernel = parameter(
            truncated_normal(down, (*stack, inner, size), std), "layers", "mlp", "embed", compute_cast=True
        )
        self.down_bias = bias((*stack, size), "layers", "embed")
        self.hidden_act = config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, L, D] to [B, L, D]."""
        inner = checkpoint_name(dense("td,df->tf", x, self.up_kernel, self.up_bias), "feed_forward")

        @rematerialized
        def activate_and_project(inner: jax.Array, kernel: jax.Array) -> jax.Array:
            return weight_einsum("tf,fd->td", activation(self.hidden_act, inner), kernel)

        return activate_and_project(inner, self.down_kernel[...]) + self.down_bias[...].astype(x.dtype)


LAYER_KEYS = 3
"""Number of dropout keys of a layer."""

GatherLayer = Callable[[dict[str, Any]], dict[str, Any]]
"""All-gathers the parameters of one layer, a nested dict, as FSDP does."""


class Layer(nnx.Module):
    """One Transformer layer. With `stack` it holds the stacked parameters of many layers; it runs on one slice."""

    def __init__(
        self,
        config: BertConfig,
        *,
        key: Key,
        stack: tuple[int, ...],
        attention: str = "xla",
    ):
        attention_key, feed_forward = jax.random.split(key)
        self.attention = SelfAttention(config, key=attention_key, stack=stack, attention=attention)
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, stack=stack)
        self.feed_forward = FeedForward(config, key=feed_forward, stack=stack)
        self.feed_forward_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, stack=stack)
        self.dropout_rate = config.hidden_dropout_prob

    def __call__(self, x: jax.Array, visibility: jax.Array, keys: Key | None) -> jax.Array:
        """Maps x [B, L, D], the result of `SelfAttention.visibility` and keys [`LAYER_KEYS`, B] to [B, L, D]."""
        attention_key, after_attention, after_feed_forward = (None,) * LAYER_KEYS if keys is None else keys
        y = self.attention(x, visibility, attention_key)
        x = checkpoint_name(x + dropout(y, self.dropout_rate, after_attention), "norm_input")
        x = checkpoint_name(self.attention_norm(x), "norm_output")
        y = self.feed_forward(x)
        return self.feed_forward_norm(
            checkpoint_name(x + dropout(y, self.dropout_rate, after_feed_forward), "norm_input")
        )


class Encoder(nnx.Module):
    """`num_hidden_layers` layers, each parameter stacked over them on axis 0."""

    def __init__(
        self, config: BertConfig, *, key: Key, attention: str = "xla", remat: str = "none", scan_layers: bool = True
    ):
        """`attention` is one of `ATTENTIONS`, `remat` of `REMAT_POLICIES`; `scan_layers` scans or unrolls layers."""
        self.layers = Layer(config, key=key, stack=(config.num_hidden_layers,), attention=attention)
        self.num_layers = config.num_hidden_layers
        self.remat = remat
        self.scan_layers = scan_layers

    def __call__(
        self,
        x: jax.Array,
        sequence_ids: jax.Array,
        key: Key | None,
        *,
        all_hidden_states: bool = False,
        gather_layer: GatherLayer | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Maps x [B, L, D] and sequence_ids [B, L] to the last layer's output [B, L, D].

        With `all_hidden_states` it also returns the outputs of all layers [layers, B, L, D]. `gather_layer` is applied
        to a layer's parameters before they are used, in the forward pass and again in the backward pass.
        """
        visibility = self.layers.attention.visibility(sequence_ids)  # once, not in every layer
        graph, state = nnx.split(self.layers)
        stacked = nnx.to_pure_dict(state)
        # Keys are scan inputs: a stateful generator would give every layer the same dropout mask.
        layer_keys_of = functools.partial(jax.random.split, num=(self.num_layers, LAYER_KEYS))
        keys = None if key is None else jax.vmap(layer_keys_of, out_axes=2)(key)

        def run_layer(x: jax.Array, parameters_and_keys: tuple) -> tuple[jax.Array, jax.Array | None]:
            parameters, layer_keys = parameters_and_keys
            if gather_layer is not None:
                parameters = gather_layer(parameters)
            x = nnx.merge(graph, parameters)(x, visibility, layer_keys)
            return x, x if all_hidden_states else None

        if self.remat != "none" or gather_layer is not None:
            run_layer = jax.checkpoint(run_layer, policy=REMAT_POLICIES[self.remat], prevent_cse=not self.scan_layers)
        unroll = 1 if self.scan_layers else self.num_layers
        return jax.lax.scan(run_layer, x, (stacked, keys), unroll=unroll)
