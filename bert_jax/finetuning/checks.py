"""Checks of a fine-tuning run, made before any work: its config, and that a workdir belongs to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from jax.sharding import Mesh

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.files.atomic import read_json
from bert_jax.finetuning.task import Split
from bert_jax.finetuning.tasks.kinds import KINDS
from bert_jax.model import BertConfig
from bert_jax.model.task_heads import TaskHead, layers_needed
from bert_jax.sections import from_mapping, to_dict
from bert_jax.training.checkpoints import Checkpoint, newest_intact
from bert_jax.training.checks import check_environment
from bert_jax.training.run import check_same_config


def check_config(config: FinetuneConfig) -> None:
    """Raises InputError, with the key, for a value out of range."""
    check_environment(config)
    if config.task.kind not in KINDS:
        raise InputError(f"task.kind={config.task.kind}: must be one of {', '.join(KINDS)}")
    if config.head.bilstm_layers > 1 and not config.head.bilstm:
        raise InputError(
            f"head.bilstm_layers={config.head.bilstm_layers}: requires a BiLSTM, got head.bilstm=0; set its units"
        )
    if config.early_stopping.patience and not config.keep_best:
        raise InputError(f"early_stopping.patience={config.early_stopping.patience}: requires keep_best=True")
    if not config.init:
        raise InputError("init=: expected the checkpoint to start from, such as init=runs/base")


def check_best(config: FinetuneConfig, splits: Sequence[Split]) -> None:
    """Raises InputError if the best epoch cannot be chosen: no split but a test split has labels."""
    first = next((split.name for split in splits if split.is_labelled), None)
    if config.keep_best and (first is None or first.startswith("test")):
        raise InputError(f"keep_best=True: requires labels to compare epochs, found {first or 'none'}; set task.dev")


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
    if head.features == "embeddings" and not head.bilstm and not head.per_token:
        raise InputError(
            "head.features=embeddings: without a BiLSTM the head reads only the embedding of [CLS], which does not "
            "depend on the text; set head.bilstm"
        )
    if 2 * head.bilstm % mesh.shape["fsdp"]:
        raise InputError(
            f"head.bilstm={head.bilstm}: 2 * head.bilstm is not divisible by mesh.fsdp={mesh.shape['fsdp']}"
        )


# --- Resuming: a workdir belongs to one run ----------------------------------------------------------------------

# Keys that may change when a run resumes; init and data.path if parameters and examples are the same there.
CHANGEABLE = (
    "log_every_steps", "eval_batch_size", "max_nonfinite_steps", "gradient_accumulation", "mesh.", "attention",
    "remat", "gradient_reduce_dtype", "scan_layers", "checkpoint.", "profile.", "tracking.", "stall_", "data.path",
    "init", "compilation_cache",
)  # fmt: skip


def claim(folder: epath.Path, config: FinetuneConfig, encoder: Checkpoint, dataset_hash: str) -> Checkpoint | None:
    """Returns the newest checkpoint of a workdir, None for a new one. InputError if it holds another run."""
    before = newest_intact(folder)
    if before is None:
        return None
    if before.task is None:
        raise InputError(f"workdir={folder}: holds a pre-training run; choose another folder")
    check_same_run(folder, before.config, config, encoder)
    if before.dataset_hashes != (dataset_hash,):
        raise InputError(
            f"workdir={folder}: its run was trained on other examples than those of data.path={config.data.path}; "
            "choose another folder"
        )
    return before


def check_same_run(folder: epath.Path, before: Mapping[str, Any], config: FinetuneConfig, encoder: Checkpoint) -> None:
    """Raises InputError if the run in a folder had another config, or started from other parameters than `encoder`."""
    check_same_config(folder, from_mapping(FinetuneConfig, before), config, CHANGEABLE)
    path = folder / provenance.FILE
    starts = read_json(path)["runs"] if remote.exists(path) else []
    if starts and starts[0]["inputs"]["init"]["digest"] != encoder.reference()["digest"]:
        raise InputError(
            f"workdir={folder}: its run started from other parameters than init={config.init} has now; set init to "
            "one step, WORKDIR/checkpoints/STEP, or choose another folder"
        )
