"""Checks of a fine-tuning run, made before any work: its config, and that a workdir belongs to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from jax.sharding import Mesh

from bert_jax.config_keys import FinetuneConfig
from bert_jax.data.corpora.tfds_corpus import is_tfds
from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.files.format_versions import read_json
from bert_jax.finetuning.task import Split
from bert_jax.finetuning.tasks.kinds import KINDS
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead, layers_needed
from bert_jax.sections import flatten, from_mapping, to_dict
from bert_jax.training.checkpoints import Checkpoint, newest_intact, open_checkpoint
from bert_jax.training.checks import check_environment
from bert_jax.training.run import check_same_config


def check_config(config: FinetuneConfig) -> None:
    """Raises InputError, with the key, for a value out of range."""
    check_environment(config)
    if config.task.kind not in KINDS:
        raise InputError(f"task.kind={config.task.kind}: must be one of {', '.join(KINDS)}")
    if config.task.positive_label and config.task.kind != "text":
        raise InputError(
            f"task.positive_label={config.task.positive_label}: task.kind={config.task.kind} does not support it, only "
            "task.kind=text; leave it empty"
        )
    if config.head.bilstm_layers > 1 and not config.head.bilstm:
        raise InputError(
            f"head.bilstm_layers={config.head.bilstm_layers}: requires a BiLSTM, got head.bilstm=0; set its units"
        )
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
    if not config.init:
        raise InputError("init=: expected the checkpoint to start from, such as init=runs/base")


def check_best(config: FinetuneConfig, splits: Sequence[Split]) -> None:
    """Raises InputError if the best epoch cannot be chosen: no split but a test split has labels."""
    first = next((split.name for split in splits if split.is_labelled), None)
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


# --- Resuming: a workdir belongs to one run ----------------------------------------------------------------------

# Keys that may change when a run resumes.
CHANGEABLE = (
    "log_every_steps", "eval_batch_size", "max_nonfinite_steps", "gradient_accumulation", "mesh.", "attention",
    "remat", "gradient_reduce_dtype", "scan_layers", "checkpoint.", "profile.", "tracking.", "stall_", "data.path",
    "init", "compilation_cache",
)  # fmt: skip


def claim(folder: epath.Path, config: FinetuneConfig, dataset_hash: str) -> Checkpoint | None:
    """Returns the newest checkpoint of a workdir, None for a new one. InputError if it holds another run."""
    before = newest_intact(folder)
    if before is None:
        return None
    if before.task is None:
        raise InputError(f"workdir={folder}: holds a pre-training run; choose another folder")
    check_same_run(folder, before.config, config, sources=("init",))
    if before.dataset_hashes != (dataset_hash,):
        raise InputError(
            f"workdir={folder}: its run was trained on other examples than those of data.path={config.data.path}; "
            "choose another folder"
        )
    return before


def check_same_run(
    folder: epath.Path, before: Mapping[str, Any], config: FinetuneConfig, *, sources: Sequence[str] = ()
) -> None:
    """Raises InputError as `check_same_config` does if the config is not that of the run in `folder`.

    `sources` are keys of paths that may change only if the old path no longer exists, because it was moved. `init` may
    also change to another path of the same parameters.
    """
    old = from_mapping(FinetuneConfig, before)
    paths, now = dict(flatten(old)), dict(flatten(config))
    moved = {key for key in sources if not _is_elsewhere(paths[key], now[key])}
    if old.init != config.init and _is_same_encoder(folder, config.init):
        moved.add("init")
    check_same_config(folder, old, config, tuple({*CHANGEABLE} - {*sources} | moved))


def _is_elsewhere(before: str | None, now: str) -> bool:
    """Returns True if the old path still exists and is not the new path."""
    if not before or is_tfds(before):
        return bool(before)
    return remote.exists(remote.parse_path(before)) and remote.absolute(before) != remote.absolute(now)


def _is_same_encoder(folder: epath.Path, init: str) -> bool:
    """Returns True if the run in a folder is known to have started from the parameters in `init`."""
    digest = started_from(folder)
    return digest is not None and digest == encoder_digest(init)


def encoder_digest(init: str) -> str | None:
    """Returns the digest of the parameters in `init`; None if they are gone, or an older version saved them."""
    try:
        result: str | None = open_checkpoint(init).reference()["digest"]
        return result
    except InputError:  # which a run that needs them raises
        return None


def started_from(folder: epath.Path) -> str | None:
    """Returns the digest of the parameters that the run in a folder started from; None if there is no record of it."""
    digest: str | None = _inputs(folder, 0).get("init", {}).get("digest")
    return digest


def read_examples(folder: epath.Path) -> dict[str, str]:
    """Returns the hashes of the examples that the run in a folder was trained on and scored by; {} without a record."""
    task = _inputs(folder, -1).get("task", {})
    return {"train": task["hash"], **task["scored"]} if {"hash", "scored"} <= task.keys() else {}


def _inputs(folder: epath.Path, start: int) -> dict[str, Any]:
    """Returns the inputs of a start of the run in a folder: 0 is the first, -1 the last; {} without a record."""
    try:
        inputs: dict[str, Any] = read_json(folder / provenance.FILE)["runs"][start]["inputs"]
        return inputs
    except (OSError, InputError, LookupError, TypeError):
        return {}
