"""The encoder: post-LN layers of attention and feed-forward, their parameters stacked and scanned over."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.attention import SelfAttention
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import FeedForward, Key, LayerNorm

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


class Layer(nnx.Module):
    """One Transformer layer. With `stack` it holds the stacked parameters of many layers; it runs on one slice."""

    def __init__(self, config: BertConfig, *, key: Key, stack: tuple[int, ...], attention: str = "xla"):
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

    @jax.named_scope("encoder")
    def __call__(
        self, x: jax.Array, sequence_ids: jax.Array, key: Key | None, *, all_hidden_states: bool = False,
        gather_layer: GatherLayer | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
        """Maps x [B, L, D] and sequence_ids [B, L] to the last layer's output [B, L, D].

        With `all_hidden_states` it also returns the outputs of all layers [layers, B, L, D]. `gather_layer` is applied
        to a layer's parameters before they are used, in the forward pass and again in the backward pass.
        """
        visibility = self.layers.attention.visibility(sequence_ids)  # mask or ids, by kernel; once for all layers
        graph, state = nnx.split(self.layers)
        stacked = nnx.to_pure_dict(state)
        # Keys are scan inputs: a stateful generator would give every layer the same dropout mask.
        split: Callable[[Key], Key] = jax.vmap(
            lambda key: jax.random.split(key, (self.num_layers, LAYER_KEYS)), out_axes=2
        )
        keys = None if key is None else split(key)  # [layers, LAYER_KEYS, B]

        def run_layer(x: jax.Array, parameters_and_keys: tuple[Any, ...]) -> tuple[jax.Array, jax.Array | None]:
            parameters, layer_keys = parameters_and_keys
            if gather_layer is not None:
                parameters = gather_layer(parameters)
            x = nnx.merge(graph, parameters)(x, visibility, layer_keys)
            return x, x if all_hidden_states else None

        if self.remat != "none" or gather_layer is not None:
            # A scan itself keeps XLA from merging the recomputation with the forward pass (prevent_cse).
            run_layer = jax.checkpoint(run_layer, policy=REMAT_POLICIES[self.remat], prevent_cse=not self.scan_layers)
        unroll = 1 if self.scan_layers else self.num_layers
        return jax.lax.scan(run_layer, x, (stacked, keys), unroll=unroll)
