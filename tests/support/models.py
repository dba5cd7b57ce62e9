"""Models with initial values, made by one program each, and comparisons of their trees.

Without `jax.jit`, JAX compiles every operation of its own.
"""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from bert_jax import model
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import Parameters

SMALL = BertConfig(
    vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip


def assert_close(got: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    """Asserts that the arrays of two trees are close, and names the one that is not."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_relative(got: Any, expected: Any, bound: float, name: str) -> None:
    """Asserts that no error is above a share of the largest expected magnitude."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, name
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error < bound, f"{name}: {error:.2e}"


def initialize(config: BertConfig, seed: int = 0, **settings: Any) -> tuple[nnx.GraphDef, Parameters]:
    """Returns (graph, parameters), as `bert_jax.model.initialize` does; the caller may change the tree."""
    kind = {name: value for name, value in settings.items() if name in ("build", "head")}  # others change no parameter
    return abstract_parameters(config, **settings)[0], jax.tree.map(
        lambda leaf: leaf, _parameters(config, seed, **kind)
    )


@functools.cache
def _parameters(config: BertConfig, seed: int, **kind: Any) -> Parameters:
    return jax.jit(lambda key: model.initialize(config, key, **kind)[1])(jax.random.key(seed))
