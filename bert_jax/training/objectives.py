"""Pre-training losses and metrics as numerators and denominators, both summed over the global batch.

The result does not depend on how devices and microbatches split a batch: numerators add up, and the denominators, which
are sums of weights, are known before the forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch
from bert_jax.model.workarounds import is_argmax

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Objective:
    """Training objective: the loss and its auxiliary metrics.

    Attributes:
      sums: maps (model, microbatch, dropout keys [B]) to the numerators of losses and metrics, summed over rows.
      denominators: maps the global batch, with any leading axes, to the denominator of each sum.
      losses: names of the means that add up to the loss.
    """

    sums: Callable[[Any, Batch[jax.Array], jax.Array | None], Sums]
    denominators: Callable[[Batch[jax.Array]], Sums]
    losses: tuple[str, ...]


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


def pretraining_sums(mlm_logits: jax.Array | None, nsp_logits: jax.Array | None, batch: Batch[jax.Array]) -> Sums:
    """Sums the numerators of both losses and accuracies over a (micro)batch; skips a missing head."""
    sums: Sums = {}
    if mlm_logits is not None:
        sums["mlm_loss"], sums["mlm_accuracy"] = weighted_cross_entropy(
            mlm_logits, batch["masked_ids"], batch["masked_weights"]
        )
    if nsp_logits is not None:
        sums["nsp_loss"], sums["nsp_accuracy"] = weighted_cross_entropy(
            nsp_logits, batch["next_sentence_labels"], batch["next_sentence_weights"]
        )
    return sums


def denominators(batch: Batch[jax.Array]) -> Sums:
    """Computes the denominators of a global batch: its weights of predictions and of pairs."""
    predictions, pairs = batch["masked_weights"].sum(), batch["next_sentence_weights"].sum()
    return {"mlm_loss": predictions, "mlm_accuracy": predictions, "nsp_loss": pairs, "nsp_accuracy": pairs}


def divide(sums: Sums, by: Sums) -> Sums:
    """Divides sums to means over the global batch; 0 for a denominator of 0."""
    return {
        name: jnp.where(by[name] == 0, 0.0, total / jnp.where(by[name] == 0, 1.0, by[name]))
        for name, total in sums.items()
    }


NEXT_SENTENCE_PARTS = ("pooler", "nsp_head")
"""Parts of the model that only the next-sentence loss trains."""


def pretraining(*, nsp: bool) -> Objective:
    """Returns the paper's objective: the masked-LM loss plus, where `nsp`, the next-sentence loss.

    Without `nsp` the next-sentence head is not trained and has no loss and no accuracy.
    """

    def sums(model: Any, batch: Batch[jax.Array], keys: jax.Array | None) -> Sums:
        mlm_logits, nsp_logits = model(batch, keys)
        return pretraining_sums(mlm_logits, nsp_logits if nsp else None, batch)

    def counts(batch: Batch[jax.Array]) -> Sums:
        return {name: count for name, count in denominators(batch).items() if nsp or not name.startswith("nsp_")}

    return Objective(sums, counts, ("mlm_loss", "nsp_loss") if nsp else ("mlm_loss",))
