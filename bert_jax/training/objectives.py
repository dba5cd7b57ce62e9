"""The pre-training losses and their metrics, as sums: what is divided by is always a sum over the whole global batch.

A batch is worth the same however it is cut over devices and microbatches, because numerators add up and the
denominators, which are plain counts of weights, are known before anything is computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Objective:
    """What a training step makes smaller, and what it counts beside.

    Attributes:
      sums: (model, microbatch, dropout's keys [B]) to the numerators of all losses and metrics, summed over the rows.
      denominators: a whole batch, whatever its leading axes, to what each of the sums is divided by.
      losses: which of the sums, divided, add up to the loss.
    """

    sums: Callable[[Any, Mapping[str, jax.Array], jax.Array | None], Sums]
    denominators: Callable[[Mapping[str, jax.Array]], Sums]
    losses: tuple[str, ...]


def weighted_cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of weighted cross entropies in nats, sum of weights on correct predictions), fp32 scalars.

    logits [..., C] with -inf for classes that do not exist; labels int32 and weights fp32 [...].
    """
    logits = logits.astype(jnp.float32)
    of_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    cross_entropy = jax.nn.logsumexp(logits, axis=-1) - of_label
    # A filling slot may hold any label: its weight of zero has to win over whatever its cross entropy is.
    losses = jnp.where(weights == 0, 0.0, weights * cross_entropy)
    return losses.sum(), (weights * _is_argmax(*jax.lax.stop_gradient((logits, labels, of_label)))).sum()


def _is_argmax(logits: jax.Array, labels: jax.Array, of_label: jax.Array) -> jax.Array:
    """`jnp.argmax(logits, axis=-1) == labels`, as reductions that XLA for CPUs vectorises too."""
    largest = logits.max(axis=-1)
    comes_before = jnp.arange(logits.shape[-1]) < labels[..., None]
    return (of_label == largest) & ~jnp.any((logits == largest[..., None]) & comes_before, axis=-1)


def pretraining_sums(
    mlm_logits: jax.Array | None, nsp_logits: jax.Array | None, batch: Mapping[str, jax.Array]
) -> Sums:
    """Numerators of both losses and accuracies over a (micro)batch; nothing for a head that is not there."""
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


def denominators(batch: Mapping[str, jax.Array]) -> Sums:
    """What the sums of a whole batch are divided by: its predictions and its pairs."""
    predictions, pairs = batch["masked_weights"].sum(), batch["next_sentence_weights"].sum()
    return {"mlm_loss": predictions, "mlm_accuracy": predictions, "nsp_loss": pairs, "nsp_accuracy": pairs}


def divide(sums: Sums, by: Sums) -> Sums:
    """Means over the global batch; 0 where there was nothing to average."""
    return {
        name: jnp.where(by[name] == 0, 0.0, total / jnp.where(by[name] == 0, 1.0, by[name]))
        for name, total in sums.items()
    }


NEXT_SENTENCE_PARTS = ("pooler", "nsp_head")
"""Parts of the model that the next-sentence loss alone trains."""


def pretraining(*, nsp: bool) -> Objective:
    """Returns the paper's objective: the masked-LM loss plus, where `nsp`, the next-sentence loss.

    Without `nsp` the next-sentence head, which nothing trains, has no loss and no accuracy.
    """

    def sums(model: Any, batch: Mapping[str, jax.Array], keys: jax.Array | None) -> Sums:
        mlm_logits, nsp_logits = model(batch, keys)
        return pretraining_sums(mlm_logits, nsp_logits if nsp else None, batch)

    def counts(batch: Mapping[str, jax.Array]) -> Sums:
        return {name: count for name, count in denominators(batch).items() if nsp or not name.startswith("nsp_")}

    return Objective(sums, counts, ("mlm_loss", "nsp_loss") if nsp else ("mlm_loss",))
