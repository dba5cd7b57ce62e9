"""Attention in one kernel, which keeps no L x L array of scores: one for TPU, one for GPU. Neither has dropout."""

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
"""The sizes of heads that the GPU kernel reads, on every GPU that has it; the length of its sequences is even."""

_LARGEST_BLOCK = 512

QKV = tuple[jax.Array, jax.Array, jax.Array]
Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""q, k, v [B, N, L, H] and what says which positions see each other to the context [B, N, L, H]."""


def splash_attention(qkv: QKV, sequence_ids: jax.Array, *, causal: bool, interpret: bool = False) -> jax.Array:
    """Three [B, L, N, H] and sequence_ids int32 [B, L] to the context [B, L, N, H], by Pallas' kernel for TPU.

    A position attends as `attention_mask` says, but `sequence_ids` are compared block by block. Any H will do; raises
    ValueError where L is no multiple of `SPLASH_LENGTHS`. With `interpret` it runs on any platform, slowly.
    """
    q, k, v = qkv
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return _run((q, k, v), sequence_ids, functools.partial(_splash_kernel, causal=causal, interpret=interpret))


def cudnn_attention(qkv: QKV, mask: jax.Array) -> jax.Array:
    """Three [B, L, N, H] in bfloat16 and a mask bool [B, L, L] to the context [B, L, N, H], by cuDNN's kernel.

    The mask is in memory, once for all heads. It is lowered for CUDA in the tests, inside the training step and with
    its gradients; on a GPU it has not been run. Raises NotImplementedError for fp32 and for heads whose size is not in
    `CUDNN_HEADS`, and RuntimeError where there is no cuDNN.
    """
    return _run(qkv, mask, _cudnn_kernel)


def _splash_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_ids: jax.Array, *, causal: bool, interpret: bool
) -> jax.Array:
    _, heads, length, _ = q.shape
    if length % SPLASH_LENGTHS:
        raise ValueError(f"the kernel reads sequences of a multiple of {SPLASH_LENGTHS} tokens, not {length}")
    # The fewer blocks the better; the fp32 scores of one of 512 x 512 are 1 MiB of a TPU core's fast memory.
    block = max(size for size in range(SPLASH_LENGTHS, _LARGEST_BLOCK + 1, SPLASH_LENGTHS) if length % size == 0)
    # Tokens along the lanes: heads of 64 there would be padded to 128, in what is kept for the backward pass as well
    # (0.6 GiB of 13.2 GiB a device: BERT-LARGE, 8 rows of 512 tokens).
    layout = splash.QKVLayout.SEQ_MINOR
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, use_fused_bwd_kernel=True,
        q_layout=layout, k_layout=layout, v_layout=layout,
    )  # fmt: skip
    mask = (splash.CausalMask if causal else splash.FullMask)((length, length))
    of_row = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )
    return jax.vmap(lambda q, k, v, ids: of_row(q, k, v, splash.SegmentIds(ids, ids)))(q, k, v, sequence_ids)


def _cudnn_kernel(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    q, k, v = map(_swap_heads_and_length, (q, k, v))
    context = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
    return _swap_heads_and_length(context)


# --- Under a mesh ----------------------------------------------------------------------------------------------------
#
# Inside the `jax.shard_map` of a training step a kernel meets two demands that it does not meet by itself: that no axis
# of the mesh is left to the compiler, and that it says along which axes its results vary. So it runs in a shard_map of
# its own over what is left, which does not ask; so do its gradients. Afterwards the results are cast to what they are.
# The axes that were left do not cut anything: the kernel is given the whole of what a device has.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _run(qkv: QKV, visibility: jax.Array, kernel: Kernel) -> jax.Array:
    return _forward(qkv, visibility, kernel)[0]


def _forward(qkv: QKV, visibility: jax.Array, kernel: Kernel) -> tuple[jax.Array, Any]:
    def forward(qkv: QKV, visibility: jax.Array) -> tuple[jax.Array, Any]:
        # Swapped out here: what is computed where nobody asks varies along nothing, as the gradient has to as well.
        context, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, visibility), *map(_swap_heads_and_length, qkv))
        return _swap_heads_and_length(context), backward

    context, backward = _on_every_axis(forward)(qkv, visibility)
    return _vary_like(qkv[0], context), backward


def _backward(kernel: Kernel, backward: Any, gradient: jax.Array) -> tuple[QKV, None]:
    def of_qkv(backward: Any, gradient: jax.Array) -> Any:
        return tuple(map(_swap_heads_and_length, backward(_swap_heads_and_length(gradient))))

    return _vary_like(gradient, _on_every_axis(of_qkv)(backward, gradient)), None


_run.defvjp(_forward, _backward)


def _swap_heads_and_length(x: jax.Array) -> jax.Array:
    """[B, L, N, H] to [B, N, L, H] and back."""
    return jnp.swapaxes(x, 1, 2)


def _on_every_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    return jax.shard_map(
        function, axis_names=set(mesh.auto_axes), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )


def _vary_like(other: jax.Array, tree: Any) -> Any:
    """Leaves that vary along the mesh axes that `other` varies along; no value changes."""

    def cast(x: jax.Array) -> jax.Array:
        axes = jax.typeof(other).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(axes), to="varying")

    return jax.tree.map(cast, tree)
