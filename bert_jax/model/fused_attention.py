"""Fused attention kernels for TPU and GPU. Neither stores an L x L array of scores; neither supports dropout."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bert_jax.model.workarounds import vary_like

SPLASH_LENGTHS = 128
"""The TPU kernel needs sequence lengths that are a multiple of this."""

CUDNN_HEADS = range(8, 129, 8)
"""Head sizes that the GPU kernel supports on every GPU. It needs an even sequence length."""

_LARGEST_BLOCK = 512

QKV = tuple[jax.Array, jax.Array, jax.Array]
Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Maps q, k, v [B, N, L, H] and the result of `SelfAttention.visibility` to the context [B, N, L, H]."""


def splash_attention(qkv: QKV, sequence_ids: jax.Array, *, causal: bool, interpret: bool = False) -> jax.Array:
    """Maps q, k, v [B, L, N, H] and sequence_ids int32 [B, L] to the context [B, L, N, H], by the Pallas TPU kernel.

    Positions attend as in `attention_mask`, but `sequence_ids` are compared block by block. Any H is supported. Raises
    ValueError if L is not a multiple of `SPLASH_LENGTHS`. With `interpret` it runs on any platform, slowly.
    """
    q, k, v = qkv
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    return _run((q, k, v), sequence_ids, functools.partial(_splash_kernel, causal=causal, interpret=interpret))


def cudnn_attention(qkv: QKV, mask: jax.Array) -> jax.Array:
    """Maps q, k, v [B, L, N, H] in bfloat16 and a mask bool [B, L, L] to the context [B, L, N, H], by cuDNN.

    The mask is stored once for all heads. Tests lower the kernel for CUDA, inside the training step and with its
    gradients; it has not been run on a GPU. Raises NotImplementedError for fp32 and for head sizes that are not in
    `CUDNN_HEADS`, and RuntimeError without cuDNN.
    """
    return _run(qkv, mask, _cudnn_kernel)


def _splash_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_ids: jax.Array, *, causal: bool, interpret: bool
) -> jax.Array:
    _, heads, length, _ = q.shape
    if length % SPLASH_LENGTHS:
        raise ValueError(f"seq_len={length}: must be a multiple of {SPLASH_LENGTHS} for the splash attention kernel")
    # Fewer blocks are faster. The fp32 scores of a block of 512 x 512 take 1 MiB of a TPU core's VMEM.
    block = max(size for size in range(SPLASH_LENGTHS, _LARGEST_BLOCK + 1, SPLASH_LENGTHS) if length % size == 0)
    # Tokens lie along the lanes. Heads of 64 there would be padded to 128, also in the residuals of the backward pass
    # (0.6 GiB of 13.2 GiB per device: BERT-LARGE, 8 rows of 512 tokens).
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a fourth of a second, needed by few runs

    layout = splash.QKVLayout.SEQ_MINOR
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, use_fused_bwd_kernel=True,
        q_layout=layout, k_layout=layout, v_layout=layout,
    )  # fmt: skip
    mask = (splash.CausalMask if causal else splash.FullMask)((length, length))
    attend_row = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
    )
    return jax.vmap(lambda q, k, v, ids: attend_row(q, k, v, splash.SegmentIds(ids, ids)))(q, k, v, sequence_ids)


def _cudnn_kernel(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    q, k, v = map(_swap_heads_and_length, (q, k, v))
    context = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
    return _swap_heads_and_length(context)


# --- Under a mesh ----------------------------------------------------------------------------------------------------
#
# Inside the `jax.shard_map` of a training step, a Pallas or cuDNN call needs all mesh axes to be manual and needs VMA
# annotations on its outputs; it provides neither. So the kernel and its gradients run in a nested shard_map over the
# remaining (auto) axes, with `check_vma=False`. The results are then cast to the varying axes of the inputs.
# The auto axes shard nothing here: the kernel reads the full arrays of a device.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _run(qkv: QKV, visibility: jax.Array, kernel: Kernel) -> jax.Array:
    return _forward(qkv, visibility, kernel)[0]


def _forward(qkv: QKV, visibility: jax.Array, kernel: Kernel) -> tuple[jax.Array, Any]:
    def forward(qkv: QKV, visibility: jax.Array) -> tuple[jax.Array, Any]:
        # Swap axes out here: values computed without the VMA check vary along no axis, as the gradient must, too.
        context, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, visibility), *map(_swap_heads_and_length, qkv))
        return _swap_heads_and_length(context), backward

    context, backward = _on_every_axis(forward)(qkv, visibility)
    return vary_like(qkv[0], context), checkpoint_name(backward, "fused_attention")


def _backward(kernel: Kernel, backward: Any, gradient: jax.Array) -> tuple[QKV, None]:
    def qkv_gradients(backward: Any, gradient: jax.Array) -> Any:
        return tuple(map(_swap_heads_and_length, backward(_swap_heads_and_length(gradient))))

    return vary_like(gradient, _on_every_axis(qkv_gradients)(backward, gradient)), None


_run.defvjp(_forward, _backward)


def _swap_heads_and_length(x: jax.Array) -> jax.Array:
    """Swaps the axes of [B, L, N, H] to [B, N, L, H], and back."""
    return jnp.swapaxes(x, 1, 2)


def _on_every_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    return jax.shard_map(
        function, axis_names=set(mesh.auto_axes), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
