"""Self-attention by cuDNN, for GPUs: stores no L x L array of scores, and has no dropout.

cuDNN can drop, but takes the seed of its mask when the step is compiled: all steps and layers would drop the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.workarounds import on_every_axis, vary_like

CUDNN_HEADS = range(8, 129, 8)
"""Head sizes that the kernel supports on every GPU. It needs an even sequence length."""


@jax.custom_vjp
def cudnn_attention(qkv: jax.Array, mask: jax.Array) -> jax.Array:
    """Maps q, k, v [B, L, 3, N, H] in bfloat16 and a mask bool [B, L, L] to the context [B, L, N, H].

    The mask is stored once for all heads. Tests lower the kernel for CUDA, inside the training step and with its
    gradients; it has not been run on a GPU. Raises NotImplementedError for fp32 and for head sizes that are not in
    `CUDNN_HEADS`, and RuntimeError without cuDNN.
    """
    return _forward(qkv, mask)[0]


def _forward(qkv: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
    def forward(qkv: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
        # Slice and swap out here: values computed without the VMA check vary along no axis, as the gradient must, too.
        context, backward = jax.vjp(functools.partial(_attend, mask), *(qkv[:, :, i] for i in range(3)))
        return _swap_heads_and_length(context), backward

    context, backward = on_every_axis(forward)(qkv, mask)
    return vary_like(qkv, context), checkpoint_name(backward, "fused_attention")


def _backward(backward: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    def qkv_gradient(backward: Any, gradient: jax.Array) -> jax.Array:
        return jnp.stack(backward(_swap_heads_and_length(gradient)), axis=2)

    return vary_like(gradient, on_every_axis(qkv_gradient)(backward, gradient)), None


cudnn_attention.defvjp(_forward, _backward)


def _attend(mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Maps q, k, v [B, L, N, H] to the context [B, N, L, H]."""
    context = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
    return _swap_heads_and_length(context)


def _swap_heads_and_length(x: jax.Array) -> jax.Array:
    """Swaps the axes of [B, L, N, H] to [B, N, L, H], and back."""
    return jnp.swapaxes(x, 1, 2)
