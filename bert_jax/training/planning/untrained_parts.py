"""Parts of the model that the loss of a run does not depend on; they keep their values."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.model.bert import Parameters
from bert_jax.training.optimizer import AdamState

NEXT_SENTENCE_PARTS = ("pooler", "nsp_head")
"""Parts of the model that only the next-sentence loss trains."""


def leave_untrained(
    optimizer: optax.GradientTransformationExtraArgs, parts: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer: the direction of `parts` of the model is 0, and their moments do not change.

    Variables without a gradient keep their values in the reference, too. Weight decay alone would shrink them, with
    LAMB's trust ratio by the full learning rate at every step. Their moments stay in the state: a later phase may train
    them.
    """

    def restored(new: Any, old: Any) -> Any:
        if not isinstance(new, AdamState):
            return new
        return new._replace(mu={**new.mu, **_pick(parts, old.mu)}, nu={**new.nu, **_pick(parts, old.nu)})

    def update(gradients: Parameters, state: Any, parameters: Any = None, **known: Any) -> tuple[Parameters, Any]:
        direction, updated = optimizer.update(gradients, state, parameters, **known)
        zeros = jax.tree.map(jnp.zeros_like, _pick(parts, direction))
        return {**direction, **zeros}, tuple(map(restored, updated, state))

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _pick(parts: Collection[str], tree: Parameters) -> Parameters:
    return {part: tree[part] for part in parts}
