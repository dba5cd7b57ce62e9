"""Attention in one kernel, which keeps no L x L array: one for TPU, one for GPU. Neither has dropout."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

SPLASH_LENGTHS = 128
"""The TPU kernel reads sequences of a multiple of so many tokens."""

CUDNN_HEADS = range(8, 129, 8)
"""The sizes of heads that the GPU kernel reads on every GPU that has it; the length of its sequences is even."""

_LARGEST_BLOCK = 512

QKV = tuple[jax.Array, jax.Array, jax.Array]


def splash_attention(qkv: QKV, sequence_ids: jax.Array, *, causal: bool, interpret: bool = False) -> jax.Array:
    """Three [B, L, N, H] and sequence_ids int32 [B, L] to the context [B, L, N, H], by TPU's Pallas kernel.

    A position attends as `attention_mask` says, by comparing `sequence_ids` block by block. L is a multiple of
    `SPLASH_LENGTHS`, or the kernel raises ValueError; any H will do. With `interpret` the kernel runs on any platform,
    slowly. Under a mesh it works inside `jax.shard_map`, on the shards that it is given, and takes axes that are
    left to the compiler as axes of one device.
    """
    q, k, v = qkv
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return _splash((q, k, v), sequence_ids, causal, interpret)


def cudnn_attention(qkv: QKV, mask: jax.Array) -> jax.Array:
    """Three [B, L, N, H] in bfloat16 and a mask bool [B, L, L] to the context [B, L, N, H], by cuDNN's kernel.

    The mask is in memory, once for all heads; scores and probabilities are not. It was lowered for CUDA, with its
    gradients; it has not been run yet. Raises NotImplementedError for other types, and ValueError off a GPU.
    """
    q, k, v = qkv
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")


# --- TPU -------------------------------------------------------------------------------------------------------------
#
# The kernel says nothing of which mesh axes its results vary along, so that `jax.shard_map` does not take it where it
# checks that; and it wants every axis manual. Hence a shard_map of its own without the check, around the forward pass
# and around the backward pass, each of whose results is then cast to what it is.


def _block_size(length: int) -> int:
    """The largest block that divides L: the fewer blocks the better, and 512 x 512 fp32 scores are 1 MiB of VMEM."""
    if length % SPLASH_LENGTHS:
        raise ValueError(f"the kernel reads sequences of a multiple of {SPLASH_LENGTHS} tokens, not {length}")
    return max(size for size in range(SPLASH_LENGTHS, _LARGEST_BLOCK + 1, SPLASH_LENGTHS) if length % size == 0)


def _kernel(heads: int, length: int, causal: bool, interpret: bool) -> Callable[..., jax.Array]:
    """(q, k, v, sequence_ids), [B, N, L, H] and [B, L], to [B, N, L, H]."""
    block = _block_size(length)
    mask = (splash.CausalMask if causal else splash.FullMask)((length, length))
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, use_fused_bwd_kernel=True
    )
    of_row = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )
    return jax.vmap(lambda q, k, v, ids: of_row(q, k, v, splash.SegmentIds(ids, ids)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _splash(qkv: QKV, sequence_ids: jax.Array, causal: bool, interpret: bool) -> jax.Array:
    return _splash_forward(qkv, sequence_ids, causal, interpret)[0]


def _splash_forward(qkv: QKV, sequence_ids: jax.Array, causal: bool, interpret: bool) -> tuple[jax.Array, Any]:
    def forward(qkv: QKV, sequence_ids: jax.Array) -> tuple[jax.Array, Any]:
        q, k, v = map(_swap_heads_and_length, qkv)
        _, heads, length, _ = q.shape
        kernel = _kernel(heads, length, causal, interpret)
        context, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, sequence_ids), q, k, v)
        return _swap_heads_and_length(context), backward

    context, backward = _on_one_shard(forward)(qkv, sequence_ids)
    return _vary_as(qkv[0], context), backward


def _splash_backward(causal: bool, interpret: bool, backward: Any, gradient: jax.Array) -> tuple[QKV, None]:
    def of_qkv(backward: Any, gradient: jax.Array) -> Any:
        return tuple(map(_swap_heads_and_length, backward(_swap_heads_and_length(gradient))))

    return _vary_as(gradient, _on_one_shard(of_qkv)(backward, gradient)), None


_splash.defvjp(_splash_forward, _splash_backward)


def _swap_heads_and_length(x: jax.Array) -> jax.Array:
    """[B, L, N, H] to [B, N, L, H] and back."""
    return jnp.swapaxes(x, 1, 2)


def _on_one_shard(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    return jax.shard_map(
        function, axis_names=set(mesh.auto_axes), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )


def _vary_as(like: jax.Array, tree: Any) -> Any:
    """Leaves that vary along the mesh axes that `like` varies along; no values change."""

    def cast(x: jax.Array) -> jax.Array:
        axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(axes), to="varying")

    return jax.tree.map(cast, tree)
