"""Self-attention: the plain formula, two kernels for TPUs and cuDNN's for GPUs; rotary positions and local windows."""

import functools
from array import array
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import Key, bias, dense, drop, dropout_mask, parameter, truncated_normal
from bert_jax.model.workarounds import kernel_of_jax_on_mesh

ATTENTIONS = ("xla", "pallas", "splash", "cudnn")
"""Implementations of attention: products that the compiler fuses, two kernels for TPUs, and cuDNN's for GPUs.

`pallas` supports dropout; `splash` supports local layers and rows of any length. `cudnn` has no dropout: cuDNN takes
the seed of its mask when the step is compiled, and would drop the same in all steps and layers.
"""

WITHOUT_DROPOUT = ("splash", "cudnn")
"""Those that need attention_probs_dropout_prob=0."""

CUDNN_HEADS = range(8, 129, 8)
"""Head sizes that `cudnn` supports on every GPU. It needs an even sequence length."""


def attention_mask(
    sequence_ids: jax.Array, *, causal: bool = False, reach: int | None = None, in_blocks: bool = False
) -> jax.Array:
    """Returns the attention mask, bool [B, L, L]: each position attends to the positions of its own sequence.

    With `causal` it attends only up to itself, and with `reach` to at most as many positions on each side. Sequences
    packed into one row do not see each other, and no real token sees padding (sequence 0). Padding sees padding: it is
    never read, and every row of the softmax stays defined. `in_blocks` returns the mask of `query_blocks` and
    `key_blocks`, [B L / (2 reach), 2 reach, 4 reach].
    """
    queries = keys = sequence_ids
    query_positions = key_positions = jnp.arange(sequence_ids.shape[1])[None]
    if in_blocks:
        assert reach
        positions = jnp.broadcast_to(query_positions, sequence_ids.shape)
        queries, keys = query_blocks(queries, reach), key_blocks(keys, reach)
        query_positions, key_positions = query_blocks(positions, reach), key_blocks(positions, reach)
    mask = queries[:, :, None] == keys[:, None, :]
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    if causal:
        mask &= distance >= 0
    if reach is not None:
        mask &= jnp.abs(distance) <= reach
    return mask


def query_blocks(x: jax.Array, reach: int) -> jax.Array:
    """Maps [B, L, ...] to [B L / (2 reach), 2 reach, ...], blocks of queries.

    Block i has the positions from (2 i - 1) reach up to (2 i + 1) reach; block 0 begins with the last of the row. All
    that a local layer lets them see is in block i of `key_blocks`. The layer's input is moved so before its projection,
    not keys and values after theirs: attention has tokens on the lanes of a TPU, which are slow to shift.
    """
    return jnp.roll(x, reach, axis=1).reshape(-1, 2 * reach, *x.shape[2:])


def key_blocks(x: jax.Array, reach: int) -> jax.Array:
    """Maps [B, L, ...] to [B L / (2 reach), 4 reach, ...], blocks of keys or values.

    Block i has the positions from (2 i - 2) reach up to (2 i + 2) reach; block 0 begins with the last of the row.
    """
    blocks = x.reshape(x.shape[0], -1, 2 * reach, *x.shape[2:])
    pairs = jnp.concatenate([jnp.roll(blocks, 1, axis=1), blocks], axis=2)
    return pairs.reshape(-1, 4 * reach, *x.shape[2:])


Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines of rotary angles, each fp32 [B, L, 1, H / 2]."""


class Visibility(NamedTuple):
    """Positions in a row that attention reads, and their rotation.

    Attributes:
      mask: a result of `attention_mask`; sequence ids int32 [B, L] for kernels that compare them.
      reach: positions on each side that a local layer sees; None for a global layer.
      rotations: results of `rotary_angles` for queries and for keys; None for learned positions.
    """

    mask: jax.Array
    reach: int | None
    rotations: tuple[Rotation, Rotation] | None


def rotary_angles(positions: jax.Array, head_size: int, theta: float) -> Rotation:
    """Returns cosines and sines for `positions` [B, L] (Su et al. 2021, arXiv:2104.09864).

    Frequencies are rounded to fp32 at each step, as in `transformers`: an angle of thousands multiplies their error.
    """
    exponents = array("f", [feature / head_size for feature in range(0, head_size, 2)])
    wavelengths = array("f", [theta**exponent for exponent in exponents])
    frequencies = jnp.array([1 / wavelength for wavelength in wavelengths], jnp.float32)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates each pair of features (i, i + H / 2) of x [B, L, N, H] in fp32, and returns it in the type of x."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Self-attention softmax(q k / sqrt(H)) v with elementwise dropout on the probabilities, and the projection."""

    def __init__(self, config: BertConfig, *, key: Key, stack: tuple[int, ...], attention: str = "xla"):
        """Initializes the weights.

        Args:
          config: the sizes.
          key: of the initial values.
          stack: leading axes of each parameter, (layers,) in an encoder.
          attention: one of `ATTENTIONS`; all but "xla" recompute [L, L] arrays in the backward pass.
        """
        inputs, output = jax.random.split(key)
        size, heads, head = config.hidden_size, config.num_attention_heads, config.head_size
        # Axis "qkv" stacks three tensors of the paper in one. Per-tensor operations work on its slices.
        self.qkv_kernel = parameter(
            truncated_normal(inputs, (*stack, size, 3, heads, head), config.initializer_range),
            "layers", "embed", "qkv", "heads", "head", compute_cast=True,
        )  # fmt: skip
        has_bias = config.attention_bias
        self.qkv_bias = bias((*stack, 3, heads, head), "layers", "qkv", "heads", "head") if has_bias else None
        self.output_kernel = parameter(
            truncated_normal(output, (*stack, heads, head, size), config.output_range),
            "layers", "heads", "head", "embed", compute_cast=True,
        )  # fmt: skip
        self.output_bias = bias((*stack, size), "layers", "embed") if has_bias else None
        self.config = config
        self.dropout_rate = config.attention_probs_dropout_prob
        self.attention = attention

    def visibility(self, sequence_ids: jax.Array, positions: jax.Array, *, is_local: bool = False) -> Visibility:
        """Returns what a global or local layer reads of `sequence_ids` and `positions`, int32 [B, L].

        A local layer of plain attention without dropout computes blocks if a row is longer than 4 reach and a multiple
        of 2 reach: the same results, of 4 reach instead of L products per query.
        """
        config, rows = self.config, sequence_ids.shape
        reach = config.local_attention // 2 if is_local else None
        in_blocks = bool(
            reach and self.attention == "xla" and not self.dropout_rate
            and rows[1] % (2 * reach) == 0 and rows[1] > 4 * reach
        )  # fmt: skip
        rotations = None
        if config.position_embedding_type == "rotary":
            theta = config.local_rope_theta if is_local else config.global_rope_theta
            places = [positions]
            if in_blocks and reach:
                places = [query_blocks(positions, reach), positions.reshape(-1, 2 * reach)]
            angles = [rotary_angles(place, config.head_size, theta) for place in places]
            rotations = angles[0], angles[-1]
        if self.attention in ("pallas", "splash"):
            return Visibility(sequence_ids, reach, rotations)
        mask = attention_mask(sequence_ids, causal=config.is_decoder, reach=reach, in_blocks=in_blocks)
        return Visibility(mask, reach, rotations)

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, visibility: Visibility, key: Key | None) -> jax.Array:
        """Maps x [B, L, D] and the result of `visibility` to [B, L, D].

        In the equations t is a token of the batch, n a head, h an element of it, d one of D. Queries, keys and values
        are products of their own: in one, the compiler would stack their gradients for the backward pass.
        """
        shape, (mask, reach, rotations) = x.shape, visibility
        block, in_blocks = mask.shape[1], mask.shape[1] < shape[1]
        of_queries, of_keys = (query_blocks(x, block // 2), x.reshape(-1, block, shape[2])) if in_blocks else (x, x)

        def project(x: jax.Array, part: int) -> jax.Array:
            return checkpoint_name(dense("td,dnh->tnh", x, self.qkv_kernel, self.qkv_bias, part), "qkv")

        q, k, v = project(of_queries, 0), project(of_keys, 1), project(of_keys, 2)
        if rotations is not None:
            q, k = rotate(q, rotations[0]), rotate(k, rotations[1])
        if self.attention in ("pallas", "splash"):
            # Few runs need this import, which takes a fourth of a second.
            from bert_jax.model.pallas_attention import pallas_attention, splash_attention

            qkv, causal = jnp.stack((q, k, v), axis=2), self.config.is_decoder
            if self.attention == "splash":
                context = splash_attention(qkv, mask, causal=causal, reach=reach)
            else:
                context = pallas_attention(qkv, mask, key, dropout_rate=self.dropout_rate, causal=causal)
        elif self.attention == "cudnn":
            context = cudnn_attention(jnp.stack((q, k, v), axis=2), mask)
        elif in_blocks:
            k, v = (key_blocks(part.reshape(*shape[:2], *part.shape[2:]), block // 2) for part in (k, v))
            context = plain_attention(q, k, v, mask, None, 0.0)
        else:
            context = plain_attention(q, k, v, mask, key, self.dropout_rate)
        context = checkpoint_name(context, "attention_context")
        y = dense("tnh,nhd->td", context, self.output_kernel, self.output_bias)
        return jnp.roll(y.reshape(shape), -(block // 2), axis=1) if in_blocks else y


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, key: Key | None, dropout_rate: float
) -> jax.Array:
    """Maps queries [B, L, N, H], keys and values [B, M, N, H] and a mask bool [B, L, M] to the context [B, L, N, H]."""
    rows, length, heads, head = q.shape
    q = q * jnp.asarray(head**-0.5, q.dtype)
    keep = checkpoint_name(dropout_mask((rows, heads, length, k.shape[1]), dropout_rate, key), "attention_dropout_mask")
    return _attend(q, k, v, mask, keep, dropout_rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, keep: jax.Array | None, dropout_rate: float
) -> jax.Array:
    """Maps scaled queries, keys and values [B, L, N, H], a mask and a dropout mask [B, N, L, L] to the context.

    The gradient of a row's scores needs the sum of its probabilities times their gradients, which is that of its
    context times the context's gradient, dropout included (Dao et al. 2022, arXiv:2205.14135, appendix B). So the
    backward pass stores one array of L x L and sums over none, which JAX's own gradient does in a pass of its own.
    """
    return _attend_forward(q, k, v, mask, keep, dropout_rate)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, keep: jax.Array | None, dropout_rate: float
) -> tuple[jax.Array, Any]:
    scores = jnp.einsum("blnh,bmnh->bnlm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
    probabilities = checkpoint_name(jax.nn.softmax(scores).astype(v.dtype), "attention_probabilities")
    context = jnp.einsum("bnlm,bmnh->blnh", drop(probabilities, keep, dropout_rate), v)
    context = checkpoint_name(context, "attention_context")
    return context, (q, k, v, probabilities, keep, context)


def _attend_backward(
    dropout_rate: float, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q, k, v, probabilities, keep, context = saved
    by_v = jnp.einsum("bnlm,blnh->bmnh", drop(probabilities, keep, dropout_rate), gradient)
    sums = jnp.sum(gradient.astype(jnp.float32) * context, axis=-1).swapaxes(1, 2)[..., None]
    by_weights = jnp.einsum("blnh,bmnh->bnlm", gradient, v, preferred_element_type=jnp.float32)
    by_scores = (probabilities * (drop(by_weights, keep, dropout_rate) - sums)).astype(q.dtype)
    by_q, by_k = jnp.einsum("bnlm,bmnh->blnh", by_scores, k), jnp.einsum("bnlm,blnh->bmnh", by_scores, q)
    return by_q, by_k, by_v, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def cudnn_attention(qkv: jax.Array, mask: jax.Array) -> jax.Array:
    """Maps q, k, v [B, L, 3, N, H] in bfloat16 and a mask bool [B, L, L] to the context [B, L, N, H], without dropout.

    The mask is stored once for all heads, and no other array of L x L. Tests lower the kernel for CUDA, inside the
    training step and with its gradients; it has not been run on a GPU. Raises NotImplementedError for fp32 and for head
    sizes that are not in `CUDNN_HEADS`, and RuntimeError without cuDNN.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        context = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")
        return jnp.swapaxes(context, 1, 2)

    return kernel_of_jax_on_mesh(attend)(qkv, mask)
