"""Self-attention as a Pallas kernel for GPUs, compiled by Triton, with dropout: no array of L x L leaves a core.

FlashAttention-2 (Dao 2023, arXiv:2307.08691): a program attends from a block of queries to one block of keys after
another, and the backward pass has a kernel for the queries and one for the keys and values. Each hashes the dropout
mask again: the same mask as `dropout.dropout_mask` draws. Two neighbouring keys share a random word there, so the keys
of a block are read as two halves, of even and of odd positions, to which one hash gives its low and its high bits. The
order of keys does not matter to attention.

jax 0.12 deprecates Pallas's Triton backend in favour of Mosaic GPU and `jax_triton`, without a date of its removal.

Shape letters: B rows, L tokens, N heads, H features of a head, Q queries and K keys of a block. L is padded to a
multiple of K.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bert_jax.model.dropout import LEVELS, hash_number, keep_levels, key_words
from bert_jax.model.layers import Key
from bert_jax.model.workarounds import on_every_axis, vary_like

HEAD_SIZES = (16, 32, 64, 128)
"""Features of a head that the kernel supports: a block has sizes that are powers of two."""

_LARGEST_KEYS = 128  # Two halves of 64: with 64 queries, the scores of a block fill a third of a core's registers.
_SMALLEST_KEYS = 32  # Products need at least 16 keys of each half.
_LARGEST_QUERIES = 64
_QUERIES_OF_KEYS = 32
_PADDING = -1  # Sequence id of the positions that round L up: no position of the row sees them.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def triton_attention(
    qkv: jax.Array, sequence_ids: jax.Array, keys: Key | None, *, dropout_rate: float, causal: bool,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """Maps q, k, v [B, L, 3, N, H] to the context [B, L, N, H]; H must be one of `HEAD_SIZES`.

    Positions attend as in `attention_mask` of sequence_ids int32 [B, L]. The dropout mask is that of
    `dropout_mask((B, N, L, L), dropout_rate, keys)`; without keys nothing is dropped. With `interpret` it runs on any
    platform, slowly. It was compiled for GPUs, and has not been run on one.
    """
    rows, length, _, heads, head = qkv.shape
    rate = 0.0 if keys is None else dropout_rate
    words = jnp.zeros((rows, 2), jnp.uint32) if keys is None else key_words(keys)
    return _attend(qkv, sequence_ids, words, _Kernels(rows, length, heads, head, rate, causal, interpret))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(qkv: jax.Array, sequence_ids: jax.Array, words: jax.Array, kernels: "_Kernels") -> jax.Array:
    return _attend_forward(qkv, sequence_ids, words, kernels)[0]


def _attend_forward(
    qkv: jax.Array, sequence_ids: jax.Array, words: jax.Array, kernels: "_Kernels"
) -> tuple[jax.Array, Any]:
    context, log_sums = on_every_axis(kernels.forward)(qkv, sequence_ids, words)
    context, log_sums = checkpoint_name((vary_like(qkv, context), log_sums), "fused_attention")
    return context, (qkv, sequence_ids, words, context, log_sums)


def _attend_backward(kernels: "_Kernels", saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return vary_like(gradient, on_every_axis(kernels.backward)(*saved, gradient)), None, None


_attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The kernels for arrays of given sizes."""

    rows: int
    length: int
    heads: int
    head: int
    dropout_rate: float
    causal: bool
    interpret: bool

    @property
    def keys(self) -> int:
        """K."""
        return min(max(pl.next_power_of_2(self.length), _SMALLEST_KEYS), _LARGEST_KEYS)

    @property
    def queries(self) -> int:
        """Q."""
        return min(self.keys, _LARGEST_QUERIES)

    @property
    def queries_of_keys(self) -> int:
        """Q of the kernel for keys and values, whose sums take as many registers as the scores."""
        return min(self.keys, _QUERIES_OF_KEYS)

    @property
    def padded_length(self) -> int:
        return pl.cdiv(self.length, self.keys) * self.keys

    # --- Calls of the kernels ----------------------------------------------------------------------------------------

    def forward(self, qkv: jax.Array, sequence_ids: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps q, k, v [B, L, 3, N, H] to the context [B, L, N, H] and log sums fp32 [B, N, padded L]."""
        shape = (self.rows, self.padded_length, self.heads, self.head)
        context, log_sums = self._call(
            _forward_kernel, "attention_forward", self.queries, (qkv, sequence_ids, words), (),
            (
                jax.ShapeDtypeStruct(shape, qkv.dtype),
                jax.ShapeDtypeStruct((self.rows, self.heads, self.padded_length), jnp.float32),
            ),
        )  # fmt: skip
        return context[:, : self.length], log_sums

    def backward(
        self, qkv: jax.Array, sequence_ids: jax.Array, words: jax.Array, context: jax.Array, log_sums: jax.Array,
        gradient: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Maps the arguments and results of `forward` and the gradient [B, L, N, H] of the context to that of qkv."""
        means = jnp.einsum("blnh,blnh->bnl", context, gradient, preferred_element_type=jnp.float32)
        more = self._pad(gradient), log_sums, jnp.pad(means, [(0, 0), (0, 0), (0, self.padded_length - self.length)])
        shape = jax.ShapeDtypeStruct((self.rows, self.padded_length, self.heads, self.head), qkv.dtype)
        inputs = qkv, sequence_ids, words
        q = self._call(_query_kernel, "attention_backward_queries", self.queries, inputs, more, shape)
        pairs = jax.eval_shape(self.in_pairs, shape)
        k, v = self._call(_key_kernel, "attention_backward_keys", self.keys, inputs, more, (pairs, pairs))
        return jnp.stack([q, k.reshape(q.shape), v.reshape(q.shape)], axis=2)[:, : self.length]

    def _call(
        self, kernel: Callable[..., None], name: str, block: int, inputs: tuple[jax.Array, jax.Array, jax.Array],
        more: tuple[jax.Array, ...], out_shape: Any,
    ) -> Any:  # fmt: skip
        qkv, sequence_ids, words = inputs
        qkv, ids = self._pad(qkv), self._pad(sequence_ids, _PADDING)
        return pl.pallas_call(
            functools.partial(kernel, self), grid=(self.padded_length // block, self.heads, self.rows),
            out_shape=out_shape, interpret=self.interpret, name=name,
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        )(words, qkv, ids, self.in_pairs(qkv), self.in_pairs(ids), *more)  # fmt: skip

    def in_pairs(self, x: jax.Array) -> jax.Array:
        """Reshapes x [B, padded L, ...] to [B, padded L / 2, 2, ...], so that a kernel can read every other token."""
        return x.reshape(self.rows, -1, 2, *x.shape[2:])

    def _pad(self, x: jax.Array, value: int = 0) -> jax.Array:
        """Pads axis 1 to `padded_length`."""
        widths = [(0, 0), (0, self.padded_length - self.length), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, widths, constant_values=value) if self.padded_length > self.length else x

    # --- Inside of the kernels ---------------------------------------------------------------------------------------
    # Positions and sequence ids of queries and keys are columns and rows of scores, or rows and columns.

    def pair_slice(self, block: Any) -> Any:
        """Returns the pairs of keys of a block, for arrays of `in_pairs`."""
        return pl.ds(block * (self.keys // 2), self.keys // 2)

    def pairs(self, block: Any) -> jax.Array:
        """Returns the numbers of these pairs, int32 [K / 2]."""
        return block * (self.keys // 2) + jnp.arange(self.keys // 2)

    def hasher(self, words: Any) -> Callable[[jax.Array, jax.Array], jax.Array | None]:
        """Returns a function of positions of queries and of pairs of keys, which draws a random word, uint32, for each.

        Without dropout it returns None.
        """
        if self.dropout_rate == 0.0:
            return lambda query, pair: None
        head, row = pl.program_id(1), pl.program_id(2)
        first, second, pairs = words[row, 0], words[row, 1], -(-self.length // 2)

        def draw(query: jax.Array, pair: jax.Array) -> jax.Array:
            return hash_number(((head * self.length + query) * pairs + pair).astype(jnp.uint32), first, second)

        return draw

    def drop(self, x: jax.Array, words: jax.Array | None, parity: int) -> jax.Array:
        """Zeroes the dropped elements of x, of the keys of one parity; does not scale the others."""
        if words is None:
            return x
        bits = (words >> (16 * parity)) & (LEVELS - 1)
        return jnp.where(bits.astype(jnp.int32) < keep_levels(self.dropout_rate), x, 0.0)

    def masked(
        self, scores: jax.Array, ids: tuple[jax.Array, jax.Array], query: jax.Array, pair: jax.Array, parity: int
    ) -> jax.Array:
        """Masks the scores of the keys of one parity; `ids` are the sequence ids of the queries and of the keys."""
        mask = ids[0] == ids[1]
        if self.causal:
            mask &= 2 * pair + parity <= query
        return jnp.where(mask, scores, _LOWEST)

    def keys_seen(self, query_block: Any) -> Any:
        """Returns the number of blocks of keys that a block of queries may attend to, from the first."""
        blocks = self.padded_length // self.keys
        return jnp.minimum(pl.cdiv((query_block + 1) * self.queries, self.keys), blocks) if self.causal else blocks

    def scaled(self, q: jax.Array) -> jax.Array:
        return q * jnp.asarray(self.scale, q.dtype)

    @property
    def scale(self) -> float:
        return self.head**-0.5

    @property
    def keep_scale(self) -> float:
        return LEVELS / keep_levels(self.dropout_rate)


def _forward_kernel(
    this: _Kernels, words: Any, qkv: Any, ids: Any, pairs: Any, pair_ids: Any, context: Any, log_sums: Any
) -> None:
    (block, head, row), draw = (pl.program_id(axis) for axis in range(3)), this.hasher(words)
    queries = pl.ds(block * this.queries, this.queries)
    query = (block * this.queries + jnp.arange(this.queries))[:, None]
    q, query_ids = this.scaled(qkv[row, queries, 0, head, :]), ids[row, queries][:, None]

    def attend(key_block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, found = carry
        keys, pair = this.pair_slice(key_block), this.pairs(key_block)[None, :]
        random = draw(query, pair)
        scores = []
        for parity in (0, 1):
            both_ids = query_ids, pair_ids[row, keys, parity][None, :]
            product = _dot(q, pairs[row, keys, parity, 1, head, :].T)
            scores.append(this.masked(product, both_ids, query, pair, parity))
        larger = jnp.maximum(largest, jnp.maximum(scores[0].max(axis=1), scores[1].max(axis=1)))
        decay = jnp.exp(largest - larger)
        total, found = total * decay, found * decay[:, None]
        for parity in (0, 1):
            weights = jnp.exp(scores[parity] - larger[:, None])
            total += weights.sum(axis=1)
            found += _dot(this.drop(weights, random, parity).astype(q.dtype), pairs[row, keys, parity, 2, head, :])
        return larger, total, found

    start = jnp.full(this.queries, _LOWEST), jnp.zeros(this.queries), jnp.zeros((this.queries, this.head))
    largest, total, found = jax.lax.fori_loop(0, this.keys_seen(block), attend, start)
    context[row, queries, head, :] = (found * (this.keep_scale / total)[:, None]).astype(context.dtype)
    log_sums[row, head, queries] = largest + jnp.log(total)


def _query_kernel(
    this: _Kernels, words: Any, qkv: Any, ids: Any, pairs: Any, pair_ids: Any, gradients: Any, log_sums: Any,
    means: Any, found: Any,
) -> None:  # fmt: skip
    """Computes the gradient of a block of queries."""
    (block, head, row), draw = (pl.program_id(axis) for axis in range(3)), this.hasher(words)
    queries = pl.ds(block * this.queries, this.queries)
    query = (block * this.queries + jnp.arange(this.queries))[:, None]
    q, query_ids = this.scaled(qkv[row, queries, 0, head, :]), ids[row, queries][:, None]
    gradient = gradients[row, queries, head, :]
    log_sum, mean = log_sums[row, head, queries][:, None], means[row, head, queries][:, None]

    def attend(key_block: jax.Array, q_gradient: jax.Array) -> jax.Array:
        keys, pair = this.pair_slice(key_block), this.pairs(key_block)[None, :]
        random = draw(query, pair)
        for parity in (0, 1):
            k, v = (pairs[row, keys, parity, part, head, :] for part in (1, 2))
            both_ids = query_ids, pair_ids[row, keys, parity][None, :]
            probabilities = jnp.exp(this.masked(_dot(q, k.T), both_ids, query, pair, parity) - log_sum)
            weighted = this.drop(_dot(gradient, v.T) * this.keep_scale, random, parity)
            q_gradient += _dot((probabilities * (weighted - mean)).astype(k.dtype), k)
        return q_gradient

    q_gradient = jax.lax.fori_loop(0, this.keys_seen(block), attend, jnp.zeros((this.queries, this.head)))
    found[row, queries, head, :] = (q_gradient * this.scale).astype(found.dtype)


def _key_kernel(
    this: _Kernels, words: Any, qkv: Any, ids: Any, pairs: Any, pair_ids: Any, gradients: Any, log_sums: Any,
    means: Any, k_found: Any, v_found: Any,
) -> None:  # fmt: skip
    """Computes the gradients of a block of keys and values; scores are [K / 2, Q], first factors of both products."""
    (block, head, row), draw = (pl.program_id(axis) for axis in range(3)), this.hasher(words)
    keys, pair, count = this.pair_slice(block), this.pairs(block)[:, None], this.queries_of_keys
    k, v = ([pairs[row, keys, parity, part, head, :] for parity in (0, 1)] for part in (1, 2))
    key_ids = [pair_ids[row, keys, parity][:, None] for parity in (0, 1)]

    def attend(query_block: jax.Array, carry: tuple[tuple[jax.Array, jax.Array], ...]) -> Any:
        queries = pl.ds(query_block * count, count)
        query = (query_block * count + jnp.arange(count))[None, :]
        q, query_ids = this.scaled(qkv[row, queries, 0, head, :]), ids[row, queries][None, :]
        gradient = gradients[row, queries, head, :]
        log_sum, mean = log_sums[row, head, queries][None, :], means[row, head, queries][None, :]
        random, sums = draw(query, pair), []
        for parity, (k_sum, v_sum) in enumerate(carry):
            scores = this.masked(_dot(k[parity], q.T), (query_ids, key_ids[parity]), query, pair, parity)
            probabilities = jnp.exp(scores - log_sum)
            v_sum += _dot(this.drop(probabilities, random, parity).astype(q.dtype), gradient)
            weighted = this.drop(_dot(v[parity], gradient.T) * this.keep_scale, random, parity)
            k_sum += _dot((probabilities * (weighted - mean)).astype(q.dtype), q)
            sums.append((k_sum, v_sum))
        return tuple(sums)

    first = block * this.keys // count if this.causal else 0  # no query before a key sees it
    zeros = jnp.zeros((this.keys // 2, this.head))
    sums = jax.lax.fori_loop(first, this.padded_length // count, attend, ((zeros, zeros),) * 2)
    for parity, (k_sum, v_sum) in enumerate(sums):
        k_found[row, keys, parity, head, :] = k_sum.astype(k_found.dtype)
        v_found[row, keys, parity, head, :] = (v_sum * this.keep_scale).astype(v_found.dtype)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
