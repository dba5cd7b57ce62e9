"""Pre-training losses and metrics as numerators and denominators, both summed over the global batch.

The result does not depend on how devices and microbatches split a batch: numerators add up, and the denominators, which
are sums of weights, are known before the forward pass.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch
from bert_jax.config_keys import PretrainConfig
from bert_jax.model.bert import VocabularyProjection
from bert_jax.model.workarounds import is_argmax, vary_like

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Objective:
    """The loss and its auxiliary metrics, in training and in evaluation.

    Attributes:
      sums: maps (model, microbatch, dropout keys [B] or None) to the numerators of losses and metrics, summed over
        rows.
      denominators: maps the global batch, with any leading axes, to the denominator of each sum.
      weights: weights of the means that add up to the loss, by their names.
      untrained: parts of the model that the loss does not depend on; they keep their values.
    """

    sums: Callable[[Any, Batch[jax.Array], jax.Array | None], Sums]
    denominators: Callable[[Batch[jax.Array]], Sums]
    weights: Mapping[str, float] = field(hash=False)
    untrained: tuple[str, ...] = ()

    def loss(self, means: Mapping[str, Any]) -> Any:
        """Returns the weighted sum of the losses in `means`."""
        return sum(weight * means[name] for name, weight in self.weights.items() if name in means)


def _pretraining_sums(model: Any, batch: Batch[jax.Array], keys: jax.Array | None, *, nsp: bool) -> Sums:
    """Sums the numerators of both losses and accuracies over a (micro)batch; skips a missing head.

    `model` is called as `BertForPreTraining`, with a dropout key per row [B] or None.
    """

    def mlm_sums(projection: VocabularyProjection) -> tuple[jax.Array, jax.Array]:
        return projected_cross_entropy(projection, batch["masked_ids"], batch["masked_weights"])

    mlm, nsp_logits = model(batch, keys, mlm_output=mlm_sums)
    sums: Sums = {}
    if mlm is not None:
        sums["mlm_loss"], sums["mlm_accuracy"] = mlm
    if nsp and nsp_logits is not None:
        sums["nsp_loss"], sums["nsp_accuracy"] = weighted_cross_entropy(
            nsp_logits, batch["next_sentence_labels"], batch["next_sentence_weights"]
        )
    return sums


def divide(sums: Sums, by: Sums) -> Sums:
    """Divides sums to means over the global batch; 0 for a denominator of 0."""
    return {
        name: jnp.where(by[name] == 0, 0.0, total / jnp.where(by[name] == 0, 1.0, by[name]))
        for name, total in sums.items()
    }


def pretraining(*, nsp: bool) -> Objective:
    """Returns the paper's objective: the masked-LM loss plus, where `nsp`, the next-sentence loss.

    Without `nsp` the pooler and the next-sentence head are not trained, and there is no next-sentence loss or accuracy.
    """

    def denominators(batch: Batch[jax.Array]) -> Sums:
        predictions, pairs = batch["masked_weights"].sum(), batch["next_sentence_weights"].sum()
        counts = {"mlm_loss": predictions, "mlm_accuracy": predictions}
        return counts | {"nsp_loss": pairs, "nsp_accuracy": pairs} if nsp else counts

    return Objective(
        functools.partial(_pretraining_sums, nsp=nsp), denominators,
        {"mlm_loss": 1.0, "nsp_loss": 1.0} if nsp else {"mlm_loss": 1.0},
        untrained=() if nsp else ("pooler", "nsp_head"),
    )  # fmt: skip


def make_objective(config: PretrainConfig) -> Objective:
    """Returns the objective of a run's config, for its training and its evaluation."""
    return pretraining(nsp=config.objective.nsp is True)


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
def _chunked_cross_entropy(vocab_size: int, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums `weighted_cross_entropy` over chunks: hidden [N, C, D], word embeddings, bias, labels and weights [N, C]."""
    result: tuple[jax.Array, jax.Array] = _sum_chunks(vocab_size, *arrays, differentiate=False)[0]
    return result


def _chunked_cross_entropy_forward(
    vocab_size: int, *arrays: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Computes the gradient of the loss beside it, while a chunk's logits exist: none are recomputed.

    The backward pass multiplies it by the scalar gradient of the loss (Hsu et al. 2024, arXiv:2410.10989).
    """
    return _sum_chunks(vocab_size, *arrays, differentiate=True)


def _sum_chunks(
    vocab_size: int, hidden: jax.Array, word_embeddings: jax.Array, bias: jax.Array, labels: jax.Array,
    weights: jax.Array, *, differentiate: bool,
) -> tuple[Any, tuple[jax.Array, ...]]:  # fmt: skip
    """Returns the sums over chunks and, if it has to `differentiate`, the gradients of the loss by the first three."""
    dtype = hidden.dtype
    words = word_embeddings.astype(dtype)

    def add_chunk(total: Any, chunk: Any) -> tuple[Any, jax.Array | None]:
        hidden, labels, weights = chunk
        logits = VocabularyProjection(hidden, words, bias, vocab_size).logits()
        sums = weighted_cross_entropy(logits, labels, weights)
        if not differentiate:
            return jax.tree.map(jnp.add, total, (sums, ())), None
        _, softmax_times = jax.vjp(functools.partial(jax.nn.logsumexp, axis=-1), logits)
        is_label = jnp.arange(logits.shape[-1]) == labels[:, None]
        gradient = softmax_times(weights)[0] - jnp.where(is_label, weights[:, None], 0.0)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        words_gradient = product("nv,nd->vd", gradient.astype(dtype), hidden)
        hidden_gradient = product("nv,vd->nd", gradient.astype(dtype), words)
        added = sums, (words_gradient, gradient.sum(axis=0))
        return jax.tree.map(jnp.add, total, added), hidden_gradient.astype(dtype)

    zeros = (jnp.float32(0), jnp.float32(0)), (jnp.zeros_like(word_embeddings), jnp.zeros_like(bias))
    start = vary_like(hidden, zeros if differentiate else (zeros[0], ()))
    (sums, gradients), hidden_gradient = jax.lax.scan(add_chunk, start, (hidden, labels, weights))
    return sums, (hidden_gradient, *gradients)


def _chunked_cross_entropy_backward(
    _: int, gradients: tuple[jax.Array, ...], sums_gradient: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    loss_gradient = sums_gradient[0]
    return *((loss_gradient * gradient).astype(gradient.dtype) for gradient in gradients), None, None


_chunked_cross_entropy.defvjp(_chunked_cross_entropy_forward, _chunked_cross_entropy_backward)
