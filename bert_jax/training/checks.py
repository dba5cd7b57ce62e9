"""What is checked before a run does any work: config, dataset, devices and workdir have to fit each other."""

import jax
import jax.numpy as jnp
from etils import epath

from bert_jax.config import ConfigDict, flatten
from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.encoder import REMAT_POLICIES
from bert_jax.training.checkpoints import Checkpoint, newest_step, open_checkpoint

# What a run may change when it goes on; all else would make it another run in the same folder.
CHANGEABLE = (
    "total_steps", "log_every_steps", "eval_every_steps", "eval_batches", "max_nonfinite_steps", "mesh.", "remat",
    "scan_layers", "checkpoint.", "data.path",
)  # fmt: skip


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
    if dataset.info.seq_len > model.max_position_embeddings:
        raise InputError(
            f"{dataset.folder} has sequences of {dataset.info.seq_len} tokens, but model.max_position_embeddings="
            f"{model.max_position_embeddings}: raise it, or prepare with a smaller --seq_len"
        )
    return model


def check_config(config: ConfigDict) -> None:
    """InputError for values out of range."""
    positive = ("total_steps", "log_every_steps", "max_nonfinite_steps", "checkpoint.every_steps", "checkpoint.keep")
    values = dict(flatten(config))
    for key in positive:
        if values[key] < 1:
            raise InputError(f"{key} has to be at least 1, not {values[key]}")
    if config.remat not in REMAT_POLICIES:
        raise InputError(f"remat is one of {', '.join(REMAT_POLICIES)}, not {config.remat!r}")
    compute_dtype(config.dtype)


def compute_dtype(name: str) -> jnp.dtype:
    """The type that `dtype` names; "auto" is bfloat16 where there are matrix units for it."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16"):
        raise InputError(f"dtype is float32, bfloat16 or auto, not {name!r}")
    return jnp.dtype(name)


def claim_workdir(folder: epath.Path, config: ConfigDict, dataset: PreparedDataset) -> None:
    """Makes the workdir; InputError where it holds a run of another config, vocabulary or dataset."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--workdir: {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    if newest_step(folder) is None:
        return
    before = open_checkpoint(str(folder))
    check_tokenizer(before, dataset)
    if before.dataset_hash != dataset.info.hash:
        raise InputError(
            f"--workdir: {folder} was trained on another dataset than {dataset.folder}: choose another folder"
        )
    old, new = dict(flatten(ConfigDict(before.config))), dict(flatten(config))
    changed = [
        f"{key} {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not key.startswith(CHANGEABLE)
    ]
    if changed:
        raise InputError(
            f"--workdir: {folder} holds a run with another config ({'; '.join(changed)}): choose another folder"
        )


def check_tokenizer(checkpoint: Checkpoint, dataset: PreparedDataset) -> None:
    """InputError where a dataset's token ids mean something else to a checkpoint."""
    if checkpoint.tokenizer.sha256 != dataset.tokenizer.sha256:
        raise InputError(
            f"{dataset.folder} was prepared with another vocabulary than {checkpoint.path} was trained with: prepare "
            "the corpus with the checkpoint's vocabulary"
        )
