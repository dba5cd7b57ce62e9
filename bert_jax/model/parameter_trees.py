"""Trees of a model's parameters, by attribute name: values, shapes and rules."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from bert_jax.model.bert import BertForPreTraining, Parameters
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import Key


def initialize(
    model_config: BertConfig, key: Key, *, build: Callable[..., nnx.Module] = BertForPreTraining, **settings: Any
) -> tuple[nnx.GraphDef, Parameters]:
    """Initializes a model and returns (graph, parameters); `settings` go to `build`, the model's class.

    `nnx.merge(graph, parameters)` returns the model. Works under `jax.jit` and `jax.eval_shape`.
    """
    graph, state = nnx.split(build(model_config, key=key, **settings))
    return graph, nnx.to_pure_dict(state)


def abstract_parameters(
    model_config: BertConfig, *, build: Callable[..., nnx.Module] = BertForPreTraining, **settings: Any
) -> tuple[nnx.GraphDef, Parameters, Parameters]:
    """Returns (graph, shapes, info): two trees, of `jax.ShapeDtypeStruct`s and of `ParameterInfo`s.

    Takes the arguments of `initialize`, without the key.
    """
    model = nnx.eval_shape(lambda: build(model_config, key=jax.random.key(0), **settings))
    graph, state = nnx.split(model)
    return graph, nnx.to_pure_dict(state), parameter_info(model)


def parameter_info(model: nnx.Module) -> Parameters:
    """Returns the `ParameterInfo` of each parameter, in a tree like the parameters."""
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    info = jax.tree.map(lambda variable: variable.get_metadata("info"), nnx.state(model), is_leaf=is_variable)
    return nnx.to_pure_dict(info)


def parameter_count(model_config: BertConfig) -> int:
    """Counts the parameters of the model, heads included, vocabulary padding excluded."""
    _, shapes, _ = abstract_parameters(model_config)
    padded = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    padding = model_config.padded_vocab_size - model_config.vocab_size
    return padded - padding * (model_config.hidden_size + 1)
