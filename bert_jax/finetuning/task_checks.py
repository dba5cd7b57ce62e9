"""What is checked before fine-tuning does any work."""

import dataclasses

from jax.sharding import Mesh

from bert_jax.config import ConfigDict, flatten
from bert_jax.errors import InputError
from bert_jax.finetuning.tasks.registry import TASKS
from bert_jax.model import BertConfig
from bert_jax.model.layer_features import FEATURES, layers_needed
from bert_jax.model.task_heads import TaskHead
from bert_jax.training.checks import check_values

_LEAST_TOKENS = 4  # [CLS], one of each text, [SEP]; the second [SEP] may stand for an empty text


def check_config(config: ConfigDict) -> None:
    """InputError for values out of range, each with the key that holds it."""
    values = dict(flatten(config))
    check = check_values(values)
    check(lambda x: x >= 1, "at least 1", "num_epochs", "gradient_accumulation", "eval_batch_size", "data.sort_window")
    check(lambda x: x >= _LEAST_TOKENS, f"at least {_LEAST_TOKENS}", "task.max_seq_len")
    check(lambda x: x >= 0, "at least 0", "head.bilstm")
    check(lambda x: x >= 1, "at least 1", "head.bilstm_layers")
    check(lambda x: x in ("", *FEATURES), f"empty or one of {', '.join(FEATURES)}", "head.features")
    check(
        lambda x: x >= 1, "at least 1", "task.doc_stride", "task.max_query_length", "task.n_best",
        "task.max_answer_length",
    )  # fmt: skip
    check(
        lambda x: 0 <= x < 1, "in [0, 1)", "head.dropout", "optimizer.warmup_proportion",
        "model.hidden_dropout_prob", "model.attention_probs_dropout_prob",
    )  # fmt: skip
    check(lambda x: x in TASKS, f"one of {', '.join(TASKS)}", "task.kind")
    if config.task.positive_label and config.task.kind != "text":
        raise InputError(
            f"task.positive_label={config.task.positive_label}: task.kind={config.task.kind} does not support it, only "
            "text; leave it empty"
        )
    if config.head.bilstm_layers > 1 and not config.head.bilstm:
        raise InputError(f"head.bilstm_layers={config.head.bilstm_layers}, but head.bilstm is 0: set it to their units")
    if not config.init:
        raise InputError("init is empty: name the checkpoint to start from, --config.init=CHECKPOINT")


def model_of(config: ConfigDict, encoder: BertConfig) -> BertConfig:
    """The encoder with the config's dropout. InputError where it reads fewer tokens or has fewer layers than wanted."""
    model = dataclasses.replace(encoder, **dict(config.model.items()))
    if config.task.max_seq_len > model.max_position_embeddings:
        raise InputError(
            f"task.max_seq_len={config.task.max_seq_len}, but the encoder reads {model.max_position_embeddings} tokens "
            "at the most: lower it"
        )
    features = config.head.features
    if features and layers_needed(features) > model.num_hidden_layers:
        raise InputError(
            f"head.features={features} reads {layers_needed(features)} layers or more, the encoder has "
            f"{model.num_hidden_layers}: choose embeddings, last or sum_all"
        )
    return model


def check_head(head: TaskHead, mesh: Mesh) -> None:
    """InputError for a head that the task or the mesh do not allow."""
    features = head.features
    if features == "embeddings" and not head.bilstm and not head.is_of_tokens:
        raise InputError(
            "head.features=embeddings without head.bilstm reads the embedding of [CLS] alone, which knows nothing of "
            "a text: set head.bilstm"
        )
    if 2 * head.bilstm % mesh.shape["fsdp"]:
        raise InputError(f"head.bilstm={head.bilstm}: twice as many do not divide by mesh.fsdp={mesh.shape['fsdp']}")
