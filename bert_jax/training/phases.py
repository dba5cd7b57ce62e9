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
import numpy as np
import optax

from bert_jax.batch import Batch, map_arrays, pretraining_shapes
from bert_jax.config_keys import PretrainConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from
from bert_jax.data.loading.loader import EvalLoader, TrainLoader, TrainRows
from bert_jax.data.loading.masking import Masking, prediction_counts
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.parallel import mesh as meshes
from bert_jax.parallel.mesh import AnyMesh, check_divisibility, fill_in_accumulation
from bert_jax.sections import flatten, with_values
from bert_jax.training.checks import (
    bert_config,
    check_attention,
    check_config,
    check_mixture,
    data_paths,
)
from bert_jax.training.objectives import objective_name
from bert_jax.training.optimizer import learning_rate_schedule

log = logging.getLogger(__name__)

# Keys that a phase may set: none of them changes the structure or the shardings of the state.
PHASE_KEYS = (
    "data.", "objective.", "global_batch_size", "gradient_accumulation", "max_rows_per_device", "attention", "remat",
    "scan_layers", "gradient_reduce_dtype", "log_every_steps", "eval_every_steps", "eval_batches",
    "model.hidden_dropout_prob", "model.attention_probs_dropout_prob", "model.embedding_dropout",
    "model.attention_output_dropout", "model.mlp_dropout", "model.global_rope_theta", "model.local_rope_theta",
    "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.schedule", "optimizer.decay_",
    "optimizer.weight_decay", "optimizer.grad_clip_norm",
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
            optimizer.learning_rate, optimizer.warmup_steps, stop - start, optimizer, start=start
        )

    def skipped(self) -> list[tuple[int, int]]:
        """Returns the ranges of `data.skip_steps` that begin in these steps; the batches are of this plan's size."""
        return [pair for pair in self.config.data.skipped() if self.start < pair[0] <= self.stop]


@dataclass(frozen=True)
class Phase(Plan):
    """Plan with its open datasets and their loaders.

    Attributes:
      datasets: the datasets, in the order of `data.path`.
      model: the sizes of the model.
      train_loader: the batches of its steps.
      eval_loader: the batches of an evaluation.
      dataset_hashes: a hash of the rows of each phase up to this one, equal for equal rows.
      repeated: the positions, from the first, that the others start as copies of (`repeat_positions`); 0: none do.
    """

    datasets: tuple[PreparedDataset, ...]
    model: BertConfig
    train_loader: TrainLoader
    eval_loader: EvalLoader
    dataset_hashes: tuple[str, ...]
    repeated: int

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
    if late := [first for first, _ in config.data.skipped() if first > config.total_steps]:
        raise InputError(f"data.skip_steps: step {late[0]} is past total_steps={config.total_steps}")
    return plans


def is_phase_key(key: str) -> bool:
    """Returns whether a phase may set a key."""
    return key.startswith(PHASE_KEYS) and key != "data.skip_steps"  # which counts the steps of the run


def _apply(config: PretrainConfig, number: int, phase: Mapping[str, Any]) -> PretrainConfig:
    values = {key: value for key, value in phase.items() if key != "steps"}
    for key in values:
        if key in dict(flatten(config)) and not is_phase_key(key):
            raise InputError(f"phases.{number}.{key}: a phase may not set this key; set it for the whole run")
        if key.startswith("objective.") and values[key] == "auto":
            raise InputError(f"phases.{number}.{key}=auto: the run resolves it; set it for the whole run")
    return with_values(config, values)


def plan_at(config: PretrainConfig, step: int) -> Plan:
    """Returns the phase that made the state after `step` steps; at a boundary, the one that ends there."""
    return next(plan for plan in plan_phases(config) if step <= plan.stop)


def open_phases(config: PretrainConfig, mesh: AnyMesh, platform: str | None = None) -> list[Phase]:
    """Opens the datasets of the phases, checks them against model and mesh, and makes their loaders.

    `platform` is that of the mesh's devices; it is required for an `AbstractMesh`.

    Raises InputError for values out of range or that do not match the mesh, datasets of different vocabularies,
    sequences longer than the model supports, invalid masks, and an empty training split.
    """
    datasets: dict[str, PreparedDataset] = {}
    phases: list[Phase] = []
    for plan in plan_phases(config):
        check_config(plan.config, plan.stop - plan.start)
        opened: list[PreparedDataset] = []
        for path in data_paths(plan.config):
            dataset = datasets[path] = datasets.get(path) or PreparedDataset(path)
            opened.append(dataset)
            first = (phases[0].datasets if phases else opened)[0]
            if dataset.tokenizer.sha256 != first.tokenizer.sha256:
                raise InputError(
                    f"{dataset.folder} and {first.folder} have different vocabularies; prepare both with one"
                )
        check_mixture(plan.config, opened)
        seq_len = opened[0].info.seq_len
        fitted = fit_plan(plan, mesh, seq_len, opened[0].tokenizer.vocab_size, str(opened[0].folder), platform)
        phases.append(_open_phase(*fitted, opened, phases))
    kinds = {one.info.options.get("pairs") for phase in phases for one in phase.datasets if phase.config.objective.nsp}
    if {"nsp", "sop"} <= kinds:
        raise InputError(
            "data.path: some datasets were prepared with --pairs nsp and some with --pairs sop, whose labels differ in "
            "meaning; use datasets of one kind, or set objective.nsp=False"
        )
    has_new = any(phase.repeated for phase in phases) and phases[0].model.position_embedding_type == "absolute"
    if config.repeat_positions and (config.init or not has_new):
        raise InputError(
            "repeat_positions=True: requires learned positions, a phase with longer rows than those before it, and no "
            "init, with which positions repeat anyway; otherwise set it to False"
        )
    target = config.target
    is_possible = 0 < target.value <= (1 if target.metric.endswith("accuracy") else math.inf)
    if target != type(target)() and not (is_possible and any(_is_measured(target.metric, one) for one in phases)):
        raise InputError(
            f"target.metric={target.metric}: needs a loss above 0 or an accuracy of at most 1 as target.value, got "
            f"{target.value}, and evaluations with it, which a phase lacks if it has no eval split, eval_batches=0, "
            "eval_every_steps=0 or another objective; set target.metric='' to train for total_steps"
        )
    return phases


def _is_measured(metric: str, phase: Phase) -> bool:
    is_part = metric == "loss" or metric.partition("_")[0] in objective_name(phase.config).split(" + ")
    return is_part and phase.config.eval_every_steps > 0 and phase.eval_loader.batches > 0


def fit_plan(
    plan: Plan, mesh: AnyMesh, seq_len: int, vocab_size: int, source: str, platform: str | None = None
) -> tuple[Plan, BertConfig]:
    """Returns the plan with its inferred accumulation, and its model for rows of `seq_len` tokens of `source`.

    Raises InputError if they do not match each other and the mesh. For `platform` see `open_phases`.
    """
    config = fill_in_accumulation(mesh, plan.config)
    model = bert_config(config, vocab_size, seq_len, source)
    check_divisibility(mesh, model, config.global_batch_size, config.gradient_accumulation)
    check_attention(config, model, seq_len, mesh, platform)
    return replace(plan, config=config), model


def _open_phase(plan: Plan, model: BertConfig, datasets: Sequence[PreparedDataset], before: Sequence[Phase]) -> Phase:
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
            phase.train_loader.row_after(phase.stop) - phase.train_loader.row_after(phase.start)
            for phase in before if phase.dataset_hashes[-1] == rows_hash
        ),
        first_rows=[_first_row(source, before) for source in sources],
        skipped=plan.skipped(),
    )  # fmt: skip
    eval_loader = EvalLoader(
        datasets,
        batch_size=config.global_batch_size // config.gradient_accumulation,
        microbatches=config.gradient_accumulation,
        batches=config.eval_batches,
        left_to_right=config.objective.lm == "ltr",
    )
    read = (*before[-1].dataset_hashes, rows_hash) if before else (rows_hash,)
    trained = max((phase.seq_len for phase in before), default=0)
    repeated = trained if config.repeat_positions and trained < datasets[0].info.seq_len else 0
    return Phase(plan.start, plan.stop, config, tuple(datasets), model, train_loader, eval_loader, read, repeated)


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
    mesh: AnyMesh, config: PretrainConfig, seq_len: int, predictions: int, sequences: int
) -> Batch[jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of a step's batch on `mesh`: rows of L tokens, P predictions and K sequences.

    With several processes it has `stop`, too.
    """
    shapes = pretraining_shapes(config.global_batch_size, seq_len, predictions, sequences)
    batch = meshes.abstract_batch(
        mesh, map_arrays(lambda entry: jax.ShapeDtypeStruct(*entry), shapes), config.gradient_accumulation,
        batch_size=config.global_batch_size,
    )  # fmt: skip
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        batch["stop"] = jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=meshes.flag_sharding(mesh))
    return batch


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
    """Logs the rows of a phase after step `start`, and warns of predictions and evaluations that it lacks."""
    loader, rows = phase.train_loader, phase.config.global_batch_size
    log.info(
        "Steps %d-%d: objective %s, %s tokens per step, in %d rows of %d (%.1f%% real) in %d microbatches, %.3g "
        "sequences and up to %d predictions per row",
        start + 1, phase.stop, objective_name(phase.config), f"{rows * phase.seq_len:,}", rows, phase.seq_len,
        100 * loader.real_share, phase.config.gradient_accumulation, loader.sequences_a_row,
        loader.sources[0].predictions,
    )  # fmt: skip
    for first, last in phase.skipped():
        log.info(
            "data.skip_steps=%d:%d: leaves out %d batches, %s rows, before step %d",
            first, last, last - first + 1, f"{(last - first + 1) * rows:,}", first,
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
