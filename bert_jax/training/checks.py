"""Checks of a run before any work: config, datasets, model, mesh and environment have to match."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config_keys import PretrainConfig, RunConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.attention import CUDNN_HEADS, WITHOUT_DROPOUT
from bert_jax.parallel.mesh import AnyMesh
from bert_jax.sections import to_dict
from bert_jax.tracking.trackers import check_wandb
from bert_jax.training.optimizer import check_schedule, count_steps
from bert_jax.training.train_step import compute_dtype


def bert_config(config: PretrainConfig, vocab_size: int, seq_len: int, source: str) -> BertConfig:
    """Makes the model's sizes for rows of `seq_len` tokens and the vocabulary of `source`, which -1 stands for.

    Raises InputError if they do not match.
    """
    sizes: dict[str, Any] = to_dict(config.model)
    if sizes["vocab_size"] == -1:
        sizes["vocab_size"] = vocab_size
    if sizes["vocab_size"] != vocab_size:
        raise InputError(
            f"model.vocab_size={sizes['vocab_size']}: {source} was prepared with a vocabulary of {vocab_size}; set "
            "model.vocab_size=-1 to infer it"
        )
    sizes["is_decoder"] = config.objective.lm == "ltr"
    try:
        model = BertConfig.from_dict(sizes)
    except InputError as error:
        raise InputError(f"model.{error}") from error
    if model.type_vocab_size == 1:
        raise InputError(
            f"model.type_vocab_size={model.type_vocab_size}: pairs have segments 0 and 1; set it to 2, or 0 for none"
        )
    if config.objective.nsp and not model.pooler:
        raise InputError("objective.nsp=True: model.pooler=False has no next-sentence head; set objective.nsp=False")
    if seq_len > model.max_position_embeddings:
        raise InputError(
            f"{source} has sequences of {seq_len} tokens, but model.max_position_embeddings="
            f"{model.max_position_embeddings}; raise it, or prepare with a smaller --seq_len"
        )
    return model


def check_environment(config: RunConfig) -> None:
    """Raises InputError for what no run can have: 64 bits, W&B without its package, stall_exit without a watch."""
    if jax.config.values["jax_enable_x64"]:
        raise InputError("JAX_ENABLE_X64 is set: training computes with at most 32 bits; unset it")
    check_wandb(config.tracking.wandb_project)
    if config.stall_exit and not config.stall_minutes:
        raise InputError("stall_exit=True: has no effect with stall_minutes=0; set stall_minutes=10")


def check_profile(config: RunConfig, total_steps: int) -> None:
    """Raises InputError for a trace that begins after the last step."""
    first = config.profile.steps.partition(":")[0]
    if first and int(first) > total_steps:
        raise InputError(f"profile.steps={config.profile.steps}: step {first} is past the run's {total_steps} steps")


def check_config(config: PretrainConfig, steps: int) -> None:
    """Raises InputError, with the key, for values that do not match. `config` is that of a phase of `steps` steps."""
    check_environment(config)
    if config.gradient_accumulation == -1 and config.max_rows_per_device < 1:
        raise InputError(
            f"max_rows_per_device={config.max_rows_per_device}: must be at least 1 with gradient_accumulation=-1"
        )
    check_profile(config, config.total_steps)
    if (last := max(config.checkpoint.milestones, default=0)) > config.total_steps:
        raise InputError(f"checkpoint.milestones: step {last} is past total_steps={config.total_steps}")
    if config.objective.lm == "ltr" and config.objective.nsp:
        raise InputError(
            "objective.lm=ltr does not support objective.nsp=True: under a causal mask [CLS] sees only itself and "
            "cannot predict the next sentence; set objective.nsp=False"
        )
    recipe, total = config.optimizer, config.total_steps
    within = steps if recipe.restart_schedule else total
    if count_steps(recipe.warmup_steps, within) >= within:
        raise InputError(
            f"optimizer.warmup_steps={recipe.warmup_steps}: must be below "
            f"{f'the {steps} steps of its phase' if recipe.restart_schedule else f'total_steps={total}'}; otherwise "
            f"the learning rate never reaches its peak; set optimizer.warmup_steps={within // 10}"
        )
    check_schedule(recipe, recipe.warmup_steps, within)


def check_attention(
    config: RunConfig, model: BertConfig, seq_len: int, mesh: AnyMesh, platform: str | None = None
) -> None:
    """Raises InputError if the kernel in `attention` does not support the rest of the config.

    `platform` is that of the mesh's devices; it is required for an `AbstractMesh`.
    """
    name, dropout, tensor = config.attention, model.attention_probs_dropout_prob, mesh.shape["tensor"]
    if name == "xla":
        return
    kernel, here = "gpu" if name == "cudnn" else "tpu", platform or mesh.devices.flat[0].platform
    dtype, size, heads = compute_dtype(config.dtype, here), model.hidden_size, model.num_attention_heads
    every, rate = model.global_attn_every_n_layers, "model.attention_probs_dropout_prob"
    conditions = {
        f"does not support tensor parallelism, got mesh.tensor={tensor}; set mesh.tensor=1": tensor == 1,
        f"needs {kernel.upper()} devices, got {here.upper()}; run on {kernel.upper()}": here == kernel,
        f"does not support {rate}={dropout}; set {rate}=0.0": dropout == 0 or name not in WITHOUT_DROPOUT,
    }
    if name == "pallas":
        # Few runs need the import, which takes a fourth of a second.
        from bert_jax.model.pallas_attention import LANES, LARGEST_KEYS

        most = LARGEST_KEYS // dtype.itemsize
        conditions |= {
            f"does not support seq_len={seq_len} in {dtype}; prepare with --seq_len {most} or less": seq_len <= most,
            f"does not support model.hidden_size={size}; choose a multiple of {LANES}": size % LANES == 0,
            f"does not support model.global_attn_every_n_layers={every}; set it to 1, or attention=splash": every == 1,
        }
    elif name == "cudnn":
        conditions |= {
            f"does not support dtype={dtype}; set dtype=bfloat16": dtype == jnp.bfloat16,
            f"does not support odd seq_len={seq_len}; prepare with an even --seq_len": seq_len % 2 == 0,
            f"does not support heads of model.hidden_size={size} / model.num_attention_heads={heads} = "
            f"{model.head_size} features; choose a multiple of 8 up to 128": model.head_size in CUDNN_HEADS,
        }
    if problems := [problem for problem, holds in conditions.items() if not holds]:
        raise InputError(f"attention={name}: {problems[0]}, or set attention=xla")


def data_paths(config: PretrainConfig) -> list[str]:
    """Returns the folders in `data.path`. Raises InputError for none, and for an empty one between commas."""
    paths = [path.strip() for path in config.data.path.split(",")]
    if not config.data.path:
        raise InputError("data.path=: expected the output of `bert-jax prepare`, such as data.path=data")
    if "" in paths:
        raise InputError(f"data.path={config.data.path}: expected folders separated by commas, without empty ones")
    return paths


def check_mixture(config: PretrainConfig, datasets: Sequence[PreparedDataset]) -> None:
    """Raises InputError if the datasets of a run, its weights and its objective do not match."""
    hashes = [dataset.info.hash for dataset in datasets]
    if same := [str(dataset.folder) for dataset in datasets if hashes.count(dataset.info.hash) > 1]:
        raise InputError(f"data.path={config.data.path}: {' and '.join(same)} are the same dataset; name it once")
    weights = () if isinstance(config.data.weights, str) else config.data.weights
    if weights and len(weights) != len(datasets):
        raise InputError(f"data.weights={weights}: expected {len(datasets)} weights, one for each dataset in data.path")
    if not all(0 < weight < math.inf and weight > 1e-6 * max(weights) for weight in weights):
        raise InputError(f"data.weights={weights}: must be above 0, and above 1e-6 times the largest")
    wanted = datasets[0].info.seq_len if config.data.seq_len == -1 else config.data.seq_len
    for dataset in datasets:
        if dataset.info.seq_len != wanted:
            raise InputError(
                f"{dataset.folder} has sequences of {dataset.info.seq_len} tokens; expected {wanted}, by data.seq_len="
                f"{config.data.seq_len} or {datasets[0].folder}; prepare it with --seq_len {wanted}"
            )
        if dataset.info.options.get("pairs") == "none" and config.objective.nsp:
            raise InputError(
                f"{dataset.folder} was prepared with --pairs none and has no next sentences; set objective.nsp=False"
            )
