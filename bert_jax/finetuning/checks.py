"""What is checked before fine-tuning does any work."""

import dataclasses

from bert_jax.config import ConfigDict, flatten
from bert_jax.errors import InputError
from bert_jax.finetuning.tasks import TASKS
from bert_jax.model import BertConfig
from bert_jax.training.checkpoints import Checkpoint
from bert_jax.training.checks import check_values

_LEAST_TOKENS = 4  # [CLS], one of each text, [SEP]; the second [SEP] may stand for an empty text


def check_config(config: ConfigDict) -> None:
    """InputError for values out of range, each with the key that holds it."""
    values = dict(flatten(config))
    check = check_values(values)
    check(lambda x: x >= 1, "at least 1", "num_epochs", "gradient_accumulation", "eval_batch_size")
    check(lambda x: x >= _LEAST_TOKENS, f"at least {_LEAST_TOKENS}", "task.max_seq_len")
    check(lambda x: x >= 0, "at least 0", "head.bilstm")
    check(
        lambda x: x >= 1, "at least 1", "task.doc_stride", "task.max_query_length", "task.n_best",
        "task.max_answer_length",
    )  # fmt: skip
    check(
        lambda x: 0 <= x < 1, "in [0, 1)", "head.dropout", "optimizer.warmup_proportion",
        "model.hidden_dropout_prob", "model.attention_probs_dropout_prob",
    )  # fmt: skip
    check(lambda x: x in TASKS, f"one of {', '.join(TASKS)}", "task.kind")
    if not config.init:
        raise InputError("init is empty: name the checkpoint to start from, --config.init=CHECKPOINT")


def model_of(config: ConfigDict, checkpoint: Checkpoint) -> BertConfig:
    """The checkpoint's model with the config's dropout. InputError where it does not read as many tokens."""
    model = dataclasses.replace(checkpoint.bert_config, **dict(config.model.items()))
    if config.task.max_seq_len > model.max_position_embeddings:
        raise InputError(
            f"task.max_seq_len={config.task.max_seq_len}, but {checkpoint.path} reads {model.max_position_embeddings} "
            "tokens at the most: lower it"
        )
    return model
