"""The implementations of attention, and the call of the chosen kernel."""

import jax

from bert_jax.model.attention_kernels.cudnn_attention import cudnn_attention
from bert_jax.model.layers import Key

ATTENTIONS = ("xla", "pallas", "triton", "cudnn")
"""Implementations of attention: products that the compiler fuses, a kernel for TPUs, or one of two for GPUs.

`cudnn` has no dropout: cuDNN takes the seed of its mask when the step is compiled, and would drop the same in all
steps.
"""


def compares_ids(attention: str) -> bool:
    """Returns True for a kernel that compares sequence ids itself, and needs no mask."""
    return attention in ("pallas", "triton")


def attend_by_kernel(
    attention: str, qkv: jax.Array, visibility: jax.Array, key: Key | None, dropout_rate: float, causal: bool
) -> jax.Array:  # fmt: skip
    """Maps q, k, v [B, L, 3, N, H] to the context [B, L, N, H] by a kernel, one of `ATTENTIONS` but "xla".

    `visibility` are sequence ids int32 [B, L] if it `compares_ids`, else a mask bool [B, L, L].
    """
    if attention == "cudnn":
        return cudnn_attention(qkv, visibility)
    # Few runs need these imports, which take a fourth of a second.
    if attention == "pallas":
        from bert_jax.model.attention_kernels.pallas_attention import pallas_attention

        return pallas_attention(qkv, visibility, key, dropout_rate=dropout_rate, causal=causal)
    from bert_jax.model.attention_kernels.triton_attention import triton_attention

    return triton_attention(qkv, visibility, key, dropout_rate=dropout_rate, causal=causal)
