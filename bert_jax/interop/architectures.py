"""Model classes of `transformers`, and what their `config.json` says of a task.

Names of labels and the maximum length of a text have fields of their own in `transformers`, which are the truth. The
other settings of a task are in `bert_jax_task`, so that an import predicts as the exported checkpoint did. A model from
elsewhere gets the settings that its class has.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.finetuning.fine_tuned import KINDS
from bert_jax.finetuning.tasks.text import TASKS
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
}

_PRE_TRAINED = [name for name, architecture in ARCHITECTURES.items() if not architecture.kinds]


def named_architecture(path: epath.Path, values: Mapping[str, Any]) -> str | None:
    """Returns the model class that `config.json` names; None if it names none.

    Raises InputError for a model that is not BERT, and an unsupported class. Other variants have other weights.
    """
    for name, expected in (("model_type", "bert"), ("position_embedding_type", "absolute")):
        if (value := values.get(name, expected)) not in (expected, None):
            raise InputError(f"{path}: {name}={value!r:.60}: expected {expected}")
    named = values.get("architectures")
    if named in (None, []):
        return None
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise InputError(f"{path}: architectures={named!r:.60}: expected one of {', '.join(ARCHITECTURES)}, in a list")
    return str(named[0])


def architecture_of(checkpoint: Checkpoint) -> str:
    """Returns the class of a checkpoint: that with its heads, BertLMHeadModel for a left-to-right model, or its task's.

    Raises InputError for models without a class in `transformers`: a BiLSTM head, features of layers, and a task of a
    left-to-right model, which is pooled from the last token.
    """
    task, is_decoder = checkpoint.task, checkpoint.bert_config.is_decoder
    if task is None:
        names = ("BertLMHeadModel",) if is_decoder else _PRE_TRAINED
        return next((name for name in names if {*ARCHITECTURES[name].heads} <= {*checkpoint.heads}), "BertModel")
    head = TaskHead.from_dict(task)
    unsupported = {"head.bilstm": head.bilstm, "head.features": head.features, "is_decoder": is_decoder}
    if given := [f"{name}={value}" for name, value in unsupported.items() if value]:
        raise InputError(f"{checkpoint.path}: {given[0]}: transformers has no class for such a fine-tuned model")
    return next(name for name, architecture in ARCHITECTURES.items() if head.kind in architecture.kinds)


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
