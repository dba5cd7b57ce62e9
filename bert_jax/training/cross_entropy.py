"""Cross entropy of logits, and of the masked-LM head's projection in chunks of predictions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.bert import VocabularyProjection
from bert_jax.model.workarounds import is_argmax, vary_like


def weighted_cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of weighted cross entropies in nats, sum of weights of correct predictions), fp32 scalars.

    Expects logits [..., C] with -inf for padding classes, labels int32 [...] and weights fp32 [...].
    """
    logits = logits.astype(jnp.float32)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    cross_entropy = jax.nn.logsumexp(logits, axis=-1) - label_logits
    # A padding slot may hold any label, with an infinite cross entropy: a weight of zero must give zero.
    losses = jnp.where(weights == 0, 0.0, weights * cross_entropy)
    return losses.sum(), (weights * is_argmax(*jax.lax.stop_gradient((logits, labels, label_logits)))).sum()


CHUNK_BYTES = 64 << 20
CHUNK_PREDICTIONS = 1024
"""A chunk of predictions is as large as either allows.

The gradient of the word embeddings is read and written once per chunk: with fewer predictions, the memory's bandwidth
would limit the chunk's products.
"""


def predictions_per_chunk(predictions: int, vocab_size: int) -> int:
    """Returns the size of equal chunks of predictions, a multiple of 8, or `predictions` if one chunk has them all."""
    most = max(CHUNK_PREDICTIONS, CHUNK_BYTES // (4 * vocab_size))
    if predictions <= most:
        return predictions
    chunks = -(-predictions // most)
    return -(-predictions // chunks // 8) * 8


@jax.named_scope("mlm_loss")
def projected_cross_entropy(
    projection: VocabularyProjection, labels: jax.Array, weights: jax.Array, chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns `weighted_cross_entropy` of the projection's logits, without the logits of more than one chunk in memory.

    Expects labels int32 [B, P] and weights fp32 [B, P]; only the projection's arrays are differentiated. A chunk is
    `chunk` predictions of all B * P, by default `predictions_per_chunk`.
    """
    chunk = chunk or predictions_per_chunk(labels.size, len(projection.bias))
    if chunk >= labels.size:
        return weighted_cross_entropy(projection.logits(), labels, weights)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(labels.size, *x.shape[labels.ndim :])
        padding = [(0, -labels.size % chunk), *((0, 0) for _ in x.shape[1:])]  # weights of 0
        return jnp.pad(x, padding).reshape(-1, chunk, *x.shape[1:])

    return _chunked_cross_entropy(
        projection.vocab_size, split(projection.hidden), projection.word_embeddings, projection.bias, split(labels),
        split(weights),
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_cross_entropy(
    vocab_size: int, hidden: jax.Array, word_embeddings: jax.Array, bias: jax.Array, labels: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Sums `weighted_cross_entropy` over chunks: hidden [N, C, D], labels and weights [N, C]."""
    words = word_embeddings.astype(hidden.dtype)

    def add_chunk(total: Any, chunk: Any) -> tuple[Any, None]:
        hidden, labels, weights = chunk
        logits = VocabularyProjection(hidden, words, bias, vocab_size).logits()
        return jax.tree.map(jnp.add, total, weighted_cross_entropy(logits, labels, weights)), None

    zeros = vary_like(hidden, (jnp.float32(0), jnp.float32(0)))
    result: tuple[jax.Array, jax.Array] = jax.lax.scan(add_chunk, zeros, (hidden, labels, weights))[0]
    return result


def _chunked_cross_entropy_forward(
    vocab_size: int, hidden: jax.Array, word_embeddings: jax.Array, bias: jax.Array, labels: jax.Array,
    weights: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:  # fmt: skip
    """Computes the gradient of the loss beside it, while a chunk's logits exist: none are recomputed.

    The backward pass multiplies it by the scalar gradient of the loss (Hsu et al. 2024, arXiv:2410.10989).
    """
    dtype = hidden.dtype
    words = word_embeddings.astype(dtype)

    def add_chunk(total: Any, chunk: Any) -> tuple[Any, jax.Array]:
        hidden, labels, weights = chunk
        logits = VocabularyProjection(hidden, words, bias, vocab_size).logits()
        sums = weighted_cross_entropy(logits, labels, weights)
        _, softmax_times = jax.vjp(functools.partial(jax.nn.logsumexp, axis=-1), logits)
        is_label = jnp.arange(logits.shape[-1]) == labels[:, None]
        gradient = softmax_times(weights)[0] - jnp.where(is_label, weights[:, None], 0.0)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        words_gradient = product("nv,nd->vd", gradient.astype(dtype), hidden)
        hidden_gradient = product("nv,vd->nd", gradient.astype(dtype), words)
        return jax.tree.map(jnp.add, total, (sums, words_gradient, gradient.sum(axis=0))), hidden_gradient.astype(dtype)

    zeros = (jnp.float32(0), jnp.float32(0)), jnp.zeros_like(word_embeddings), jnp.zeros_like(bias)
    total, hidden_gradient = jax.lax.scan(add_chunk, vary_like(hidden, zeros), (hidden, labels, weights))
    sums, words_gradient, bias_gradient = total
    return sums, (hidden_gradient, words_gradient, bias_gradient)


def _chunked_cross_entropy_backward(
    _: int, gradients: tuple[jax.Array, ...], sums_gradient: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    loss_gradient = sums_gradient[0]
    return *((loss_gradient * gradient).astype(gradient.dtype) for gradient in gradients), None, None


_chunked_cross_entropy.defvjp(_chunked_cross_entropy_forward, _chunked_cross_entropy_backward)
