"""Pre-training losses and metrics as numerators and denominators, both summed over the global batch.

The result does not depend on how devices and microbatches split a batch: numerators add up, and the denominators, which
are sums of weights, are known before the forward pass.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch
from bert_jax.config_keys import PretrainConfig
from bert_jax.model.bert import VocabularyProjection
from bert_jax.model.workarounds import is_argmax

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


def _pretraining_sums(model: Any, batch: Batch[jax.Array], keys: jax.Array | None, *, lm: str, nsp: bool) -> Sums:
    """Sums the numerators of both losses and accuracies over a (micro)batch; skips a missing head.

    `model` is called as `BertForPreTraining`, with a dropout key per row [B] or None.
    """

    def lm_sums(projection: VocabularyProjection) -> tuple[jax.Array, jax.Array]:
        return projected_cross_entropy(projection, batch["masked_ids"], batch["masked_weights"])

    language_model, nsp_logits = model(batch, keys, mlm_output=lm_sums)
    sums: Sums = {}
    if language_model is not None:
        sums[f"{lm}_loss"], sums[f"{lm}_accuracy"] = language_model
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


def pretraining(*, nsp: bool, lm: str = "mlm") -> Objective:
    """Returns the paper's objective: the masked-LM loss plus, where `nsp`, the next-sentence loss.

    With `lm` "ltr" it is the loss of every next token, and its name is `ltr_loss`. Without `nsp` the pooler and the
    next-sentence head are not trained, and there is no next-sentence loss or accuracy.
    """

    def denominators(batch: Batch[jax.Array]) -> Sums:
        predictions, pairs = batch["masked_weights"].sum(), batch["next_sentence_weights"].sum()
        counts = {f"{lm}_loss": predictions, f"{lm}_accuracy": predictions}
        return counts | {"nsp_loss": pairs, "nsp_accuracy": pairs} if nsp else counts

    return Objective(
        functools.partial(_pretraining_sums, lm=lm, nsp=nsp), denominators,
        {f"{lm}_loss": 1.0, "nsp_loss": 1.0} if nsp else {f"{lm}_loss": 1.0},
        untrained=() if nsp else ("pooler", "nsp_head"),
    )  # fmt: skip


def make_objective(config: PretrainConfig) -> Objective:
    """Returns the objective of a phase's config, for its training and its evaluation."""
    return pretraining(nsp=config.objective.nsp is True, lm=config.objective.lm)


def objective_name(config: PretrainConfig) -> str:
    """Returns the parts of the loss, such as "mlm + nsp" or "ltr"."""
    return config.objective.lm + " + nsp" * (config.objective.nsp is True)


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


LOGITS_BYTES = 512 << 20
"""Most bytes of fp32 logits at a time."""


@jax.named_scope("mlm_loss")
def projected_cross_entropy(
    projection: VocabularyProjection, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `weighted_cross_entropy` of the projection's logits.

    Expects labels int32 [B, P] and weights fp32 [B, P]. Logits of more than `LOGITS_BYTES` are computed in equal
    chunks of predictions, each again in the backward pass, so that only those of a chunk are in memory.
    """
    chunks = -(-4 * labels.size * len(projection.word_embeddings) // LOGITS_BYTES)
    if chunks == 1:
        return weighted_cross_entropy(projection.logits(), labels, weights)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(labels.size, *x.shape[labels.ndim :])
        padding = [(0, -labels.size % chunks), *((0, 0) for _ in x.shape[1:])]  # weights of 0
        return jnp.pad(x, padding).reshape(chunks, -1, *x.shape[1:])

    @jax.checkpoint
    def chunk_sums(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, labels, weights = chunk
        return weighted_cross_entropy(replace(projection, hidden=hidden).logits(), labels, weights)

    losses, correct = jax.lax.map(chunk_sums, (split(projection.hidden), split(labels), split(weights)))
    return losses.sum(), correct.sum()
