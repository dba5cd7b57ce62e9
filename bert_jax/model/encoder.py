"""The encoder: self-attention, feed-forward and post-LN layers, their parameters stacked and scanned over."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.attention_kernels.kernel_choice import attend_by_kernel, compares_ids
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.dropout import drop, dropout, dropout_mask
from bert_jax.model.layers import Key, LayerNorm, activation, bias, dense, parameter, truncated_normal
from bert_jax.model.rematerialization import REMAT_POLICIES, rematerialized
from bert_jax.model.workarounds import softmax, weight_einsum


def attention_mask(sequence_ids: jax.Array, *, causal: bool = False) -> jax.Array:
    """Returns the attention mask, bool [B, L, L]: each position attends to the positions of its own sequence.

    With `causal` it attends only up to itself. Sequences packed into one row do not see each other, and no real token
    sees padding (sequence 0). Padding sees padding: it is never read, and every row of the softmax stays defined.
    """
    mask = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    if causal:
        column = jnp.arange(sequence_ids.shape[1])
        mask &= column[:, None] >= column
    return mask


class SelfAttention(nnx.Module):
    """Self-attention softmax(q k / sqrt(H)) v with elementwise dropout on the probabilities, and the projection."""

    def __init__(self, config: BertConfig, *, key: Key, stack: tuple[int, ...], attention: str = "xla"):
        """Initializes the weights. Raises ValueError if the config asks for dropout and the kernel does not support it.

        Args:
          config: the sizes.
          key: of the initial values.
          stack: leading axes of each parameter, (layers,) in an encoder.
          attention: one of `ATTENTIONS`; fused kernels recompute [L, L] arrays in the backward pass.
        """
        if attention == "cudnn" and config.attention_probs_dropout_prob:
            raise ValueError(
                f"attention={attention}: does not support dropout, got attention_probs_dropout_prob="
                f"{config.attention_probs_dropout_prob}; set it to 0"
            )
        inputs, output = jax.random.split(key)
        size, heads, head, std = (
            config.hidden_size, config.num_attention_heads, config.head_size, config.initializer_range,
        )  # fmt: skip
        # Axis "qkv" stacks three tensors of the paper in one. Per-tensor operations work on its slices.
        self.qkv_kernel = parameter(
            truncated_normal(inputs, (*stack, size, 3, heads, head), std), "layers", "embed", "qkv", "heads", "head",
            compute_cast=True,
        )  # fmt: skip
        self.qkv_bias = bias((*stack, 3, heads, head), "layers", "qkv", "heads", "head")
        self.output_kernel = parameter(
            truncated_normal(output, (*stack, heads, head, size), std), "layers", "heads", "head", "embed",
            compute_cast=True,
        )  # fmt: skip
        self.output_bias = bias((*stack, size), "layers", "embed")
        self.dropout_rate = config.attention_probs_dropout_prob
        self.causal = config.is_decoder
        self.attention = attention

    def visibility(self, sequence_ids: jax.Array) -> jax.Array:
        """Returns the attention mask bool [B, L, L], or sequence ids int32 [B, L] for kernels that compare them.

        Expects `sequence_ids` int32 [B, L].
        """
        return sequence_ids if compares_ids(self.attention) else attention_mask(sequence_ids, causal=self.causal)

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, visibility: jax.Array, key: Key | None) -> jax.Array:
        """Maps x [B, L, D] and the result of `visibility` to [B, L, D].

        In the equations t is a token of the batch, c one of q, k, v, n a head, h an element of it, d one of D.
        """
        qkv = checkpoint_name(dense("td,dcnh->tcnh", x, self.qkv_kernel, self.qkv_bias), "qkv")
        if self.attention == "xla":
            context = _attend(qkv, visibility, key, self.dropout_rate)
        else:
            context = attend_by_kernel(self.attention, qkv, visibility, key, self.dropout_rate, self.causal)
        context = checkpoint_name(context, "attention_context")
        return dense("tnh,nhd->td", context, self.output_kernel, self.output_bias)


def _attend(qkv: jax.Array, mask: jax.Array, key: Key | None, dropout_rate: float) -> jax.Array:
    """Maps q, k, v [B, L, 3, N, H] and a mask bool [B, L, L] to the context [B, L, N, H]."""
    q, k, v = (qkv[:, :, i] for i in range(3))
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    scores = jnp.einsum("blnh,bmnh->bnlm", q, k, preferred_element_type=jnp.float32)
    probabilities = softmax(jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min), v.dtype)
    keep = checkpoint_name(dropout_mask(probabilities.shape, dropout_rate, key), "attention_dropout_mask")

    @rematerialized
    def weigh(probabilities: jax.Array, keep: jax.Array | None, v: jax.Array) -> jax.Array:
        return jnp.einsum("bnlm,bmnh->blnh", drop(probabilities, keep, dropout_rate), v)

    return weigh(probabilities, keep, v)


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

    @jax.named_scope("feed_forward")
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
        layer_keys_of = functools.partial(jax.random.split, num=(self.num_layers, LAYER_KEYS))
        keys = None if key is None else jax.vmap(layer_keys_of, out_axes=2)(key)  # [layers, LAYER_KEYS, B]

        def run_layer(x: jax.Array, parameters_and_keys: tuple) -> tuple[jax.Array, jax.Array | None]:
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
