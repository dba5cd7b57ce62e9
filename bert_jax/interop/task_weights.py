"""Fine-tuned models in `transformers` and here: architecture, output layer, names of labels, and settings of the task.

An exported `config.json` has the checkpoint's record of its task as `bert_jax_task`, so that an import predicts as the
checkpoint did. It lacks what `transformers` has a field for: the names of labels (`id2label`) and, in the tokenizer's
settings, the longest text (`model_max_length`). A model from elsewhere gets the record that its config allows.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.interop.architectures import TASK_ARCHITECTURES, TaskArchitecture
from bert_jax.interop.huggingface_weights import state_dict
from bert_jax.interop.weight_files import StoredWeight
from bert_jax.model import BertConfig
from bert_jax.model.bert import Parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.training.checkpoints import Checkpoint, check_finite

log = logging.getLogger(__name__)

RECORD = "bert_jax_task"
"""The key of `config.json` that holds a checkpoint's record of its task."""

_FIELDS_OF_TRANSFORMERS = ("classes", "tags", "max_seq_len")
_SQUAD_TOKENS = 384  # of a window, as the paper and the pipeline of transformers have it


# --- Writing ---------------------------------------------------------------------------------------------------------


def task_model(checkpoint: Checkpoint) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Returns the architecture, the task's part of `config.json`, and the weights.

    Raises InputError for models without a class in `transformers`: a BiLSTM head, features of layers, and a task of a
    left-to-right model, which is pooled from the last token.
    """
    task = checkpoint.task
    assert task is not None
    architecture = TASK_ARCHITECTURES[task["kind"]]
    head = TaskHead.from_dict(task)
    if head.bilstm:
        raise InputError(f"{checkpoint.path}: head.bilstm={head.bilstm}: transformers has no model with a BiLSTM")
    if head.features:
        raise InputError(
            f"{checkpoint.path}: head.features={head.features}: transformers has no model with such features"
        )
    if checkpoint.bert_config.is_decoder:
        raise InputError(f"{checkpoint.path}: is_decoder=True: transformers has no fine-tuned left-to-right model")
    parameters = checkpoint.load_parameters(build=BertForTask, head=head)
    check_finite(checkpoint, parameters)
    encoder = state_dict(parameters, checkpoint.bert_config, checkpoint.heads)
    weights = {f"bert.{name}": value for name, value in encoder.items()}
    output = jax.device_get(parameters["output"])
    weights[f"{architecture.output}.weight"] = np.ascontiguousarray(output["kernel"].T)
    weights[f"{architecture.output}.bias"] = output["bias"]
    record = {name: value for name, value in task.items() if name not in _FIELDS_OF_TRANSFORMERS}
    return architecture.name, {**_outputs(task), **_dropout(checkpoint), RECORD: record}, weights


def _dropout(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the dropout before the output layer, from the run's config; a span model has none in transformers."""
    head = checkpoint.config.get("head")
    if head is None or (checkpoint.task or {})["kind"] == "span":
        return {}
    return {"classifier_dropout": float(head["dropout"])}


def _outputs(task: Mapping[str, Any]) -> dict[str, Any]:
    if task["kind"] == "regress":
        return {"id2label": {"0": "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
    names = task.get("classes") or task.get("tags")
    if not names:
        return {}
    by_number = {str(number): name for number, name in enumerate(names)}
    return {"id2label": by_number, "label2id": {name: number for number, name in enumerate(names)}}


# --- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTask:
    """A task read from a folder: the kind of its head, the output layer, and the keys of its record."""

    kind: str
    output: Parameters
    settings: Mapping[str, Any]
    max_seq_len: int | None

    @property
    def is_of_tokens(self) -> bool:
        """True if every token has its own outputs, so that the model has no pooler."""
        return self.kind in ("span", "tag")

    def record(self, config: BertConfig) -> dict[str, Any]:
        """Returns the checkpoint's `task`; see `training.checkpoints`."""
        longest = min(config.max_position_embeddings, self.max_seq_len or config.max_position_embeddings)
        windows = {}
        if self.kind == "span" and "doc_stride" not in self.settings:  # of a model from elsewhere
            longest = min(longest, _SQUAD_TOKENS)
            windows = {"doc_stride": min(128, longest // 2), "max_query_length": min(64, longest // 2)}
        # A choice of a model from elsewhere has any number of endings.
        size = self.settings.get("size", 0) if self.kind == "choose" else len(self.output["bias"])
        return {**windows, **self.settings, **TaskHead(self.kind, size).to_dict(), "max_seq_len": longest}


def read_task(
    path: epath.Path,
    architecture: TaskArchitecture,
    values: Mapping[str, Any],
    weights: Mapping[str, StoredWeight],
    tokenizer_settings: Mapping[str, Any],
) -> StoredTask | None:
    """Reads the output layer and the settings of a fine-tuned model.

    Returns None, and logs the reason, for an output that this package has no task for: only the encoder is imported.

    Args:
      path: the config's file, for errors.
      architecture: the model's class.
      values: the contents of `config.json`.
      weights: all weights of the folder.
      tokenizer_settings: the contents of `tokenizer_config.json`, whose `model_max_length` limits texts.

    Raises:
      InputError: the output layer is missing or of another size than the names of labels, or the names are invalid.
    """
    names = [f"{architecture.output}.{part}" for part in ("weight", "bias")]
    if missing := [name for name in names if name not in weights]:
        raise InputError(f"{path}: architectures={architecture.name} requires {', '.join(missing)}; got no such weight")
    kernel, bias = (weights[name] for name in names)
    size = int(values["hidden_size"]) if "hidden_size" in values else BertConfig().hidden_size
    if len(bias.shape) != 1 or kernel.shape != (*bias.shape, size):
        raise InputError(
            f"{path.parent}: {names[0]} {list(kernel.shape)} and {names[1]} {list(bias.shape)}: expected [N, {size}] "
            "and [N]"
        )
    outputs = bias.shape[0]
    kind = _kind(architecture, values, outputs)
    if kind is None:
        log.warning(
            "%s: problem_type=%s with %d outputs is not supported: expected one label or one score. The output layer "
            "is dropped; only the encoder is imported, for fine-tuning",
            path,
            values.get("problem_type"),
            outputs,
        )
        return None
    fixed = {"choose": 1, "span": 2}.get(kind, outputs)
    if outputs != fixed:
        raise InputError(f"{path.parent}: {names[1]} {list(bias.shape)}: expected [{fixed}] for {architecture.name}")
    longest = tokenizer_settings.get("model_max_length")
    return StoredTask(
        kind,
        {"kernel": np.ascontiguousarray(kernel.read().T), "bias": bias.read()},
        _settings(path, values, kind, outputs),
        longest if type(longest) is int and longest > 2 else None,
    )


def _kind(architecture: TaskArchitecture, values: Mapping[str, Any], outputs: int) -> str | None:
    """Returns the kind of head; None for several labels of one text, or several scores."""
    kinds = [kind for kind, other in TASK_ARCHITECTURES.items() if other.name == architecture.name]
    if kinds != ["classify", "regress"]:
        return kinds[0]
    problem = values.get("problem_type") or ("regression" if outputs == 1 else "single_label_classification")
    if problem == "single_label_classification" and outputs > 1:
        return "classify"
    return "regress" if problem == "regression" and outputs == 1 else None


def _settings(path: epath.Path, values: Mapping[str, Any], kind: str, outputs: int) -> dict[str, Any]:
    """Returns the record that an export wrote, or that of a model from elsewhere; both with the names in `id2label`."""
    name = {"span": "squad/1.1", "choose": "choice", "tag": "ner"}.get(kind, "text")
    names = {"classify": "classes", "tag": "tags"}.get(kind)
    labels = {} if names is None else {names: _label_names(path, values, outputs)}
    record = values.get(RECORD, {"kind": kind, "name": name})
    if not isinstance(record, dict) or record.get("kind") != kind or not isinstance(record.get("name"), str):
        raise InputError(f"{path}: {RECORD} does not describe a model with outputs of kind {kind!r}; delete this key")
    return {**record, **labels}


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
