"""Self-attention as Pallas kernels for TPUs: no array of L x L leaves a core's memory.

`splash_attention` is JAX's kernel, for rows of any length and local layers. `pallas_attention` has dropout, for rows
whose keys fit into a core's memory. In it one grid step attends from a block of queries to all keys of a row, so a
softmax is whole, and the backward pass is one kernel. It recomputes the probabilities from the log of their sums, as
FlashAttention does (Dao et al. 2022, arXiv:2205.14135), and hashes the dropout mask again: the same mask as
`layers.dropout_mask` draws.

Shape letters: B rows, L tokens, N heads, H features of a head, D = N H, C heads of a grid step, S = C H, Q queries of a
grid step. L is padded to a multiple of `LANES`. Scores are [L, Q], keys by queries.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from bert_jax.model.layers import Key, is_kept, key_words
from bert_jax.model.workarounds import kernel_of_jax_on_mesh, kernel_on_mesh

LANES = 128
"""Elements of a TPU's vector register along its last axis. The hidden size must be a multiple of it."""

LARGEST_KEYS = 4096
"""Largest bytes of one feature of a row's keys: 2,048 tokens in bfloat16 or 1,024 in fp32 fit into a core's memory."""

_LARGEST_BLOCK = 512 * 512 * LANES  # Q L S of a grid step; 512 queries of 512 keys have scores of 1 MiB.

_PADDING = -1  # Sequence id of the positions that round L up: no position of the row sees them.
_NN, _NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))


def splash_attention(
    qkv: jax.Array, sequence_ids: jax.Array, *, causal: bool, reach: int | None, interpret: bool = False
) -> jax.Array:
    """Maps q, k, v [B, L, 3, N, H] to the context [B, L, N, H], without dropout.

    Positions attend as in `attention_mask` of sequence_ids int32 [B, L]; blocks of L x L in which none does cost no
    time. With `interpret` it runs on any platform, slowly.
    """
    given, (heads, head) = qkv.shape[1], qkv.shape[3:]
    length = -(-given // LANES) * LANES
    if length > given:
        qkv = jnp.pad(qkv, ((0, 0), (0, length - given), *[(0, 0)] * 3))
        sequence_ids = jnp.pad(sequence_ids, ((0, 0), (0, length - given)), constant_values=_PADDING)
    mask: Any = splash.CausalMask((length, length)) if causal else splash.FullMask((length, length))
    if reach is not None:
        mask = splash.LocalMask((length, length), (reach, 0 if causal else reach), offset=0)
    largest = 4 * LANES if reach is None else max(LANES, 4 * reach)
    block = next(size for size in (4 * LANES, 2 * LANES, LANES) if length % size == 0 and size <= largest)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
        )
        q, k, v = (jnp.swapaxes(part, 1, 2) for part in (q * jnp.asarray(head**-0.5, q.dtype), k, v))
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(sequence_ids, sequence_ids))

    return kernel_of_jax_on_mesh(attend)(qkv, sequence_ids)[:, :given]


def pallas_attention(
    qkv: jax.Array, sequence_ids: jax.Array, keys: Key | None, *, dropout_rate: float, causal: bool,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """Maps q, k, v [B, L, 3, N, H] to the context [B, L, N, H].

    Positions attend as in `attention_mask` of sequence_ids int32 [B, L]. The dropout mask is that of
    `dropout_mask((B, N, L, L), dropout_rate, keys)`; without keys nothing is dropped. With `interpret` it runs on any
    platform, slowly.
    """
    rows, length, _, heads, head = qkv.shape
    rate = 0.0 if keys is None else dropout_rate
    words = jnp.zeros((rows, 2), jnp.uint32) if keys is None else key_words(keys)
    together = next((c for c in range(1, heads) if heads % c == 0 and c * head % LANES == 0), heads)
    kernels = _Kernels(rows, length, heads, head, together, rate, causal, interpret)
    return kernel_on_mesh(kernels.forward, kernels.backward)(qkv, sequence_ids, words)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The forward and the backward kernel for arrays of given sizes."""

    rows: int
    length: int
    heads: int
    head: int
    heads_together: int  # C
    dropout_rate: float
    causal: bool
    interpret: bool

    @property
    def padded_length(self) -> int:
        return -(-self.length // LANES) * LANES

    @property
    def features(self) -> int:
        """S."""
        return self.heads_together * self.head

    @property
    def queries(self) -> int:
        """Q: large blocks leave the compiler more to overlap."""
        largest = max(LANES, _LARGEST_BLOCK // (self.padded_length * self.features))
        fitting = range(LANES, min(largest, self.padded_length) + 1, LANES)
        return max(size for size in fitting if self.padded_length % size == 0)

    # --- Calls of the kernels ----------------------------------------------------------------------------------------

    def forward(self, qkv: jax.Array, sequence_ids: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps q, k, v [B, L, 3, N, H] to the context [B, L, N, H] and log sums fp32 [B, N, padded L]."""
        shape = (self.rows, self.padded_length, self.heads * self.head)
        context, log_sums = self._call(
            _forward_kernel, "attention_forward", (qkv, sequence_ids, words), [],
            (self._queries_of(0), self._log_sum_block()),
            (jax.ShapeDtypeStruct(shape, qkv.dtype), jax.ShapeDtypeStruct(self._log_sum_shape, jnp.float32)), (),
        )  # fmt: skip
        context = context[:, : self.length].reshape(self.rows, self.length, self.heads, self.head)
        return context, log_sums.reshape(self.rows, self.heads, -1)

    def backward(
        self, qkv: jax.Array, sequence_ids: jax.Array, words: jax.Array, log_sums: jax.Array, gradient: jax.Array
    ) -> jax.Array:
        """Maps the arguments and log sums of `forward` and the gradient [B, L, N, H] to that of qkv."""
        length, features = self.padded_length, self.features
        shape = (3, self.rows, length, self.heads * self.head)
        block = pl.BlockSpec((3, 1, length, features), lambda b, n, i: (0, b, 0, n))
        gradient = self._pad(gradient.reshape(self.rows, self.length, -1))
        more = [(log_sums.reshape(self._log_sum_shape), self._log_sum_block()), (gradient, self._queries_of(0))]
        found = self._call(
            _backward_kernel, "attention_backward", (qkv, sequence_ids, words), more, block,
            jax.ShapeDtypeStruct(shape, qkv.dtype), [pltpu.VMEM((length, features), jnp.float32)] * 2,
        )  # fmt: skip
        return jnp.moveaxis(found[:, :, : self.length], 0, 2).reshape(qkv.shape)

    def _call(
        self, kernel: Callable[..., None], name: str, inputs: tuple[jax.Array, jax.Array, jax.Array],
        more: list[tuple[jax.Array, pl.BlockSpec]], out_specs: Any, out_shape: Any, scratch_shapes: Any,
    ) -> Any:  # fmt: skip
        qkv, sequence_ids, words = inputs
        qkv = self._pad(qkv.reshape(self.rows, self.length, -1))
        ids = self._pad(sequence_ids, _PADDING)
        length, features, slabs = self.padded_length, self.features, self.heads // self.heads_together
        keys_of = [
            pl.BlockSpec((1, length, features), lambda b, n, i, first=part * slabs: (b, 0, first + n))
            for part in (1, 2)
        ]
        given = [
            # Reshaped: the interpreter expects values that vary along no mesh axis, as all that are computed in here.
            (words.reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM)),
            (ids[:, None], pl.BlockSpec((1, 1, self.queries), lambda b, n, i: (b, 0, i))),
            (ids[:, :, None], pl.BlockSpec((1, length, 1), lambda b, n, i: (b, 0, 0))),
            (qkv, self._queries_of(0)), (qkv, keys_of[0]), (qkv, keys_of[1]), *more,
        ]  # fmt: skip
        return pl.pallas_call(
            functools.partial(kernel, self), grid=(self.rows, slabs, length // self.queries),
            in_specs=[spec for _, spec in given], out_specs=out_specs, out_shape=out_shape,
            scratch_shapes=scratch_shapes, interpret=self.interpret, name=name,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        )(*(array for array, _ in given))  # fmt: skip

    def _pad(self, x: jax.Array, value: int = 0) -> jax.Array:
        """Pads axis 1 to `padded_length`."""
        widths = [(0, 0), (0, self.padded_length - self.length), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, widths, constant_values=value) if self.padded_length > self.length else x

    def _queries_of(self, first: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.queries, self.features), lambda b, n, i: (b, i, first + n))

    @property
    def _log_sum_shape(self) -> tuple[int, ...]:
        return self.rows, self.heads // self.heads_together, self.heads_together, self.padded_length

    def _log_sum_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, self.heads_together, self.queries), lambda b, n, i: (b, n, 0, i))

    # --- Inside of the kernels ---------------------------------------------------------------------------------------

    def features_of(self, c: int) -> slice:
        """Returns the place of head `c` of this grid step among its S features."""
        return slice(c * self.head, (c + 1) * self.head)

    def only(self, c: int, x: jax.Array) -> jax.Array:
        """Zeroes the features of all other heads than `c` in x [Q, S].

        A product with it is then one of head `c`, for whose features no lanes need to be moved. It takes as long as one
        of H features, for a TPU's matrix units are at least as wide as S = `LANES`.
        """
        if self.heads_together == 1:
            return x
        feature, own = _iota((1, self.features), 1), self.features_of(c)
        return jnp.where((feature >= own.start) & (feature < own.stop), x, jnp.zeros((), x.dtype))

    def mask(self, query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
        """Returns which keys the queries attend to, bool [L, Q], from sequence ids [1, Q] and [L, 1]."""
        mask = key_ids == query_ids
        if self.causal:
            mask &= _iota((self.padded_length, 1), 0) <= self._query_positions()
        return mask

    def scores(self, q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps scaled queries [Q, S] of one head and keys [L, S] to scores fp32 [L, Q]."""
        return jnp.where(mask, _dot(k, q, _NT), float(jnp.finfo(jnp.float32).min))

    def keep(self, words: Any, c: int) -> jax.Array:
        """Returns the dropout mask of head `c` of this grid step, bool [L, Q]."""
        row, head = pl.program_id(0), pl.program_id(1) * self.heads_together + c
        first = ((head * self.length + self._query_positions()) * self.length).astype(jnp.uint32)  # of each query
        key = _iota((self.padded_length, 1), 0).astype(jnp.uint32)
        return is_kept(key, first + words[2 * row], words[2 * row + 1], self.dropout_rate)

    @property
    def keep_scale(self) -> float:
        return 1 / (1 - self.dropout_rate)

    def _query_positions(self) -> jax.Array:
        return pl.program_id(2) * self.queries + _iota((1, self.queries), 1)


def _forward_kernel(
    this: _Kernels, words: Any, query_ids: Any, key_ids: Any, q_block: Any, k_block: Any, v_block: Any,
    context_block: Any, log_sum_block: Any,
) -> None:  # fmt: skip
    dtype, k = q_block.dtype, k_block[0]
    mask, v_t, contexts = this.mask(query_ids[0], key_ids[0]), v_block[0].T, []
    q = q_block[0] * jnp.asarray(this.head**-0.5, dtype)
    for c in range(this.heads_together):
        scores = this.scores(this.only(c, q), k, mask)
        largest = jnp.max(scores, axis=0, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=0, keepdims=True)
        if this.dropout_rate:
            weights = jnp.where(this.keep(words, c), weights, 0.0)
        context = _dot(v_t[this.features_of(c)], weights.astype(dtype), _NN)  # [H, Q]
        contexts.append(context * (this.keep_scale / total))
        log_sum_block[0, 0, c : c + 1] = largest + jnp.log(total)
    context_block[0] = jnp.concatenate(contexts).T.astype(dtype)


def _backward_kernel(
    this: _Kernels, words: Any, query_ids: Any, key_ids: Any, q_block: Any, k_block: Any, v_block: Any,
    log_sum_block: Any, gradient_block: Any, qkv_gradients: Any, k_sum: Any, v_sum: Any,
) -> None:  # fmt: skip
    step, dtype, k, v = pl.program_id(2), q_block.dtype, k_block[0], v_block[0]
    mask, k_t, q_gradients = this.mask(query_ids[0], key_ids[0]), k.T, []
    q, gradient = q_block[0] * jnp.asarray(this.head**-0.5, dtype), gradient_block[0]

    @pl.when(step == 0)
    def _clear() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    for c in range(this.heads_together):
        q_c, gradient_c = this.only(c, q), this.only(c, gradient)
        probabilities = jnp.exp(this.scores(q_c, k, mask) - log_sum_block[0, 0, c : c + 1])
        dropped = jnp.where(this.keep(words, c), probabilities, 0.0) if this.dropout_rate else probabilities
        v_sum[...] += _dot(dropped.astype(dtype), gradient_c, _NN)
        weighted = dropped * _dot(v, gradient_c, _NT)
        mean = jnp.sum(weighted, axis=0, keepdims=True)
        score_gradient = (weighted - probabilities * mean).astype(dtype)
        k_sum[...] += _dot(score_gradient, q_c, _NN)
        q_gradients.append(_dot(k_t[this.features_of(c)], score_gradient, _NN))  # [H, Q]
    q_gradient = jnp.concatenate(q_gradients).T * (this.keep_scale * this.head**-0.5)
    queries = pl.ds(pl.multiple_of(step * this.queries, this.queries), this.queries)
    qkv_gradients[0, 0, queries] = q_gradient.astype(dtype)

    @pl.when(step == pl.num_programs(2) - 1)
    def _write() -> None:
        qkv_gradients[1, 0] = (k_sum[...] * this.keep_scale).astype(dtype)
        qkv_gradients[2, 0] = (v_sum[...] * this.keep_scale).astype(dtype)


def _dot(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
