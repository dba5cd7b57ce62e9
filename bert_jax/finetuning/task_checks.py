"""Checks of a fine-tuning config, made before any work."""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from bert_jax.config import ConfigDict, flatten
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.batching import EncodedExamples
from bert_jax.finetuning.task import Split
from bert_jax.finetuning.task_kinds import TASK_KINDS
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import FEATURES, TaskHead, layers_needed
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
    check(lambda x: x >= 0, "at least 0", "early_stopping.patience")
    check(lambda x: 0 <= x < math.inf, "a finite number of at least 0", "early_stopping.min_delta")
    _check_early_stopping(config)
    if config.task.class_weights and (config.task.kind in ("squad", "choice") or config.task.regression):
        raise InputError(
            f"task.class_weights={config.task.class_weights:.80}: the task has no classes, got task.kind="
            f"{config.task.kind}, task.regression={config.task.regression}; leave it empty"
        )
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


def _check_early_stopping(config: ConfigDict) -> None:
    patience, min_delta = config.early_stopping.patience, config.early_stopping.min_delta
    if patience and not config.keep_best:
        raise InputError(
            f"early_stopping.patience={patience}: the last epoch would be the result, one without improvement; set "
            "keep_best=True"
        )
    if min_delta and not patience:
        raise InputError(
            f"early_stopping.min_delta={min_delta}: has no effect without early stopping; set early_stopping.patience=2"
        )


def check_best(config: ConfigDict, splits: Sequence[Split]) -> None:
    """Raises InputError if the best epoch cannot be chosen: no split but a test split has labels."""
    first = next((split.name for split in splits if split.score is not None), None)
    if config.keep_best and (first is None or first.startswith("test")):
        raise InputError(
            f"keep_best=True: requires a labelled split to compare epochs, found {first or 'none'}; set task.dev to a "
            "labelled file"
        )


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


def check_segments(model: BertConfig, examples: EncodedExamples) -> None:
    """Raises InputError for pairs of texts if the encoder has one segment."""
    if model.type_vocab_size < 2 and any(one.first_length < len(one.input_ids) for one in examples.sequences):
        raise InputError(
            "task.train: has pairs of texts, but the encoder has no second segment (type_vocab_size=1); give single "
            "texts"
        )


def check_head(head: TaskHead, mesh: Mesh) -> None:
    """Raises InputError for a head that the task or the mesh does not support."""
    features = head.features
    if features == "embeddings" and not head.bilstm and not head.per_token:
        raise InputError(
            "head.features=embeddings: without a BiLSTM the head reads only the embedding of [CLS], which does not "
            "depend on the text; set head.bilstm"
        )
    if 2 * head.bilstm % mesh.shape["fsdp"]:
        raise InputError(
            f"head.bilstm={head.bilstm}: 2 * head.bilstm is not divisible by mesh.fsdp={mesh.shape['fsdp']}"
        )
