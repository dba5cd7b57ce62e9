"""Multi-head self-attention, with the three input projections in one product."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.fused_attention import cudnn_attention, splash_attention
from bert_jax.model.layers import Key, dense, drop, dropout_mask, parameter, recomputed, truncated_normal

ATTENTIONS = ("xla", "splash", "cudnn")
"""How attention is computed: by products that the compiler fuses, or by a kernel of TPU or GPU, without dropout."""


def attention_mask(sequence_ids: jax.Array, *, causal: bool = False) -> jax.Array:
    """bool [B, L, L]: a position attends to the positions of its own sequence, or the `causal` part up to itself.

    Several sequences in one row do not see each other, and no real token sees padding (sequence 0); padding sees
    padding, which is never read and keeps every row of the softmax defined.
    """
    mask = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    if causal:
        column = jnp.arange(sequence_ids.shape[1])
        mask &= column[:, None] >= column
    return mask


class SelfAttention(nnx.Module):
    """softmax(q k / sqrt(H)) v, dropout element by element on the probabilities, and the output projection."""

    def __init__(
        self, config: BertConfig, *, key: Key, stack: tuple[int, ...], attention: str = "xla", remat: bool = False
    ):
        """`attention` is one of `ATTENTIONS`; ValueError where it has no dropout and the config wants some.

        With `remat` the L x L arrays are made again in the backward pass, and nothing else is; the kernels always do.
        """
        if attention != "xla" and config.attention_probs_dropout_prob:
            raise ValueError(f"attention {attention!r} has no dropout: set attention_probs_dropout_prob to 0")
        inputs, output = jax.random.split(key)
        size, heads, head, std = (
            config.hidden_size, config.num_attention_heads, config.head_size, config.initializer_range,
        )  # fmt: skip
        # Axis "qkv" stacks three tensors of the paper in one: what is per tensor elsewhere is per slice of it here.
        self.qkv_kernel = parameter(
            truncated_normal(inputs, (*stack, size, 3, heads, head), std), "layers", "embed", "qkv", "heads", "head"
        )
        self.qkv_bias = parameter(jnp.zeros((*stack, 3, heads, head), jnp.float32), "layers", "qkv", "heads", "head")
        self.output_kernel = parameter(
            truncated_normal(output, (*stack, heads, head, size), std), "layers", "heads", "head", "embed"
        )
        self.output_bias = parameter(jnp.zeros((*stack, size), jnp.float32), "layers", "embed")
        self.dropout_rate = config.attention_probs_dropout_prob
        self.causal = config.is_decoder
        self.attention = attention
        self.remat = remat

    def visibility(self, sequence_ids: jax.Array) -> jax.Array:
        """What says which positions see each other, from [B, L]: `attention_mask`, or the ids as they are."""
        return sequence_ids if self.attention == "splash" else attention_mask(sequence_ids, causal=self.causal)

    def __call__(self, x: jax.Array, visibility: jax.Array, key: Key | None) -> jax.Array:
        """x [B, L, D], and what `visibility` gives, to [B, L, D]."""
        qkv = dense("td,dcnh->tcnh", x, self.qkv_kernel, self.qkv_bias)
        q, k, v = (qkv[:, :, i] for i in range(3))
        if self.attention == "splash":
            context = splash_attention((q, k, v), visibility, causal=self.causal)
        elif self.attention == "cudnn":
            context = cudnn_attention((q, k, v), visibility)
        else:
            attend = jax.checkpoint(_attend, static_argnums=3) if self.remat else _attend
            context = attend((q, k, v), visibility, key, self.dropout_rate)
        return dense("tnh,nhd->td", context, self.output_kernel, self.output_bias)


def _attend(
    qkv: tuple[jax.Array, jax.Array, jax.Array], mask: jax.Array, key: Key | None, dropout_rate: float
) -> jax.Array:
    """Three [B, L, N, H] and a mask bool [B, L, L] to the context [B, L, N, H]."""
    q, k, v = qkv
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    scores = jnp.einsum("blnh,bmnh->bnlm", q, k, preferred_element_type=jnp.float32)
    probabilities = _softmax(jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min), v.dtype)
    keep = dropout_mask(probabilities.shape, dropout_rate, key)

    @recomputed
    def weigh(probabilities: jax.Array, keep: jax.Array | None, v: jax.Array) -> jax.Array:
        return jnp.einsum("bnlm,bmnh->blnh", drop(probabilities, keep, dropout_rate), v)

    return weigh(probabilities, keep, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The softmax of fp32 scores over their last axis, in `dtype`, which is all that is kept of it."""
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_forward(scores: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    probabilities = _softmax(scores, dtype)
    return probabilities, probabilities


def _softmax_backward(dtype: jnp.dtype, probabilities: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    p, g = probabilities.astype(jnp.float32), gradient.astype(jnp.float32)
    return (p * (g - jnp.sum(p * g, axis=-1, keepdims=True)),)


_softmax.defvjp(_softmax_forward, _softmax_backward)
