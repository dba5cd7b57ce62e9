"""Model classes of `transformers`, and what their `config.json` says of a model and its task.

Names of labels and the maximum length of a text have fields of their own in `transformers`, which are the truth. The
other settings of a task are in `bert_jax_task`, so that an import predicts as the exported checkpoint did. A model from
elsewhere gets the settings that its class has.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from bert_jax.errors import InputError, prefixed
from bert_jax.finetuning.fine_tuned import KINDS
from bert_jax.finetuning.tasks.text import TASKS
from bert_jax.model import BertConfig
from bert_jax.model.bert import HEADS
from bert_jax.model.task_heads import TaskHead
from bert_jax.training.checkpoints import Checkpoint

log = logging.getLogger(__name__)

RECORD = "bert_jax_task"
"""The key of `config.json` with the settings of a task that `transformers` has no field for."""

_SQUAD_TOKENS = 384  # of a window, as the paper and the pipeline of transformers have it
_FIELDS_OF_TRANSFORMERS = ("classes", "tags", "max_seq_len")


@dataclass(frozen=True)
class Architecture:
    """A model class of `transformers`.

    Attributes:
      heads: the parts of pre-training that it has, of `model.bert.HEADS`.
      pipeline: the Hub's name of its pipeline; it has none for next sentences.
      output: the name of the output layer of a fine-tuned model.
      kinds: the kinds of `TaskHead` that it may be.
    """

    heads: tuple[str, ...]
    pipeline: str | None = None
    output: str = ""
    kinds: tuple[str, ...] = ()


ARCHITECTURES = {  # a pre-trained model is written as the first whose heads it has
    "BertForPreTraining": Architecture(HEADS, "fill-mask"),
    "BertForMaskedLM": Architecture(("mlm_head",), "fill-mask"),
    "BertLMHeadModel": Architecture(("mlm_head",), "text-generation"),
    "BertForNextSentencePrediction": Architecture(("pooler", "nsp_head")),
    "BertModel": Architecture(("pooler",), "feature-extraction"),
    "BertForSequenceClassification": Architecture(
        ("pooler",), "text-classification", "classifier", ("classify", "regress")
    ),
    "BertForMultipleChoice": Architecture(("pooler",), "multiple-choice", "classifier", ("choose",)),
    "BertForQuestionAnswering": Architecture((), "question-answering", "qa_outputs", ("span",)),
    "BertForTokenClassification": Architecture((), "token-classification", "classifier", ("tag",)),
    "ModernBertForMaskedLM": Architecture(("mlm_head",), "fill-mask"),
    "ModernBertModel": Architecture((), "feature-extraction"),
    "ModernBertForSequenceClassification": Architecture(
        (), "text-classification", "classifier", ("classify", "regress")
    ),
    "ModernBertForMultipleChoice": Architecture((), "multiple-choice", "classifier", ("choose",)),
    "ModernBertForQuestionAnswering": Architecture((), "question-answering", "classifier", ("span",)),
    "ModernBertForTokenClassification": Architecture((), "token-classification", "classifier", ("tag",)),
}


def classes_of(model_type: str) -> list[str]:
    """Returns the names of the classes of a `model_type`."""
    return [name for name in ARCHITECTURES if name.startswith("Modern") == (model_type == "modernbert")]


def named_architecture(path: epath.Path, values: Mapping[str, Any]) -> str | None:
    """Returns the model class that `config.json` names; None if it names none.

    Raises InputError for another model than BERT and ModernBERT, and an unsupported class. Other variants have other
    weights.
    """
    if (model_type := values.get("model_type") or "bert") not in MODEL_TYPES:
        raise InputError(f"{path}: model_type={model_type!r:.60}: expected {' or '.join(MODEL_TYPES)}")
    if model_type == "bert" and (value := values.get("position_embedding_type")) not in ("absolute", None):
        raise InputError(f"{path}: position_embedding_type={value!r:.60}: expected absolute")
    named, known = values.get("architectures"), classes_of(model_type)
    if named in (None, []):
        return None
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise InputError(f"{path}: architectures={named!r:.60}: expected one of {', '.join(known)}, in a list")
    return str(named[0])


# --- Sizes and switches ---------------------------------------------------------------------------------------------

MODEL_TYPES: dict[str, dict[str, Any]] = {
    "bert": {
        "position_embedding_type": "absolute", "global_attn_every_n_layers": 1, "pre_norm": False, "gated_mlp": False,
        "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "decoder_bias": True,
        "pooler": True, "classifier_pooling": "cls",
    },
    "modernbert": {
        "position_embedding_type": "rotary", "pre_norm": True, "gated_mlp": True, "pooler": False,
        "type_vocab_size": 0, "is_decoder": False, "hidden_dropout_prob": 0.0, "depth_scaled_init": True,
    },
}  # fmt: skip
"""Fields of BertConfig that are equal in all models of a `model_type`."""

_UNIMPORTANT = ("hidden_dropout_prob", "depth_scaled_init")  # which change no prediction

_MODERNBERT: dict[str, tuple[str, Any]] = {  # by our name: the name and the default of ModernBertConfig
    "vocab_size": ("vocab_size", 50_368), "hidden_size": ("hidden_size", 768),
    "num_hidden_layers": ("num_hidden_layers", 22), "num_attention_heads": ("num_attention_heads", 12),
    "intermediate_size": ("intermediate_size", 1_152), "hidden_act": ("hidden_activation", "gelu"),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    "max_position_embeddings": ("max_position_embeddings", 8_192), "initializer_range": ("initializer_range", 0.02),
    "layer_norm_eps": ("norm_eps", 1e-5), "embedding_dropout": ("embedding_dropout", 0.0),
    "mlp_dropout": ("mlp_dropout", 0.0), "global_rope_theta": ("global_rope_theta", 160_000.0),
    "local_rope_theta": ("local_rope_theta", 10_000.0), "local_attention": ("local_attention", 128),
    "global_attn_every_n_layers": ("global_attn_every_n_layers", 3), "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False), "norm_bias": ("norm_bias", False), "classifier_bias": ("classifier_bias", False),
    "decoder_bias": ("decoder_bias", True), "classifier_pooling": ("classifier_pooling", "cls"),
}  # fmt: skip
_ATTENTION = {"global": "full_attention", "local": "sliding_attention"}  # kinds of layers


def model_type_of(config: BertConfig) -> str:
    """Returns the `model_type` of a model. InputError for one between BERT and ModernBERT, which has no class."""
    fields = config.to_dict()
    model_type = "modernbert" if config.position_embedding_type == "rotary" else "bert"
    for name, expected in MODEL_TYPES[model_type].items():
        if fields[name] != expected and name not in _UNIMPORTANT:
            raise InputError(
                f"{name}={fields[name]}: expected {expected}, which every {model_type} of transformers has"
            )
    if model_type == "bert" and not config.type_vocab_size:
        raise InputError("type_vocab_size=0: expected at least 1, which every bert of transformers has")
    return model_type


def model_config(config: BertConfig) -> dict[str, Any]:
    """Returns the part of `config.json` that a model's sizes and switches have. Raises as `model_type_of`."""
    model_type, fields = model_type_of(config), config.to_dict()
    if model_type == "bert":
        return {"model_type": model_type, **{name: fields[name] for name in _BERT}}
    fields["embedding_dropout"] = config.dropout_rate(config.embedding_dropout)  # a number, also for None
    values = {theirs: fields[ours] for ours, (theirs, _) in _MODERNBERT.items()}
    values["classifier_activation"] = fields["hidden_act"]  # that of the heads
    rate = config.dropout_rate(config.attention_output_dropout)
    # ModernBertConfig has one rate for both. It ignores this key, which `read_model_config` reads.
    own = {} if rate == config.attention_probs_dropout_prob else {"attention_output_dropout": rate}
    return {"model_type": model_type, **values, **own}


def read_model_config(path: epath.Path, values: Mapping[str, Any]) -> BertConfig:
    """Returns the model's config from a JSON object, whose other keys are ignored. InputError if it is invalid."""
    with prefixed(path):
        if values.get("model_type") != "modernbert":
            return BertConfig.from_dict({name: value for name, value in values.items() if name in _BERT})
        values = {**values, **_from_kinds(values)}
        fields = {ours: values.get(theirs, default) for ours, (theirs, default) in _MODERNBERT.items()}
        if (other := values.get("classifier_activation", "gelu")) != fields["hidden_act"]:
            raise InputError(f"classifier_activation={other!r:.60}: expected {fields['hidden_act']}, as elsewhere")
        fields["attention_output_dropout"] = values.get(
            "attention_output_dropout", fields["attention_probs_dropout_prob"]
        )
        return BertConfig.from_dict({**MODEL_TYPES["modernbert"], **fields})


def _from_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of older names for `rope_parameters` and `layer_types`, which transformers 5 writes instead.

    Raises InputError for scaled angles, and for layers whose kinds do not repeat from a global one on.
    """
    found: dict[str, Any] = {}
    for name, kind in _ATTENTION.items():
        angles = (values.get("rope_parameters") or {}).get(kind) or {}
        scaling = {**angles, **(values.get("rope_scaling") or {})}  # the older name is for both kinds
        if (rope_type := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
            raise InputError(f"rope_parameters.{kind}.rope_type={rope_type!r:.60}, or rope_scaling: expected default")
        found |= {f"{name}_rope_theta": angles["rope_theta"]} if "rope_theta" in angles else {}
    if kinds := values.get("layer_types"):
        is_global = [kind == _ATTENTION["global"] for kind in kinds]
        every = next((place for place in range(1, len(kinds)) if is_global[place]), len(kinds))
        if is_global != [place % every == 0 for place in range(len(kinds))]:
            raise InputError(f"layer_types={kinds!r:.200}: expected a {_ATTENTION['global']} every {every} layers")
        found["global_attn_every_n_layers"] = every
    return found


_BERT = [field.name for field in dataclasses.fields(BertConfig)]
_BERT = _BERT[: _BERT.index("is_decoder") + 1]  # the fields of bert_config.json


# --- Tasks ----------------------------------------------------------------------------------------------------------


def architecture_of(checkpoint: Checkpoint) -> str:
    """Returns the class of a checkpoint: that with its heads, BertLMHeadModel for a left-to-right model, or its task's.

    Raises InputError for models without a class in `transformers`: a BiLSTM head, features of layers, and a task of a
    left-to-right model, which is pooled from the last token; and as `model_type_of` does.
    """
    task, is_decoder = checkpoint.task, checkpoint.bert_config.is_decoder
    with prefixed(checkpoint.path):
        model_type = model_type_of(checkpoint.bert_config)
    classes = classes_of(model_type)
    if task is None:
        names = ["BertLMHeadModel"] if is_decoder else [name for name in classes if not ARCHITECTURES[name].kinds]
        fitting = (name for name in names if {*ARCHITECTURES[name].heads} <= {*checkpoint.heads})
        return next(fitting, "ModernBertModel" if model_type == "modernbert" else "BertModel")
    head = TaskHead.from_dict(task)
    unsupported = {"head.bilstm": head.bilstm, "head.features": head.features, "is_decoder": is_decoder}
    if given := [f"{name}={value}" for name, value in unsupported.items() if value]:
        raise InputError(f"{checkpoint.path}: {given[0]}: transformers has no class for such a fine-tuned model")
    return next(name for name in classes if head.kind in ARCHITECTURES[name].kinds)


def task_config(task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of `config.json` that a checkpoint's task has."""
    record = {name: value for name, value in task.items() if name not in _FIELDS_OF_TRANSFORMERS}
    if task["kind"] == "regress":
        labels: dict[str, Any] = {"id2label": {"0": "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
    elif names := task.get("classes") or task.get("tags"):
        by_number = {str(number): name for number, name in enumerate(names)}
        labels = {"id2label": by_number, "label2id": {name: number for number, name in enumerate(names)}}
    else:
        labels = {}
    return {**labels, RECORD: record}


def read_task(
    path: epath.Path, name: str, values: Mapping[str, Any], outputs: int, model_max_length: int
) -> dict[str, Any]:
    """Returns a fine-tuned model's record of its task; see `training.checkpoints`.

    Args:
      path: the config's file, for errors.
      name: the model's class, one with an output.
      values: the contents of `config.json`.
      outputs: the size of the output layer.
      model_max_length: the maximum tokens of a text.

    Raises:
      InputError: the names of labels are invalid, or the task is not supported.
    """
    kind = _kind(path, name, values, outputs)
    labels = _label_names(path, values, outputs) if kind in ("classify", "tag") else []
    own: dict[str, Any] = values.get(RECORD) or {}
    if own and not _is_of(own, kind, labels):
        log.warning("%s: %s is of another task than %s and its id2label, and is not read", path, RECORD, name)
        own = {}
    size, longest, settings = outputs, model_max_length, own
    if kind == "choose":
        size = own.get("size", 0)  # 0: any number of endings
        settings = own or {"name": "choice"}
    elif kind == "span" and not own:
        longest = min(longest, _SQUAD_TOKENS)
        windows = {"doc_stride": min(128, longest // 2), "max_query_length": min(64, longest // 2)}
        settings = {"name": "squad/1.1", **windows}
    elif kind == "tag":
        settings = {**(own or {"name": "ner"}), "tags": labels}
    elif kind in ("classify", "regress"):
        settings = {**(own or {"name": "text"}), "classes": labels}
    return {**settings, **TaskHead(kind, size).to_dict(), "max_seq_len": longest}


def _is_of(record: Any, kind: str, labels: list[str]) -> bool:
    """Returns whether a record of settings is of a kind of head, and of the labels if the task has fixed ones."""
    if not isinstance(record, dict) or record.get("kind") != kind or not isinstance(record.get("name"), str):
        return False
    benchmark, _, task = record["name"].partition("/")
    if benchmark == "glue" and kind == "classify":
        return task in TASKS and [*TASKS[task].classes] == labels
    return benchmark in KINDS and KINDS[benchmark].kind in ("", kind, {"regress": "classify"}.get(kind))


def _kind(path: epath.Path, name: str, values: Mapping[str, Any], outputs: int) -> str:
    """Returns the kind of head. InputError for several labels of one text, several scores, and left-to-right models."""
    kinds, output = ARCHITECTURES[name].kinds, ARCHITECTURES[name].output
    if len(kinds) == 1 and outputs != (expected := {"choose": 1, "span": 2}.get(kinds[0], outputs)):
        raise InputError(f"{path.parent}: {output}.bias [{outputs}]: expected [{expected}] for {name}")
    default = "regression" if outputs == 1 else "single_label_classification"
    problem = values.get("problem_type") or default if len(kinds) > 1 else default
    if problem != default or (values.get("is_decoder") and ARCHITECTURES[name].heads):
        raise InputError(
            f"{path}: {name} with problem_type={problem}, {outputs} outputs and is_decoder={values.get('is_decoder')} "
            f"is not supported; import the encoder alone with --drop {output}"
        )
    return kinds[-1] if problem == "regression" else kinds[0]


def _label_names(path: epath.Path, values: Mapping[str, Any], count: int) -> list[str]:
    """Returns the names in `id2label` by number; without it those that transformers gives, LABEL_0 and so on."""
    by_number = values.get("id2label")
    if by_number is None:
        return [f"LABEL_{number}" for number in range(count)]
    expected = {str(number) for number in range(count)}
    if not isinstance(by_number, dict) or {str(key) for key in by_number} != expected:
        raise InputError(f"{path}: id2label={by_number!r:.80}: expected a name for each number from 0 to {count - 1}")
    names = [str(by_number[str(number)]) for number in range(count)]
    if len(set(names)) < count:
        raise InputError(f"{path}: id2label={by_number!r:.80}: expected different names")
    return names
