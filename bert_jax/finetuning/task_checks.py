"""Checks of a fine-tuning config, made before any work."""

import dataclasses

from jax.sharding import Mesh

from bert_jax.config import ConfigDict, flatten
from bert_jax.errors import InputError
from bert_jax.finetuning.task_kinds import TASK_KINDS
from bert_jax.model import BertConfig
from bert_jax.model.layer_features import FEATURES, layers_needed
from bert_jax.model.task_heads import TaskHead
from bert_jax.training.checks import check_values

_MIN_TOKENS = 4  # [CLS], one token of each text, [SEP]; the second [SEP] may stand for an empty text


def check_config(config: ConfigDict) -> None:
    """Raises InputError, with the key, for a value out of range."""
    values = dict(flatten(config))
    check = check_values(values)
    check(lambda x: x >= 1, "at least 1", "num_epochs", "gradient_accumulation", "eval_batch_size", "data.sort_window")
    check(lambda x: x >= _MIN_TOKENS, f"at least {_MIN_TOKENS}", "task.max_seq_len")
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
    check(lambda x: x in TASK_KINDS, f"one of {', '.join(TASK_KINDS)}", "task.kind")
    if config.task.positive_label and config.task.kind != "text":
        raise InputError(
            f"task.positive_label={config.task.positive_label}: task.kind={config.task.kind} does not support it, only "
            "task.kind=text; leave it empty"
        )
    if config.head.bilstm_layers > 1 and not config.head.bilstm:
        raise InputError(
            f"head.bilstm_layers={config.head.bilstm_layers}: requires a BiLSTM, got head.bilstm=0; set its units"
        )
    if not config.init:
        raise InputError("init is empty; set the checkpoint to start from with --config.init=CHECKPOINT")


def model_of(config: ConfigDict, encoder: BertConfig) -> BertConfig:
    """Returns the encoder with the config's dropout. InputError if it has too few positions or layers."""
    model = dataclasses.replace(encoder, **dict(config.model.items()))
    if config.task.max_seq_len > model.max_position_embeddings:
        raise InputError(
            f"task.max_seq_len={config.task.max_seq_len}: the encoder reads at most {model.max_position_embeddings} "
            "tokens; lower it"
        )
    features = config.head.features
    if features and layers_needed(features) > model.num_hidden_layers:
        raise InputError(
            f"head.features={features}: requires at least {layers_needed(features)} layers, the encoder has "
            f"{model.num_hidden_layers}; use embeddings, last or sum_all"
        )
    return model


def check_head(head: TaskHead, mesh: Mesh) -> None:
    """Raises InputError for a head that the task or the mesh does not support."""
    features = head.features
    if features == "embeddings" and not head.bilstm and not head.is_of_tokens:
        raise InputError(
            "head.features=embeddings: without a BiLSTM the head reads only the embedding of [CLS], which does not "
            "depend on the text; set head.bilstm"
        )
    if 2 * head.bilstm % mesh.shape["fsdp"]:
        raise InputError(
            f"head.bilstm={head.bilstm}: 2 * head.bilstm is not divisible by mesh.fsdp={mesh.shape['fsdp']}"
        )
