"""The weights of BERT and ModernBERT in `transformers`: their names, shapes and files.

A table maps each weight to a slice of a parameter: for export and import, of pre-trained and fine-tuned models. In
`transformers` dense weights are [out, in]; query, key and value are separate matrices; layers are numbered; the
vocabulary has no padding.

The files are safetensors, or those of torch, which unpickles them without running code; each is a single file, or
shards with an index. TensorFlow's are read by `tensorflow_checkpoints`.
"""

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from bert_jax.errors import InputError, install_hint
from bert_jax.files.atomic import read_json
from bert_jax.interop.architectures import ARCHITECTURES, model_type_of
from bert_jax.model import BertConfig
from bert_jax.model.bert import Parameters

WHOLE = "model.safetensors"

_DTYPES = ("F32", "F16", "BF16", "float32", "float16", "bfloat16")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # keys under which trainers save a state dict


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


def layout(config: BertConfig, architecture: str, heads: Collection[str], outputs: int = 0) -> list[Weight]:
    """Lists every weight of a model of a class, with these heads, and with the `outputs` of a fine-tuned model.

    The names of a bare encoder have no `bert.` or `model.` prefix.
    """
    size, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    layers = ("encoder", "layers")
    attention, feed_forward = (*layers, "attention"), (*layers, "feed_forward")
    is_modern = model_type_of(config) == "modernbert"
    encoder = "" if architecture in ("BertModel", "ModernBertModel") else "model." if is_modern else "bert."
    result: list[Weight] = []

    def dense(
        name: str, shape: tuple[int, int], path: tuple[str, ...], prefix: str = "", *index: int | slice,
        has_bias: bool = True,
    ) -> None:  # fmt: skip
        result.append(Weight(f"{name}.weight", shape, (*path, f"{prefix}kernel"), index, transposed=True))
        # A slice's kernel has its inputs as the axis before the one that is indexed last; a bias has no inputs.
        bias_index = tuple(entry for entry in index if not isinstance(entry, slice))
        if has_bias:
            result.append(Weight(f"{name}.bias", shape[:1], (*path, f"{prefix}bias"), bias_index))

    def norm(name: str, path: tuple[str, ...], *index: int) -> None:
        result.append(Weight(f"{name}.weight", (size,), (*path, "scale"), index))
        if config.norm_bias:
            result.append(Weight(f"{name}.bias", (size,), (*path, "bias"), index))

    def table(name: str, rows: int, parameter: str) -> None:
        path = ("embeddings", parameter)
        result.append(Weight(f"{encoder}embeddings.{name}.weight", (rows, size), path, (slice(rows),)))

    if is_modern:
        table("tok_embeddings", vocab, "word")
        norm(f"{encoder}embeddings.norm", ("embeddings", "norm"))
        for number in range(config.num_hidden_layers):
            name = f"{encoder}layers.{number}"
            if number:  # what comes before attention is the last norm of the layer before: see `model.bert.Layer`
                norm(f"{name}.attn_norm", (*layers, "feed_forward_norm"), number - 1)
            has_bias = config.attention_bias
            dense(f"{name}.attn.Wqkv", (3 * size, size), attention, "qkv_", number, has_bias=has_bias)
            dense(f"{name}.attn.Wo", (size, size), attention, "output_", number, has_bias=has_bias)
            norm(f"{name}.mlp_norm", (*layers, "attention_norm"), number)
            dense(f"{name}.mlp.Wi", (2 * inner, size), feed_forward, "up_", number, has_bias=config.mlp_bias)
            dense(f"{name}.mlp.Wo", (size, inner), feed_forward, "down_", number, has_bias=config.mlp_bias)
        norm(f"{encoder}final_norm", (*layers, "feed_forward_norm"), config.num_hidden_layers - 1)
        output = ARCHITECTURES[architecture].output
        if output or "mlm_head" in heads:
            head = "transform" if output else "mlm_head"
            dense("head.dense", (size, size), (head,), has_bias=config.classifier_bias)
            norm("head.norm", (head, "norm"))
        if output:
            dense(output, (outputs, size), ("output",))
        elif "mlm_head" in heads and config.decoder_bias:
            result.append(Weight("decoder.bias", (vocab,), ("mlm_head", "output_bias"), (slice(vocab),)))
        return result

    table("word_embeddings", vocab, "word")
    table("position_embeddings", config.max_position_embeddings, "position")
    table("token_type_embeddings", config.type_vocab_size, "token_type")
    norm(f"{encoder}embeddings.LayerNorm", ("embeddings", "norm"))

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


# --- Files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a `file`, with its name there, its shape in `transformers`, and a function that reads its value."""

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    value: Callable[[], np.ndarray]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"

    def read(self) -> np.ndarray:
        """Reads the value as fp32. InputError if it has another dtype than F32, F16 and BF16, or is not finite."""
        if self.dtype not in _DTYPES:
            raise InputError(f"{self.file}: {self.name} has dtype {self.dtype}; expected F32, F16 or BF16")
        value = self.value().astype(np.float32)
        if not np.isfinite(value).all():
            raise InputError(f"{self.file}: {self.name} has values that are not finite; use another model")
        return value


def open_weights(path: epath.Path) -> dict[str, StoredWeight]:
    """Returns every weight by name, of a file of safetensors or torch, or of the shards that an index lists.

    Raises InputError for a damaged or missing file, an index that does not match its shards, and a pickle without
    torch, or with anything but weights.
    """
    if path.suffix != ".json":
        return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise InputError(f"{path}: weight_map must map weight names to files")
    weights: dict[str, StoredWeight] = {}
    for file in sorted(set(placed.values())):
        weights |= open_weights(path.parent / file)
    if different := sorted(weights.keys() ^ placed.keys()):
        raise InputError(f"{path}: weight {different[0]!r} is only in the index, or only in a shard; use one model's")
    return weights


def _open_safetensors(path: epath.Path) -> dict[str, StoredWeight]:
    try:
        opened: Any = safe_open(str(path), "numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: damaged, or no file ({error}); download it again") from error
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    return {
        name: StoredWeight(path, name, tuple(part.get_shape()), part.get_dtype(), partial(opened.get_tensor, name))
        for name, part in slices.items()
    }


def _open_pickle(path: epath.Path) -> dict[str, StoredWeight]:
    """Opens a state dict that torch saved. `weights_only` builds tensors and containers alone, and runs no code."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path}: torch is required to read it without running code; {install_hint('parity')}"
        ) from error
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise InputError(f"{path}: not a file of weights alone, or damaged ({str(error)[:80]}); not loaded") from error

    def is_state_dict(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(tensor, torch.Tensor) for tensor in value.values())

    wrapped = [key for key in _WRAPPERS if isinstance(content, dict) and is_state_dict(content.get(key))]
    if not is_state_dict(content) and len(wrapped) != 1:
        found = " and ".join(wrapped) or "neither"
        raise InputError(f"{path}: expected weights by name, or one of {', '.join(_WRAPPERS)} with them; got {found}")
    tensors = content if is_state_dict(content) else content[wrapped[0]]

    return {
        name: StoredWeight(
            path, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."),
            partial(lambda stored: stored.float().numpy(), tensor),
        )
        for name, tensor in tensors.items()
    }  # fmt: skip
