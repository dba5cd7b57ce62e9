"""Models with initial values, made by one program each: without `jax.jit`, JAX compiles every operation of its own."""

import functools
from typing import Any

import jax
from flax import nnx

from bert_jax import model
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import Parameters


def initialize(config: BertConfig, seed: int = 0, **settings: Any) -> tuple[nnx.GraphDef, Parameters]:
    """Returns (graph, parameters), as `bert_jax.model.initialize` does; the caller may change the tree."""
    kind = {name: value for name, value in settings.items() if name in ("build", "head")}  # others change no parameter
    return abstract_parameters(config, **settings)[0], jax.tree.map(
        lambda leaf: leaf, _parameters(config, seed, **kind)
    )


@functools.cache
def _parameters(config: BertConfig, seed: int, **kind: Any) -> Parameters:
    return jax.jit(lambda key: model.initialize(config, key, **kind)[1])(jax.random.key(seed))
