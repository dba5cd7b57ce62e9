"""Names of BERT's variables in TensorFlow checkpoints, and their names and shapes in `transformers`.

google-research/bert, MLPerf and other TF1 code name variables: `bert/encoder/layer_0/attention/self/query/kernel`.
tensorflow/models (official/nlp, TF2) saves objects: `encoder/layer_with_weights-4/_attention_layer/_query_dense/kernel`
of a Keras graph, or `encoder/_transformer_layers/0/_attention_layer/_query_dense/kernel` of its later encoders.
A kernel is [in, out] in both, with a separate axis for heads in TF2.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from bert_jax.interop.weight_files import StoredWeight
from bert_jax.model import BertConfig

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
"""The end of the name of a variable that TF2 saves as part of an object."""

_SLOTS = re.compile(
    r"(^|/)(adam_[mv]|Adam(_1)?|lamb_[mv]|LAMB(_1)?|Momentum|ExponentialMovingAverage|optimizer|\.OPTIMIZER_SLOT"
    r"|_CHECKPOINTABLE_OBJECT_GRAPH|save_counter|global_step|train_step|beta[12]_power|loss_scale|good_steps"
    r"|current_loss_scale)(/|$)"
)

_TF1 = (  # regular expressions for the names of `transformers`, without weight and bias
    (r"bert/embeddings/(word|position|token_type)_embeddings", r"bert.embeddings.\1_embeddings.weight"),
    (r"bert/embeddings/LayerNorm/(\w+)", r"bert.embeddings.LayerNorm.\1"),
    (r"bert/encoder/layer_(\d+)/attention/self/(query|key|value)/(\w+)", r"bert.encoder.layer.\1.attention.self.\2.\3"),
    (r"bert/encoder/layer_(\d+)/attention/output/(dense|LayerNorm)/(\w+)",
     r"bert.encoder.layer.\1.attention.output.\2.\3"),
    (r"bert/encoder/layer_(\d+)/intermediate/dense/(\w+)", r"bert.encoder.layer.\1.intermediate.dense.\2"),
    (r"bert/encoder/layer_(\d+)/output/(dense|LayerNorm)/(\w+)", r"bert.encoder.layer.\1.output.\2.\3"),
    (r"bert/pooler/dense/(\w+)", r"bert.pooler.dense.\1"),
    (r"cls/predictions/transform/(dense|LayerNorm)/(\w+)", r"cls.predictions.transform.\1.\2"),
    (r"cls/predictions/output_bias", r"cls.predictions.bias"),
    (r"cls/seq_relationship/output_weights", r"cls.seq_relationship.weight"),
    (r"cls/seq_relationship/output_bias", r"cls.seq_relationship.bias"),
)  # fmt: skip
_TF2_LAYER = (  # within a layer
    (r"_attention_layer/_(query|key|value)_dense/(\w+)", r"attention.self.\1.\2"),
    (r"(?:_attention_layer/_output_dense|_attention_output_dense)/(\w+)", r"attention.output.dense.\1"),
    (r"_attention_layer_norm/(\w+)", r"attention.output.LayerNorm.\1"),
    (r"_intermediate_dense/(\w+)", r"intermediate.dense.\1"),
    (r"_output_dense/(\w+)", r"output.dense.\1"),
    (r"_output_layer_norm/(\w+)", r"output.LayerNorm.\1"),
)
_TF2_ENCODER = (  # outside of layers, in encoders with `_transformer_layers`
    (r"_embedding_layer/embeddings", "bert.embeddings.word_embeddings.weight"),
    (r"_position_embedding_layer/embeddings", "bert.embeddings.position_embeddings.weight"),
    (r"_type_embedding_layer/embeddings", "bert.embeddings.token_type_embeddings.weight"),
    (r"_embedding_norm_layer/(\w+)", r"bert.embeddings.LayerNorm.\1"),
    (r"_pooler_layer/(\w+)", r"bert.pooler.dense.\1"),
)
_TF2_HEADS = (  # at the end of a name, whatever holds the heads
    (r"(?:^|.*/)masked_lm/dense/(\w+)", r"cls.predictions.transform.dense.\1"),
    (r"(?:^|.*/)masked_lm/layer_norm/(\w+)", r"cls.predictions.transform.LayerNorm.\1"),
    (r"(?:^|.*/)masked_lm/(?:output_bias\.Sbias|output_bias/bias|bias|_bias)", "cls.predictions.bias"),
    (r"(?:^|.*/)masked_lm/embedding_table", "bert.embeddings.word_embeddings.weight"),
    (r"next_sentence\.\.pooler_dense/(\w+)", r"next_sentence.dense.\1"),
    (r"next_sentence\.\.out_proj/(\w+)", r"cls.seq_relationship.\1"),
    (r"(?:^|.*/)classification_heads/0/dense/(\w+)", r"next_sentence.dense.\1"),
    (r"(?:^|.*/)classification_heads/0/out_proj/(\w+)", r"cls.seq_relationship.\1"),
)
_ENDINGS = {"kernel": "weight", "gamma": "weight", "embeddings": "weight", "beta": "bias"}


@dataclass(frozen=True)
class Variable:
    """A variable of a checkpoint, as the weight that it is in `transformers`: a `StoredWeight`."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    value: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        value = self.value()
        return value.reshape(self.shape[::-1]).T if self.transposed else value.reshape(self.shape)


def is_training_state(name: str) -> bool:
    """Returns True for slots of optimizers, counters and the graph of objects."""
    return _SLOTS.search(name) is not None


def weights_of(
    variables: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray], config: BertConfig
) -> tuple[dict[str, StoredWeight], list[str]]:
    """Returns the weights by their names in BertForPreTraining, and the names of variables that are no part of it.

    Args:
      variables: name and shape of each variable; training state is ignored.
      read: reads a variable by name, as fp32.
      config: the model's sizes.
    """
    names = [name for name in variables if not is_training_state(name)]
    canonical = _tf2_names(names, config) if any(name.endswith(VALUE) for name in names) else _tf1_names(names)
    result: dict[str, StoredWeight] = {}
    for name, other in canonical.items():
        transposed = name.removesuffix(VALUE).endswith("/kernel")
        shape = _flat_shape(other, variables[name], config, transposed=transposed)
        result[other] = Variable(name.removesuffix(VALUE), shape, transposed, partial(read, name))
    others = [name.removesuffix(VALUE) for name in names if name not in canonical]
    if "cls.seq_relationship.weight" in result and result["cls.seq_relationship.weight"].shape[0] != 2:
        classifier = [result.pop(f"cls.seq_relationship.{part}", None) for part in ("weight", "bias")]
        others += [weight.name for weight in classifier if weight is not None]
    return result, others


def _flat_shape(name: str, shape: tuple[int, ...], config: BertConfig, *, transposed: bool) -> tuple[int, ...]:
    """Returns the shape in `transformers`: heads and their size are one axis there, and a kernel is [out, in]."""
    heads = (config.num_attention_heads, config.head_size)
    if ".attention." in name:
        for axis in range(len(shape) - 1):
            if shape[axis : axis + 2] == heads and len(shape) > (2 if transposed else 1):
                shape = (*shape[:axis], config.hidden_size, *shape[axis + 2 :])
                break
    return shape[::-1] if transposed else shape


def _tf1_names(names: Iterable[str]) -> dict[str, str]:
    return {name: other for name in names if (other := _rename(name, _TF1)) is not None}


def _tf2_names(names: list[str], config: BertConfig) -> dict[str, str]:
    result: dict[str, str] = {}
    prefixes = _encoder_prefixes(names)
    for name in names:
        path = name.removesuffix(VALUE)
        prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
        other = _rename(path, _TF2_HEADS)
        if other is None and prefix is not None:
            other = _encoder_name(path.removeprefix(prefix), config)
        if other is not None:
            result[name] = other
    return _with_trained_pooler(result)


def _encoder_prefixes(names: Iterable[str]) -> list[str]:
    """Returns the beginnings of the encoder's names, such as `encoder/` or `model/encoder_network/`."""
    query = "/_attention_layer/_query_dense/kernel"
    first = re.compile(rf"(.*?)(layer_with_weights-4|_transformer_layers/0){query}{re.escape(VALUE)}")
    found = {match[1] for name in names if (match := first.fullmatch(name))}
    return sorted(found, key=len)[:1]


def _encoder_name(path: str, config: BertConfig) -> str | None:
    match = re.fullmatch(r"layer_with_weights-(\d+)/(.*)", path)
    if match is None:
        layer = re.fullmatch(r"_transformer_layers/(\d+)/(.*)", path)
        if layer is None:
            return _rename(path, _TF2_ENCODER)
        inside = _rename(layer[2], _TF2_LAYER)
        return None if inside is None else f"bert.encoder.layer.{layer[1]}.{inside}"
    number, rest = int(match[1]), match[2]
    if number < 3 and rest == "embeddings":
        return f"bert.embeddings.{('word', 'position', 'token_type')[number]}_embeddings.weight"
    if number == 3:
        return _rename(rest, ((r"(gamma|beta)", r"bert.embeddings.LayerNorm.\1"),))
    if number == config.num_hidden_layers + 4:
        return _rename(rest, ((r"(kernel|bias)", r"bert.pooler.dense.\1"),))
    inside = _rename(rest, _TF2_LAYER)
    return None if inside is None else f"bert.encoder.layer.{number - 4}.{inside}"


def _with_trained_pooler(names: dict[str, str]) -> dict[str, str]:
    """Replaces the encoder's pooler by that of the next-sentence head, if there is one: only this one is trained."""
    if not any(other.startswith("next_sentence.dense.") for other in names.values()):
        return names
    kept = {name: other for name, other in names.items() if not other.startswith("bert.pooler.")}
    return {name: other.replace("next_sentence.dense.", "bert.pooler.dense.") for name, other in kept.items()}


def _rename(path: str, table: Iterable[tuple[str, str]]) -> str | None:
    for pattern, other in table:
        if match := re.fullmatch(pattern, path):
            *beginning, ending = match.expand(other).split(".")
            return ".".join((*beginning, _ENDINGS.get(ending, ending)))
    return None
