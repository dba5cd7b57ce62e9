"""Phases of a run: step ranges that differ in some keys, such as sequences of 128 tokens and then of 512.

    config.phases = (
        {"steps": 900_000, "data.path": "data128"},
        {"steps": -1, "data.path": "data512"},
    )

All phases share one workdir, one state and one step counter. A run without phases has one phase.

A phase continues to read a dataset where the last phase that read it stopped, in any mixture: order and masks depend on
the dataset and its epoch. Another packing makes other rows, so reading continues with the next full epoch.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.batch import Batch, map_arrays, pretraining_shapes
from bert_jax.config_keys import PretrainConfig, RunConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from
from bert_jax.data.loading.loader import EvalLoader, TrainLoader, TrainRows
from bert_jax.data.loading.masking import Masking, prediction_counts
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.attention import CUDNN_HEADS
from bert_jax.parallel import host_batches
from bert_jax.parallel.mesh import check_divisibility, fill_in_accumulation
from bert_jax.sections import flatten, to_dict, with_values
from bert_jax.tracking.trackers import check_wandb
from bert_jax.training.optimizer import learning_rate_schedule
from bert_jax.training.train_step import compute_dtype

log = logging.getLogger(__name__)

_SMALLEST_SHARE = 1e-6

# Keys that a phase may set: none of them changes the structure or the shardings of the state.
PHASE_KEYS = (
    "data.", "objective.", "global_batch_size", "gradient_accumulation", "max_rows_per_device", "attention", "remat",
    "scan_layers", "gradient_reduce_dtype", "log_every_steps", "eval_every_steps", "eval_batches",
    "model.hidden_dropout_prob", "model.attention_probs_dropout_prob", "optimizer.learning_rate",
    "optimizer.warmup_steps", "optimizer.decay_power", "optimizer.weight_decay", "optimizer.grad_clip_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Steps `start` + 1 to `stop` of a run, and their config: that of the run, with the overrides."""

    start: int
    stop: int
    config: PretrainConfig

    def schedule(self) -> optax.Schedule:
        """Maps a step of the run to the learning rate: one schedule for the whole run unless each phase restarts it."""
        optimizer, start, stop = self.config.optimizer, 0, self.config.total_steps
        if optimizer.restart_schedule:
            start, stop = self.start, self.stop
        return learning_rate_schedule(
            optimizer.learning_rate,
            optimizer.warmup_steps,
            stop - start,
            decay_power=optimizer.decay_power,
            start=start,
        )


@dataclass(frozen=True)
class Phase(Plan):
    """Plan with its open datasets and their loaders.

    Attributes:
      datasets: the datasets, in the order of `data.path`.
      model: the sizes of the model.
      train_loader: the batches of its steps.
      eval_loader: the batches of an evaluation.
      dataset_hashes: a hash of the rows of each phase up to this one, equal for equal rows.
    """

    datasets: tuple[PreparedDataset, ...]
    model: BertConfig
    train_loader: TrainLoader
    eval_loader: EvalLoader
    dataset_hashes: tuple[str, ...]

    @property
    def seq_len(self) -> int:
        """Tokens in a row, L."""
        return self.datasets[0].info.seq_len


def plan_phases(config: PretrainConfig) -> list[Plan]:
    """Returns the phases of a run's config, in order.

    Steps of -1, in at most one phase, are inferred. Raises InputError for a key that a phase may not set, and for steps
    that do not sum to `total_steps`.
    """
    plans: list[Plan] = []
    for number, steps in enumerate(config.phase_steps()):
        start = plans[-1].stop if plans else 0
        phase = config.phases[number] if config.phases else {}
        plans.append(Plan(start, start + steps, _apply(config, number, phase)))
    return plans


def _apply(config: PretrainConfig, number: int, phase: Mapping[str, Any]) -> PretrainConfig:
    values = {key: value for key, value in phase.items() if key != "steps"}
    for key in values:
        if key in dict(flatten(config)) and not key.startswith(PHASE_KEYS):
            raise InputError(f"phases.{number}.{key}: a phase may not set this key; set it for the whole run")
        if key.startswith("objective.") and values[key] == "auto":
            raise InputError(f"phases.{number}.{key}=auto: the run resolves it; set it for the whole run")
    try:
        return with_values(config, values)
    except InputError as error:
        raise InputError(f"phases.{number}.{error}") from error


def plan_at(config: PretrainConfig, step: int) -> Plan:
    """Returns the phase that made the state after `step` steps; at a boundary, the one that ends there."""
    return next(plan for plan in plan_phases(config) if step <= plan.stop)


def open_phases(
    config: PretrainConfig, mesh: Mesh | AbstractMesh, platform: str | None = None
) -> list[Phase]:  # fmt: skip
    """Opens the datasets of the phases, checks them against model and mesh, and makes their loaders.

    `platform` is that of the mesh's devices; it is required for an `AbstractMesh`.

    Raises InputError for values out of range or that do not match the mesh, datasets of different vocabularies,
    sequences longer than the model supports, invalid masks, and an empty training split.
    """
    check_config(config, config.total_steps)
    datasets: dict[str, PreparedDataset] = {}
    phases: list[Phase] = []
    for plan in plan_phases(config):
        check_config(plan.config, plan.stop - plan.start)
        opened: list[PreparedDataset] = []
        for path in data_paths(plan.config):
            dataset = datasets[path] = datasets.get(path) or PreparedDataset(path)
            check_same_tokenizer(dataset, (phases[0].datasets if phases else [*opened, dataset])[0])
            opened.append(dataset)
        check_mixture(plan.config, opened)
        seq_len = opened[0].info.seq_len
        fitted, model = fit_plan(
            plan, mesh, seq_len, opened[0].tokenizer.vocab_size, str(opened[0].folder), platform
        )  # fmt: skip
        if fitted.config is not plan.config:
            log.info(
                "Steps %d-%d: inferred gradient_accumulation=%d", plan.start + 1, plan.stop,
                fitted.config.gradient_accumulation,
            )  # fmt: skip
        phases.append(_open_phase(fitted, opened, model, phases))
    return phases


def fit_plan(
    plan: Plan, mesh: Mesh | AbstractMesh, seq_len: int, vocab_size: int, source: str, platform: str | None = None
) -> tuple[Plan, BertConfig]:
    """Returns the plan with its inferred accumulation, and its model for rows of `seq_len` tokens of `source`.

    Raises InputError if they do not match each other and the mesh. For `platform` see `open_phases`.
    """
    config = fill_in_accumulation(mesh, plan.config)
    model = bert_config(config, vocab_size, seq_len, source)
    check_divisibility(mesh, model, config.global_batch_size, config.gradient_accumulation)
    check_attention(config, model, seq_len, mesh, platform)
    return replace(plan, config=config), model


def _open_phase(plan: Plan, datasets: Sequence[PreparedDataset], model: BertConfig, before: Sequence[Phase]) -> Phase:
    """Makes the loaders of a phase, which continue after those of the phases before it."""
    config = plan.config
    max_sequences = config.data.max_sequences if config.data.packing else 1
    sources = [
        TrainRows(
            dataset, seed=config.seed, masking=make_masking(config), static_masks=config.objective.static_masks,
            max_sequences=max_sequences,
        )
        for dataset in datasets
    ]  # fmt: skip
    hashes = [dataset.info.hash for dataset in datasets]
    rows_hash = hashes[0]
    if len(hashes) > 1 or config.data.packing:
        rows_hash = f"{key_from(*hashes, config.data.weights, max_sequences):016x}"
    weights = config.data.weights
    if isinstance(weights, str):
        weights = tuple(source.size ** float(weights.removeprefix("size**")) for source in sources)
    train_loader = TrainLoader(
        sources,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        weights=weights,
        first_step=plan.start,
        first_row=sum(
            (phase.stop - phase.start) * phase.config.global_batch_size
            for phase in before if phase.dataset_hashes[-1] == rows_hash
        ),
        first_rows=[_first_row(source, before) for source in sources],
    )  # fmt: skip
    eval_loader = EvalLoader(
        datasets,
        batch_size=config.global_batch_size // config.gradient_accumulation,
        batches=config.eval_batches * config.gradient_accumulation,
        left_to_right=config.objective.lm == "ltr",
    )
    read = before[-1].dataset_hashes if before else ()
    return Phase(
        plan.start, plan.stop, config, tuple(datasets), model, train_loader, eval_loader, (*read, rows_hash)
    )  # fmt: skip


def _first_row(rows: TrainRows, before: Sequence[Phase]) -> int:
    """Returns the row that follows those that earlier phases have read of a dataset; of other packing, an epoch's."""
    for phase in reversed(before):
        for source, row in zip(phase.train_loader.sources, phase.train_loader.next_rows(phase.stop), strict=True):
            if source.dataset.info.hash == rows.dataset.info.hash:
                return row if source.max_sequences == rows.max_sequences else -(-row // source.size) * rows.size
    return 0


def make_masking(config: PretrainConfig) -> Masking | None:
    """Makes the masking of a config, None for a left-to-right model. Raises InputError for invalid masks."""
    objective = config.objective
    masking = Masking(
        config.data.max_predictions,
        mask_rate=objective.mask_rate,
        mask_token=objective.mask_token,
        keep_token=objective.keep_token,
        random_token=objective.random_token,
        whole_word=objective.whole_word,
    )
    return None if objective.lm == "ltr" else masking


def abstract_batch(
    mesh: Mesh, config: PretrainConfig, seq_len: int, predictions: int, sequences: int
) -> Batch[jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of a step's batch on `mesh`: rows of L tokens, P predictions and K sequences.

    With several processes it has `stop`, too.
    """
    shapes = pretraining_shapes(config.global_batch_size, seq_len, predictions, sequences)
    batch = host_batches.abstract_batch(
        mesh, map_arrays(lambda entry: jax.ShapeDtypeStruct(*entry), shapes), config.gradient_accumulation,
        batch_size=config.global_batch_size,
    )  # fmt: skip
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        batch["stop"] = jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=host_batches.flag_sharding(mesh))
    return batch


# --- Checks: config, dataset, model and mesh have to match ------------------------------------------------------------


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
    if model.type_vocab_size < 2:
        raise InputError(f"model.type_vocab_size={model.type_vocab_size}: pairs have segments 0 and 1; set it to 2")
    if seq_len > model.max_position_embeddings:
        raise InputError(
            f"{source} has sequences of {seq_len} tokens, but model.max_position_embeddings="
            f"{model.max_position_embeddings}; raise it, or prepare with a smaller --seq_len"
        )
    return model


def check_environment(config: RunConfig) -> None:
    """Raises InputError for what no run can have: 64 bits, W&B without its package."""
    if jax.config.values["jax_enable_x64"]:
        raise InputError("JAX_ENABLE_X64 is set: training computes with at most 32 bits; unset it")
    check_wandb(config.tracking.wandb_project)


def check_config(config: PretrainConfig, steps: int) -> None:
    """Raises InputError, with the key, for values that do not match. `config` is that of a phase of `steps` steps."""
    check_environment(config)
    if config.gradient_accumulation == -1 and config.max_rows_per_device < 1:
        raise InputError(
            f"max_rows_per_device={config.max_rows_per_device}: must be at least 1 with gradient_accumulation=-1"
        )
    if (last := max(config.checkpoint.milestones, default=0)) > config.total_steps:
        raise InputError(f"checkpoint.milestones: step {last} is past total_steps={config.total_steps}")
    if config.objective.lm == "ltr" and config.objective.nsp:
        raise InputError(
            "objective.lm=ltr does not support objective.nsp=True: under a causal mask [CLS] sees only itself and "
            "cannot predict the next sentence; set objective.nsp=False"
        )
    restarts, total, warmup = config.optimizer.restart_schedule, config.total_steps, config.optimizer.warmup_steps
    within = steps if restarts else total
    if warmup >= within:
        raise InputError(
            f"optimizer.warmup_steps={warmup}: must be below "
            f"{f'the {steps} steps of its phase' if restarts else f'total_steps={total}'}; otherwise the learning rate "
            f"never reaches its peak; set optimizer.warmup_steps={within // 10}"
        )


def check_attention(
    config: RunConfig, model: BertConfig, seq_len: int, mesh: Mesh | AbstractMesh, platform: str | None = None
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
    if len({*hashes}) < len(hashes):
        same = [str(dataset.folder) for dataset in datasets if hashes.count(dataset.info.hash) > 1]
        raise InputError(f"data.path={config.data.path}: {' and '.join(same)} are the same dataset; name it once")
    weights = () if isinstance(config.data.weights, str) else config.data.weights
    if weights and len(weights) != len(datasets):
        raise InputError(f"data.weights={weights}: expected {len(datasets)} weights, one for each dataset in data.path")
    if not all(0 < weight < math.inf for weight in weights):
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


def check_same_tokenizer(dataset: PreparedDataset, other: PreparedDataset) -> None:
    """Raises InputError if two datasets of a run were prepared with different vocabularies."""
    if dataset.tokenizer.sha256 != other.tokenizer.sha256:
        raise InputError(
            f"{dataset.folder} and {other.folder} were prepared with different vocabularies; prepare both with one"
        )


# --- Progress ---------------------------------------------------------------------------------------------------------


def count_epochs(loader: TrainLoader, step: int) -> dict[str, float]:
    """Returns the epochs of each dataset read after `step` steps, by its index in `data.path`."""
    seen = loader.epochs(step)
    return {"epoch": seen[0]} if len(seen) == 1 else {f"epoch_{place}": count for place, count in enumerate(seen)}


def count_seen(phases: Sequence[Phase], step: int) -> dict[str, int]:
    """Returns `tokens_seen`, with padding, and `examples_seen` after `step` steps of a run with these phases.

    Both are functions of the step alone. For packed rows, a row counts as the mean number of sequences in a row.
    """
    tokens = examples = 0
    for phase in phases:
        rows = max(0, min(step, phase.stop) - phase.start) * phase.config.global_batch_size
        tokens += rows * phase.seq_len
        examples += round(rows * phase.train_loader.sequences_a_row)
    return {"tokens_seen": tokens, "examples_seen": examples}


def log_data(phase: Phase, start: int) -> None:
    """Logs the rows of a phase after step `start`, and where it reads its datasets."""
    loader, rows = phase.train_loader, phase.config.global_batch_size
    log.info(
        "Steps %d-%d: %s tokens per step, in %d rows of %d (%.1f%% real), %.3g sequences and up to %d predictions per "
        "row",
        start + 1, phase.stop, f"{rows * phase.seq_len:,}", rows, phase.seq_len, 100 * loader.real_share,
        loader.sequences_a_row, loader.sources[0].predictions,
    )  # fmt: skip
    for source, row, epochs in zip(loader.sources, loader.next_rows(start), loader.epochs(phase.stop), strict=True):
        log.info(
            "Dataset %s: %s examples; step %d starts at row %s of %s in epoch %d; %.3g epochs are read after step %d",
            source.dataset.folder, f"{source.dataset.size('train'):,}", start + 1, f"{row % source.size + 1:,}",
            f"{source.size:,}", row // source.size + 1, epochs, phase.stop,
        )  # fmt: skip
    if (masking := make_masking(phase.config)) is not None:
        most, wanted = masking.predictions(phase.seq_len), prediction_counts(phase.seq_len, masking.mask_rate)
        if most < wanted:
            log.warning(
                "data.max_predictions=%d: predicts %d of the %d targets of a full sequence; -1 predicts all",
                masking.max_predictions, most, wanted,
            )  # fmt: skip
    if not phase.eval_loader.batches:
        log.warning(
            "Steps %d-%d: no evaluation, because the dataset has no eval split or eval_batches=0", start + 1, phase.stop
        )
