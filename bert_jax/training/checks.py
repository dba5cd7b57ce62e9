"""Checks before a run does any work: config, dataset and model have to match."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from bert_jax.config import ConfigDict, flatten
from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.attention import ATTENTIONS, CUDNN_HEADS
from bert_jax.model.encoder import REMAT_POLICIES
from bert_jax.runtime.compilation_cache import check_setting
from bert_jax.tracking.profiling import parse_steps
from bert_jax.tracking.wandb_tracker import check_wandb
from bert_jax.training.checkpointing.checkpoints import Checkpoint
from bert_jax.training.checkpointing.retention import Milestones
from bert_jax.training.optimizer import OPTIMIZERS

log = logging.getLogger(__name__)

OBJECTIVES = ("mlm", "ltr")
_SMALLEST_SHARE = 1e-6
DTYPES = ("auto", "float32", "bfloat16")
REDUCE_DTYPES = DTYPES[1:]
MAX_BATCH_SIZE = 1 << 16
"""Limit in rows outside of training: no device holds more."""
MAX_SAMPLES = 64
"""Limit of text samples, whose fills are logged at each evaluation."""
MAX_GLOBAL_BATCH_SIZE = 1 << 20
"""Limit in training: 16 times the 65,536 sequences of LAMB's recipe."""


def bert_config(config: ConfigDict, vocab_size: int, seq_len: int, source: str) -> BertConfig:
    """Makes the model's sizes for rows of `seq_len` tokens and the vocabulary of `source`, which -1 stands for.

    Raises InputError if they do not match.
    """
    sizes = dict(config.model.items())
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
    except ValueError as error:
        raise InputError(f"model.{error}") from error
    if model.type_vocab_size < 2:
        raise InputError(f"model.type_vocab_size={model.type_vocab_size}: pairs have segments 0 and 1; set it to 2")
    if seq_len > model.max_position_embeddings:
        raise InputError(
            f"{source} has sequences of {seq_len} tokens, but model.max_position_embeddings="
            f"{model.max_position_embeddings}; raise it, or prepare with a smaller --seq_len"
        )
    return model


def check_values(values: Mapping[str, Any]) -> Callable[..., None]:
    """Checks the keys that every run has, and returns `check(holds, expected, *keys)` for further keys.

    `check` raises InputError for a key whose value is not `expected`, a text that completes "must be". InputError as
    well if JAX is set to 64 bits.
    """
    if jax.config.values["jax_enable_x64"]:
        raise InputError("JAX_ENABLE_X64 is set: training computes with at most 32 bits; unset it")

    def check(holds: Callable[[Any], bool], expected: str, *keys: str) -> None:
        for key in keys:
            if not holds(values[key]):
                raise InputError(f"{key}={values[key]}: must be {expected}")

    check(
        lambda x: x >= 1, "at least 1", "global_batch_size", "log_every_steps", "max_nonfinite_steps",
        "checkpoint.every_steps", "checkpoint.keep",
    )  # fmt: skip
    check(lambda x: x <= MAX_GLOBAL_BATCH_SIZE, f"at most {MAX_GLOBAL_BATCH_SIZE}", "global_batch_size")
    check(lambda x: 0 <= x < 2**31, "in [0, 2**31)", "seed")
    check(lambda x: 0 <= x < math.inf, "a number of minutes, or 0", "stall_minutes")
    check(
        lambda x: 0 <= x < math.inf, "a number of 0 or more", "optimizer.learning_rate", "optimizer.weight_decay",
        "optimizer.grad_clip_norm",
    )  # fmt: skip
    check(lambda x: 0 < x < math.inf, "above 0", "optimizer.decay_power", "optimizer.eps")
    check(lambda x: 0 <= x < 1, "in [0, 1)", "optimizer.b1", "optimizer.b2")
    check(lambda x: x in ATTENTIONS, f"one of {', '.join(ATTENTIONS)}", "attention")
    check(lambda x: x in REMAT_POLICIES, f"one of {', '.join(REMAT_POLICIES)}", "remat")
    check(lambda x: x in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}", "optimizer.name")
    check(bool, "auto, none or a folder", "compilation_cache")
    check_setting(values["compilation_cache"])
    check(lambda x: x in (True, False, "auto"), "true, false or auto", "scan_layers")
    check(lambda x: x in DTYPES, f"one of {', '.join(DTYPES)}", "dtype")
    check(lambda x: x in REDUCE_DTYPES, f"one of {', '.join(REDUCE_DTYPES)}", "gradient_reduce_dtype")
    parse_steps(values["profile.steps"])
    check_wandb(values["tracking.wandb_project"])
    return check


def check_config(config: ConfigDict, steps: int) -> None:
    """Raises InputError, with the key, for a value out of range. `config` is that of a phase of `steps` steps."""
    values = dict(flatten(config))
    check = check_values(values)
    check(lambda x: 1 <= x < 2**31, "in [1, 2**31)", "total_steps")
    check(lambda x: x >= 1, "at least 1", "data.max_sequences")
    check(lambda x: isinstance(x, bool), "true or false", "objective.nsp")
    check(lambda x: x >= 1 or x == -1, "at least 1, or -1", "gradient_accumulation")
    if values["gradient_accumulation"] == -1:
        check(lambda x: x >= 1, "at least 1 with gradient_accumulation=-1", "max_rows_per_device")
    check(lambda x: x >= 0, "at least 0", "max_rows_per_device", "eval_every_steps", "optimizer.warmup_steps")
    check(lambda x: x >= -1, "at least -1", "eval_batches")
    check(lambda x: x >= 1 or x == -1, "at least 1, or -1", "data.seq_len")
    check(lambda x: 0 <= x < math.inf, "a number of 0 or more", "model.initializer_range")
    check(lambda x: 0 < x < math.inf, "above 0", "model.layer_norm_eps")
    check(lambda x: x in OBJECTIVES, f"one of {', '.join(OBJECTIVES)}", "objective.lm")
    check(lambda x: x >= 0, "at least 0", "objective.static_masks")
    check(lambda x: 0 <= x <= MAX_SAMPLES, f"in [0, {MAX_SAMPLES}]", "tracking.samples")
    Milestones.from_config(config)
    if values["objective.lm"] == "ltr" and values["objective.nsp"]:
        raise InputError(
            "objective.lm=ltr does not support objective.nsp=True: under a causal mask [CLS] sees only itself and "
            "cannot predict the next sentence; set objective.nsp=False"
        )
    restarts, total = values["optimizer.restart_schedule"], values["total_steps"]
    within = steps if restarts else total
    if values["optimizer.warmup_steps"] >= within:
        raise InputError(
            f"optimizer.warmup_steps={values['optimizer.warmup_steps']}: must be below "
            f"{f'the {steps} steps of its phase' if restarts else f'total_steps={total}'}; otherwise the learning rate "
            f"never reaches its peak; set optimizer.warmup_steps={within // 10}"
        )


def check_attention(
    config: ConfigDict, model: BertConfig, seq_len: int, mesh: Mesh | AbstractMesh, platform: str | None = None
) -> None:
    """Raises InputError if the kernel in `attention` does not support the rest of the config.

    `platform` is that of the mesh's devices; it is required for an `AbstractMesh`.
    """
    name, dropout, tensor = config.attention, config.model.attention_probs_dropout_prob, mesh.shape["tensor"]
    if name == "xla":
        return

    def check(holds: bool, problem: str) -> None:
        if not holds:
            raise InputError(f"attention={name}: {problem}, or set attention=xla")

    kernel, here = {"pallas": "tpu", "cudnn": "gpu"}[name], platform or mesh.devices.flat[0].platform
    check(tensor == 1, f"does not support tensor parallelism, got mesh.tensor={tensor}; set mesh.tensor=1")
    check(here == kernel, f"needs {kernel.upper()} devices, got {here.upper()}; run on {kernel.upper()}")
    dtype = compute_dtype(config.dtype, here)
    if name == "pallas":
        # Few runs need the import, which takes a fourth of a second.
        from bert_jax.model.pallas_attention import LANES, LARGEST_KEYS

        longest, size = LARGEST_KEYS // dtype.itemsize, model.hidden_size
        check(
            seq_len <= longest,
            f"does not support seq_len={seq_len} in {dtype}; prepare with --seq_len {longest} or less",
        )
        check(size % LANES == 0, f"does not support model.hidden_size={size}; choose a multiple of {LANES}")
        return
    check(
        dropout == 0,
        f"does not support model.attention_probs_dropout_prob={dropout}; set model.attention_probs_dropout_prob=0.0",
    )
    check(dtype == jnp.bfloat16, f"does not support dtype={dtype}; set dtype=bfloat16")
    check(seq_len % 2 == 0, f"does not support odd seq_len={seq_len}; prepare with an even --seq_len")
    check(
        model.head_size in CUDNN_HEADS,
        f"does not support heads of model.hidden_size={model.hidden_size} / model.num_attention_heads="
        f"{model.num_attention_heads} = {model.head_size} features; choose a multiple of 8 up to 128",
    )


def data_paths(config: ConfigDict) -> list[str]:
    """Returns the folders in `data.path`. Raises InputError for none, an empty one between commas, or a duplicate."""
    paths = [path.strip() for path in config.data.path.split(",")]
    if not config.data.path:
        raise InputError("data.path is not set; pass --config.data.path=DIR, the output of `bert-jax prepare`")
    if "" in paths or len(set(paths)) < len(paths):
        raise InputError(
            f"data.path={config.data.path}: expected folders separated by commas, without empty or duplicate ones"
        )
    return paths


def check_mixture(config: ConfigDict, datasets: Sequence[PreparedDataset]) -> None:
    """Raises InputError if the datasets of a run, its weights and its objective do not match."""
    weights = tuple(config.data.weights)
    if weights and len(weights) != len(datasets):
        raise InputError(f"data.weights={weights}: expected {len(datasets)} weights, one for each dataset in data.path")
    if not all(isinstance(weight, (int, float)) and 0 < weight < math.inf for weight in weights):
        raise InputError(f"data.weights={weights}: must be numbers above 0")
    if weights and not min(weights) / max(weights) > _SMALLEST_SHARE:
        raise InputError(f"data.weights={weights}: the smallest must be above {_SMALLEST_SHARE:g} times the largest")
    for dataset in datasets:
        if config.data.seq_len not in (-1, dataset.info.seq_len):
            raise InputError(
                f"{dataset.folder} has sequences of {dataset.info.seq_len} tokens, but data.seq_len="
                f"{config.data.seq_len}; prepare it with --seq_len {config.data.seq_len}"
            )
        if dataset.info.seq_len != datasets[0].info.seq_len:
            raise InputError(
                f"{dataset.folder} has sequences of {dataset.info.seq_len} tokens and {datasets[0].folder} of "
                f"{datasets[0].info.seq_len}; prepare both with one --seq_len"
            )
        if dataset.info.options.get("pairs") == "none" and config.objective.nsp:
            raise InputError(
                f"{dataset.folder} was prepared with --pairs none and has no next sentences; set objective.nsp=False"
            )


def compute_dtype(name: str, platform: str | None = None) -> jnp.dtype:
    """Returns the type that `dtype` names; "auto" is float32 on platform "cpu" and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"
    return jnp.dtype(name)


def check_batch_size(batch_size: int) -> None:
    """Raises InputError for an invalid `--batch_size`."""
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise InputError(f"--batch_size={batch_size}: must be in 1 to {MAX_BATCH_SIZE}")


def check_tokenizer(checkpoint: Checkpoint, dataset: PreparedDataset) -> None:
    """Raises InputError if dataset and checkpoint have different vocabularies."""
    if checkpoint.tokenizer.sha256 != dataset.tokenizer.sha256:
        raise other_vocabulary_error(checkpoint, dataset)


def other_vocabulary_error(checkpoint: Checkpoint, dataset: PreparedDataset) -> InputError:
    """Returns the error for a dataset whose vocabulary is not that of a checkpoint."""
    return InputError(
        f"{dataset.folder} was prepared with another vocabulary than {checkpoint.path} was trained with; prepare the "
        f"corpus with --vocab {checkpoint.path}"
    )


def check_same_tokenizer(dataset: PreparedDataset, other: PreparedDataset) -> None:
    """Raises InputError if two datasets of a run were prepared with different vocabularies."""
    if dataset.tokenizer.sha256 != other.tokenizer.sha256:
        raise InputError(
            f"{dataset.folder} and {other.folder} were prepared with different vocabularies; prepare both with one"
        )


def warn_of_uncorrected_lamb(sections: Iterable[ConfigDict]) -> None:
    """Logs one warning if an `optimizer` section is LAMB without bias correction, which is off by default.

    The default does not depend on the name: a run that started without bias correction resumes without it.
    """
    if any(section.name == "lamb" and not section.bias_correction for section in sections):
        log.warning(
            "optimizer.name=lamb with optimizer.bias_correction=False: the paper and NVIDIA's recipe correct the bias "
            "of the moments; set optimizer.bias_correction=True unless this is meant"
        )
