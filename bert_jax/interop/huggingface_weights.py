"""Converts BERT's weights to and from the names and shapes of Hugging Face's `transformers`.

One table maps each weight to a slice of a parameter: for export and import, of pre-trained and fine-tuned models. In
`transformers` dense weights are [out, in]; query, key and value are separate matrices; layers are numbered; the
vocabulary has no padding.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bert_jax.interop.architectures import ARCHITECTURES
from bert_jax.model import BertConfig
from bert_jax.model.bert import Parameters
from bert_jax.model.task_heads import BertForTask, TaskHead


@dataclass(frozen=True)
class Weight:
    """A weight of `shape` in `transformers`, stored here in the view `parameters[path][index]`.

    A `transposed` weight is [out, in] there and [in..., out...] here, with a separate axis for heads.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"

    def read(self, parameters: Parameters) -> np.ndarray:
        """Returns the weight from our parameters: fp32 of `shape`, contiguous."""
        view = jax.device_get(self._parameter(parameters))[self.index]
        value = view.reshape(self.shape[::-1]).T if self.transposed else view.reshape(self.shape)
        return np.ascontiguousarray(value, np.float32)

    def write(self, parameters: Parameters, value: np.ndarray) -> None:
        """Writes a weight [shape] into our parameters, which are numpy arrays."""
        view = self._parameter(parameters)[self.index]
        view[...] = (value.T if self.transposed else value).reshape(view.shape)

    def _parameter(self, parameters: Parameters) -> Any:
        for part in self.path:
            parameters = parameters[part]
        return parameters


def model_settings(heads: Collection[str], task: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings for `abstract_parameters` of a model with these heads, or fine-tuned for a `task`."""
    return {"heads": heads} if task is None else {"build": BertForTask, "head": TaskHead.from_dict(task)}


def layout(config: BertConfig, architecture: str, heads: Collection[str], outputs: int = 0) -> list[Weight]:
    """Lists every weight of a model of a class, with these heads, and with the `outputs` of a fine-tuned model.

    The names of a bare encoder have no `bert.` prefix.
    """
    size, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    encoder = "" if architecture == "BertModel" else "bert."
    result: list[Weight] = []

    def dense(name: str, shape: tuple[int, int], path: tuple[str, ...], prefix: str = "", *index: int | slice) -> None:
        result.append(Weight(f"{name}.weight", shape, (*path, f"{prefix}kernel"), index, transposed=True))
        # A slice's kernel has its inputs as the axis before the one that is indexed last; a bias has no inputs.
        bias_index = tuple(entry for entry in index if not isinstance(entry, slice))
        result.append(Weight(f"{name}.bias", shape[:1], (*path, f"{prefix}bias"), bias_index))

    def norm(name: str, path: tuple[str, ...], *index: int) -> None:
        result.append(Weight(f"{name}.weight", (size,), (*path, "scale"), index))
        result.append(Weight(f"{name}.bias", (size,), (*path, "bias"), index))

    name = f"{encoder}embeddings"
    result += [
        Weight(f"{name}.word_embeddings.weight", (vocab, size), ("embeddings", "word"), (slice(vocab),)),
        Weight(
            f"{name}.position_embeddings.weight", (config.max_position_embeddings, size), ("embeddings", "position")
        ),
        Weight(f"{name}.token_type_embeddings.weight", (config.type_vocab_size, size), ("embeddings", "token_type")),
    ]
    norm(f"{name}.LayerNorm", ("embeddings", "norm"))

    layers = ("encoder", "layers")
    attention, feed_forward = (*layers, "attention"), (*layers, "feed_forward")
    for number in range(config.num_hidden_layers):
        name = f"{encoder}encoder.layer.{number}"
        for i, projection in enumerate(("query", "key", "value")):
            dense(f"{name}.attention.self.{projection}", (size, size), attention, "qkv_", number, slice(None), i)
        dense(f"{name}.attention.output.dense", (size, size), attention, "output_", number)
        norm(f"{name}.attention.output.LayerNorm", (*layers, "attention_norm"), number)
        dense(f"{name}.intermediate.dense", (inner, size), feed_forward, "up_", number)
        dense(f"{name}.output.dense", (size, inner), feed_forward, "down_", number)
        norm(f"{name}.output.LayerNorm", (*layers, "feed_forward_norm"), number)

    if "pooler" in heads:
        dense(f"{encoder}pooler.dense", (size, size), ("pooler",))
    if "mlm_head" in heads:
        dense("cls.predictions.transform.dense", (size, size), ("mlm_head",))
        norm("cls.predictions.transform.LayerNorm", ("mlm_head", "norm"))
        result.append(Weight("cls.predictions.bias", (vocab,), ("mlm_head", "output_bias"), (slice(vocab),)))
    if "nsp_head" in heads:
        dense("cls.seq_relationship", (2, size), ("nsp_head",))
    if output := ARCHITECTURES[architecture].output:
        dense(output, (outputs, size), ("output",))
    return result


def state_dict(parameters: Parameters, weights: Sequence[Weight]) -> dict[str, np.ndarray]:
    """Returns all weights by name, fp32. Tied weights occur once, as `transformers` saves them."""
    return {weight.name: weight.read(parameters) for weight in weights}


def parameters_of(shapes: Parameters, weights: Sequence[Weight], read: Callable[[str], np.ndarray]) -> Parameters:
    """Builds the parameters (numpy fp32), of the shapes of a tree, from weights read one by one by name.

    The vocabulary's padding is zero.
    """
    parameters: Parameters = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    for weight in weights:
        weight.write(parameters, read(weight.name))
    return parameters
