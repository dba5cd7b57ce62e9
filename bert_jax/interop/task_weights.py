"""Export of a fine-tuned model to `transformers`: its architecture, weights and label names."""

from typing import Any

import numpy as np

from bert_jax.errors import InputError
from bert_jax.interop.huggingface_weights import state_dict
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.training.checkpointing.checkpoints import Checkpoint, check_finite

_ARCHITECTURES = {  # by kind of head: the class, and the name of its output layer
    "classify": ("BertForSequenceClassification", "classifier"),
    "regress": ("BertForSequenceClassification", "classifier"),
    "choose": ("BertForMultipleChoice", "classifier"),
    "span": ("BertForQuestionAnswering", "qa_outputs"),
    "tag": ("BertForTokenClassification", "classifier"),
}


def task_model(checkpoint: Checkpoint) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Returns the architecture, the task's part of `config.json`, and the weights.

    Raises InputError for models without a class in `transformers`: a BiLSTM head, features of layers, and a task of a
    left-to-right model, which is pooled from the last token.
    """
    task = checkpoint.task
    assert task is not None
    architecture, output = _ARCHITECTURES[task["kind"]]
    head = TaskHead.of_checkpoint(task)
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
    weights[f"{output}.weight"] = np.ascontiguousarray(np.asarray(parameters["output"]["kernel"]).T)
    weights[f"{output}.bias"] = np.asarray(parameters["output"]["bias"])
    return architecture, {**_outputs(task), **_dropout(checkpoint)}, weights


def _dropout(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the dropout before the output layer, from the run's config; a span model has none in transformers."""
    head = checkpoint.config.get("head")
    if head is None or (checkpoint.task or {})["kind"] == "span":
        return {}
    return {"classifier_dropout": float(head["dropout"])}


def _outputs(task: dict[str, Any]) -> dict[str, Any]:
    if task["kind"] == "regress":
        return {"id2label": {"0": "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
    names = task.get("classes") or task.get("tags")
    if not names:
        return {}
    by_number = {str(number): name for number, name in enumerate(names)}
    return {"id2label": by_number, "label2id": {name: number for number, name in enumerate(names)}}
