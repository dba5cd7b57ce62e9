"""What is checked before a run does any work: config, dataset, devices and workdir have to fit each other."""

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from bert_jax.config import ConfigDict, flatten
from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.encoder import REMAT_POLICIES
from bert_jax.training.checkpoints import Checkpoint, newest_step, open_checkpoint

log = logging.getLogger(__name__)

# What a run may change when it goes on; all else would make it another run in the same folder.
CHANGEABLE = (
    "total_steps", "log_every_steps", "eval_every_steps", "eval_batches", "max_nonfinite_steps", "mesh.", "remat",
    "scan_layers", "checkpoint.", "data.path", "optimizer.",
)  # fmt: skip


DTYPES = ("auto", "float32", "bfloat16")


def open_dataset(config: ConfigDict) -> PreparedDataset:
    """The dataset of `data.path`."""
    if not config.data.path:
        raise InputError("data.path is not set: give --config.data.path=DIR, the output of `bert-jax prepare`")
    return PreparedDataset(config.data.path)


def bert_config(config: ConfigDict, dataset: PreparedDataset) -> BertConfig:
    """The model's sizes; -1 for `vocab_size` is the dataset's. InputError where they do not fit the dataset."""
    sizes = dict(config.model.items())
    vocab_size = dataset.tokenizer.vocab_size
    if sizes["vocab_size"] == -1:
        sizes["vocab_size"] = vocab_size
    if sizes["vocab_size"] != vocab_size:
        raise InputError(
            f"model.vocab_size={sizes['vocab_size']}, but {dataset.folder} was prepared with a vocabulary of "
            f"{vocab_size}: leave it at -1"
        )
    try:
        model = BertConfig.from_dict(sizes)
    except ValueError as error:
        raise InputError(f"model.{error}") from error
    if model.type_vocab_size < 2:
        raise InputError(f"model.type_vocab_size={model.type_vocab_size}, but pairs have segments 0 and 1: set it to 2")
    if dataset.info.seq_len > model.max_position_embeddings:
        raise InputError(
            f"{dataset.folder} has sequences of {dataset.info.seq_len} tokens, but model.max_position_embeddings="
            f"{model.max_position_embeddings}: raise it, or prepare with a smaller --seq_len"
        )
    return model


def check_config(config: ConfigDict) -> None:
    """InputError for values out of range, each with the key that holds it."""
    values = dict(flatten(config))

    def check(holds: Callable[[Any], bool], wanted: str, *keys: str) -> None:
        for key in keys:
            if not holds(values[key]):
                raise InputError(f"{key} has to be {wanted}, not {values[key]}")

    check(
        lambda x: x >= 1, "at least 1", "total_steps", "global_batch_size", "gradient_accumulation", "log_every_steps",
        "max_nonfinite_steps", "checkpoint.every_steps", "checkpoint.keep",
    )  # fmt: skip
    check(lambda x: x >= 0, "at least 0", "eval_every_steps", "optimizer.warmup_steps")
    check(lambda x: x >= -1, "at least -1", "eval_batches")
    check(lambda x: 0 <= x < 2**31, "in [0, 2**31)", "seed")
    check(
        lambda x: 0 <= x < math.inf, "a number of 0 or more", "optimizer.learning_rate", "optimizer.weight_decay",
        "optimizer.grad_clip_norm", "model.initializer_range",
    )  # fmt: skip
    check(lambda x: 0 < x < math.inf, "above 0", "optimizer.eps", "model.layer_norm_eps")
    check(lambda x: 0 <= x < 1, "in [0, 1)", "optimizer.b1", "optimizer.b2")
    check(lambda x: x in REMAT_POLICIES, f"one of {', '.join(REMAT_POLICIES)}", "remat")
    check(lambda x: x in DTYPES, f"one of {', '.join(DTYPES)}", "dtype")
    if values["optimizer.warmup_steps"] >= values["total_steps"]:
        raise InputError(
            f"optimizer.warmup_steps={values['optimizer.warmup_steps']} has to be below total_steps="
            f"{values['total_steps']}: the learning rate would never reach its peak"
        )


def compute_dtype(name: str) -> jnp.dtype:
    """The type that `dtype` names; "auto" is bfloat16 where there are matrix units for it."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def claim_workdir(folder: epath.Path, config: ConfigDict, dataset: PreparedDataset) -> int:
    """Makes the workdir and returns the step it is at; InputError where it holds another run.

    That is one of another vocabulary, dataset or config; what a run may change is in `CHANGEABLE`, and is logged.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--workdir: {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    newest = newest_step(folder)
    if newest is None:
        return 0
    before = open_checkpoint(str(folder))
    check_tokenizer(before, dataset)
    if before.dataset_hash != dataset.info.hash:
        raise InputError(
            f"--workdir: {folder} was trained on another dataset than {dataset.folder}: choose another folder"
        )
    old, new = dict(flatten(ConfigDict(before.config))), dict(flatten(config))
    changed = {key: f"{key} {old[key]!r} -> {new[key]!r}" for key in sorted({*old} & {*new}) if old[key] != new[key]}
    refused = [text for key, text in changed.items() if not key.startswith(CHANGEABLE)]
    if refused:
        raise InputError(
            f"--workdir: {folder} holds a run with another config ({'; '.join(refused)}): choose another folder"
        )
    if changed:
        log.warning("going on with another config: %s", "; ".join(changed.values()))
    if int(newest.name) > config.total_steps:
        raise InputError(
            f"--workdir: {folder} is at step {newest.name}, past total_steps={config.total_steps}: raise it"
        )
    return int(newest.name)


def check_tokenizer(checkpoint: Checkpoint, dataset: PreparedDataset) -> None:
    """InputError where a dataset's token ids mean something else to a checkpoint."""
    if checkpoint.tokenizer.sha256 != dataset.tokenizer.sha256:
        raise InputError(
            f"{dataset.folder} was prepared with another vocabulary than {checkpoint.path} was trained with: prepare "
            "the corpus with the checkpoint's vocabulary"
        )
