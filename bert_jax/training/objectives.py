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
from bert_jax.model.bert import VocabularyProjection
from bert_jax.training.cross_entropy import projected_cross_entropy, weighted_cross_entropy

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


def pretraining_sums(model: Any, batch: Batch[jax.Array], keys: jax.Array | None = None, *, nsp: bool = True) -> Sums:
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


def pretraining(*, nsp: bool) -> Objective:
    """Returns the paper's objective: the masked-LM loss plus, where `nsp`, the next-sentence loss.

    Without `nsp` the next-sentence head is not trained and has no loss and no accuracy.
    """

    def sums(model: Any, batch: Batch[jax.Array], keys: jax.Array | None) -> Sums:
        return pretraining_sums(model, batch, keys, nsp=nsp)

    def counts(batch: Batch[jax.Array]) -> Sums:
        return {name: count for name, count in denominators(batch).items() if nsp or not name.startswith("nsp_")}

    return Objective(sums, counts, ("mlm_loss", "nsp_loss") if nsp else ("mlm_loss",))
