"""Training state: parameters, optimizer moments and counters, initialized directly into their shardings."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from bert_jax.model.bert import Parameters


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Pytree of arrays, or of their shapes or shardings. Counters are int32 scalars.

    `step` counts consumed batches, with applied or skipped updates. `nonfinite_steps` counts skipped updates,
    `nonfinite_streak` the current number of them in a row.
    """

    step: Any
    parameters: Parameters
    optimizer_state: Any
    nonfinite_steps: Any
    nonfinite_streak: Any


@dataclass(frozen=True)
class StateSpec:
    """Plan of a state: the model's graph, shapes and shardings, and the function that makes it.

    `moments` has the shardings of each parameter's moments, in which its update is computed, too. Frozen parts of the
    model have no moments and are not in it.
    """

    graph: nnx.GraphDef
    abstract: TrainState  # of jax.ShapeDtypeStruct with shardings
    shardings: TrainState
    moments: Parameters  # shardings
    seed: int
    initialize: Any  # (key of the seed, given parts of the parameters) -> TrainState; jitted

    def make(self, given: Parameters | None = None) -> TrainState:
        """Makes the initial state, directly in its shardings; `given` parts of the parameters replace random ones."""
        return self.initialize(key_data(self.seed), given)

    def trained(self, tree: Parameters) -> Parameters:
        """Drops the frozen parts of the model from a tree like the parameters."""
        return {part: value for part, value in tree.items() if part in self.moments}


def key_data(seed: int) -> np.ndarray:
    """Returns the key of a seed as numbers, a program's argument on any number of hosts."""
    return jax.device_get(jax.random.key_data(jax.random.key(seed)))
