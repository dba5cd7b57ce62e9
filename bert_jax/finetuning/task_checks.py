"""Checks of a fine-tuning config, made before any work."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.inputs.batching import EncodedExamples
from bert_jax.finetuning.task import Split
from bert_jax.finetuning.task_kinds import TASK_KINDS
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead, layers_needed
from bert_jax.sections import to_dict
from bert_jax.training.checks import check_environment


def check_config(config: FinetuneConfig) -> None:
    """Raises InputError, with the key, for a value out of range."""
    check_environment(config)
    if config.task.kind not in TASK_KINDS:
        raise InputError(f"task.kind={config.task.kind}: must be one of {', '.join(TASK_KINDS)}")
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


def _check_early_stopping(config: FinetuneConfig) -> None:
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


def check_best(config: FinetuneConfig, splits: Sequence[Split]) -> None:
    """Raises InputError if the best epoch cannot be chosen: no split but a test split has labels."""
    first = next((split.name for split in splits if split.score is not None), None)
    if config.keep_best and (first is None or first.startswith("test")):
        raise InputError(
            f"keep_best=True: requires a labelled split to compare epochs, found {first or 'none'}; set task.dev to a "
            "labelled file"
        )


def model_of(config: FinetuneConfig, encoder: BertConfig) -> BertConfig:
    """Returns the encoder with the config's dropout. InputError if it has too few positions or layers."""
    model = dataclasses.replace(encoder, **to_dict(config.model))
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
