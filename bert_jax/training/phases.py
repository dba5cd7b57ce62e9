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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.batch import Batch, map_arrays, pretraining_shapes
from bert_jax.config_keys import PretrainConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.hashing import key_from
from bert_jax.data.loading.loader import EvalLoader, TrainLoader, TrainRows, make_mixture
from bert_jax.data.loading.masking import Masking, prediction_counts
from bert_jax.data.loading.mixture import row_shares
from bert_jax.data.loading.windows import epoch_size
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.parallel import host_batches
from bert_jax.parallel.mesh import check_divisibility, fill_in_accumulation
from bert_jax.sections import flatten, with_values
from bert_jax.text.vocabulary_extension import find_extension
from bert_jax.training.checks import (
    bert_config,
    check_attention,
    check_config,
    check_mixture,
    check_same_tokenizer,
    data_paths,
)
from bert_jax.training.optimizer import learning_rate_schedule

log = logging.getLogger(__name__)

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
    """Plan with its open datasets.

    Attributes:
      datasets: the datasets, in the order of `data.path`.
      model: the sizes of the model.
      first_row: number of rows of the same mixture that earlier phases have read.
      first_rows: first row of the phase in each dataset, counted over all epochs.
      read_before: `dataset_hash` of each earlier phase.
    """

    datasets: tuple[PreparedDataset, ...]
    model: BertConfig
    first_row: int
    first_rows: tuple[int, ...]
    read_before: tuple[str, ...]

    @property
    def dataset_hash(self) -> str:
        """Hash of the rows: equal for equal rows."""
        hashes = [dataset.info.hash for dataset in self.datasets]
        if len(hashes) == 1 and not self.config.data.packing:
            return hashes[0]
        return f"{key_from(*hashes, *self.config.data.weights, self.max_sequences):016x}"

    @property
    def max_sequences(self) -> int:
        """Maximal number of sequences in a row, K."""
        return self.config.data.max_sequences if self.config.data.packing else 1

    def epoch_size(self, dataset: PreparedDataset) -> int:
        """Returns the number of rows of a dataset in an epoch."""
        return epoch_size(dataset, self.max_sequences)

    def mixed(self, rows: int) -> list[int]:
        """Returns how many of the first `rows` rows of the phase's mixture are of each dataset."""
        if len(self.datasets) == 1:
            return [rows]
        weights = self.config.data.weights
        sizes = [] if weights else [self.epoch_size(dataset) for dataset in self.datasets]
        return make_mixture(self.datasets, row_shares(sizes, weights), self.config.seed).counts(rows)

    def next_rows(self) -> list[int]:
        """Returns the row of each dataset that comes after the phase."""
        end = self.first_row + (self.stop - self.start) * self.config.global_batch_size
        before, after = self.mixed(self.first_row), self.mixed(end)
        return [row + stop - start for row, start, stop in zip(self.first_rows, before, after, strict=True)]

    @property
    def seq_len(self) -> int:
        """Tokens in a row, L."""
        return self.datasets[0].info.seq_len


def plan_phases(config: PretrainConfig) -> list[Plan]:
    """Returns the phases of a run's config, in order.

    Steps of -1, in at most one phase, are inferred. Raises InputError for a key that a phase may not set, and for steps
    that do not sum to `total_steps`.
    """
    overrides: Sequence[Mapping[str, Any]] = config.phases or ({"steps": -1},)
    for number, phase in enumerate(overrides):
        if type(steps := phase.get("steps")) is not int or (steps < 1 and steps != -1):
            raise InputError(f"phases.{number}.steps={steps!r}: must be a number of steps, or -1 to infer it")
    given = [phase["steps"] for phase in overrides]
    fixed = sum(steps for steps in given if steps != -1)
    if given.count(-1) > 1 or not (fixed < config.total_steps if -1 in given else fixed == config.total_steps):
        raise InputError(
            f"phases: steps {given} sum to {fixed}, not total_steps={config.total_steps}; use -1 in one phase "
            "to infer it"
        )
    plans: list[Plan] = []
    for number, phase in enumerate(overrides):
        start = plans[-1].stop if plans else 0
        steps = phase["steps"] if phase["steps"] != -1 else config.total_steps - fixed
        plans.append(Plan(start, start + steps, _apply(config, number, phase)))
    return plans


def _apply(config: PretrainConfig, number: int, phase: Mapping[str, Any]) -> PretrainConfig:
    values = {key: value for key, value in phase.items() if key != "steps"}
    for key in values:
        if key in dict(flatten(config)) and not key.startswith(PHASE_KEYS):
            raise InputError(f"phases.{number}.{key}: a phase may not set this key; set it for the whole run")
    try:
        return with_values(config, values)
    except InputError as error:
        raise InputError(f"phases.{number}.{error}") from error


def plan_at(config: PretrainConfig, step: int) -> Plan:
    """Returns the phase that made the state after `step` steps; at a boundary, the one that ends there."""
    return next(plan for plan in plan_phases(config) if step <= plan.stop)


def open_phases(config: PretrainConfig) -> list[Phase]:
    """Opens the datasets of the phases and checks them against the model.

    Raises InputError for values out of range, datasets of different vocabularies, and sequences longer than the model
    supports.
    """
    check_config(config, config.total_steps)
    datasets: dict[str, PreparedDataset] = {}
    rows_read: dict[str, int] = {}
    last_read: dict[str, tuple[Phase, int]] = {}  # by dataset hash: the last phase that reads it, its index there
    phases: list[Phase] = []
    for plan in plan_phases(config):
        check_config(plan.config, plan.stop - plan.start)
        opened: list[PreparedDataset] = []
        for path in data_paths(plan.config):
            dataset = datasets[path] = datasets.get(path) or PreparedDataset(path)
            check_same_tokenizer(dataset, (phases[0].datasets if phases else [*opened, dataset])[0])
            opened.append(dataset)
        check_mixture(plan.config, opened)
        model = bert_config(plan.config, opened[0].tokenizer.vocab_size, opened[0].info.seq_len, str(opened[0].folder))
        read_before = tuple(earlier.dataset_hash for earlier in phases)
        phase = Phase(plan.start, plan.stop, plan.config, tuple(opened), model, 0, (), read_before)
        before = rows_read.get(phase.dataset_hash, 0)
        rows_read[phase.dataset_hash] = before + (plan.stop - plan.start) * plan.config.global_batch_size
        first_rows = tuple(_first_row(dataset, phase, last_read.get(dataset.info.hash)) for dataset in opened)
        phase = replace(phase, first_row=before, first_rows=first_rows)
        last_read |= {dataset.info.hash: (phase, index) for index, dataset in enumerate(opened)}
        phases.append(phase)
    return phases


def _first_row(dataset: PreparedDataset, phase: Phase, last_read: tuple[Phase, int] | None) -> int:
    """Returns the first row of `phase` in a dataset, given the phase that read it last."""
    if last_read is None:
        return 0
    before, index = last_read
    row = before.next_rows()[index]
    if before.max_sequences == phase.max_sequences:
        return row
    epochs = -(-row // before.epoch_size(dataset))
    return epochs * phase.epoch_size(dataset)


@dataclass(frozen=True)
class LoadedPhase:
    """A phase with its loaders. `old_loader` is that of the old domain, None without `eval_old_data`."""

    phase: Phase
    train_loader: TrainLoader
    eval_loader: EvalLoader
    old_loader: EvalLoader | None

    def abstract_batch(self, mesh: Mesh) -> Batch[jax.ShapeDtypeStruct]:
        """Returns the shapes and shardings of a step's batch on `mesh`."""
        phase = self.phase
        predictions = self.train_loader.sources[0].predictions
        return abstract_batch(mesh, phase.config, phase.seq_len, predictions, phase.max_sequences)

    @property
    def old_data(self) -> PreparedDataset | None:
        """The dataset of the old domain."""
        return self.old_loader.datasets[0] if self.old_loader else None


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


def load_phase(phase: Phase, mesh: Mesh | AbstractMesh, platform: str | None = None) -> LoadedPhase:
    """Makes the loaders of a phase, and infers its microbatches if they are not given.

    `platform` is that of the mesh's devices; it is required for an `AbstractMesh`.

    Raises InputError if batch, model or attention do not match the mesh, for invalid masks, and for an empty training
    split.
    """
    config = fill_in_accumulation(mesh, phase.config)
    if config is not phase.config:
        microbatches = config.gradient_accumulation
        log.info("Steps %d-%d: inferred gradient_accumulation=%d", phase.start + 1, phase.stop, microbatches)
        phase = replace(phase, config=config)
    check_divisibility(mesh, phase.model, config.global_batch_size, config.gradient_accumulation)
    check_attention(config, phase.model, phase.seq_len, mesh, platform)
    return LoadedPhase(phase, *make_loaders(phase), make_old_loader(phase))


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


def make_loaders(phase: Phase) -> tuple[TrainLoader, EvalLoader]:
    """Makes the loaders of both splits. Raises InputError for invalid masks and an empty training split."""
    config = phase.config
    masking = make_masking(config)
    sources = [
        TrainRows(
            dataset,
            seed=config.seed,
            masking=masking,
            static_masks=config.objective.static_masks,
            max_sequences=phase.max_sequences,
        )
        for dataset in phase.datasets
    ]
    train_loader = TrainLoader(
        sources,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        weights=tuple(config.data.weights),
        first_step=phase.start,
        first_row=phase.first_row,
        first_rows=phase.first_rows,
        stop=phase.stop,
    )
    return train_loader, _make_eval_loader(config, phase.datasets)


def _make_eval_loader(config: PretrainConfig, datasets: Sequence[PreparedDataset]) -> EvalLoader:
    return EvalLoader(
        datasets,
        batch_size=config.global_batch_size // config.gradient_accumulation,
        batches=config.eval_batches * config.gradient_accumulation,
        left_to_right=config.objective.lm == "ltr",
    )


def make_old_loader(phase: Phase) -> EvalLoader | None:
    """Makes the loader of the dataset in `eval_old_data`, None without one.

    Raises InputError if it or those of the phase have no eval split, if it has longer sequences than the model has
    positions, or a vocabulary that neither is the run's nor is extended by it.
    """
    if not phase.config.eval_old_data:
        return None
    key, run = f"eval_old_data={phase.config.eval_old_data}", phase.datasets[0]
    dataset = PreparedDataset(phase.config.eval_old_data)
    if find_extension(dataset.tokenizer, run.tokenizer) is None:
        raise InputError(
            f"{key}: was prepared with another vocabulary than {run.folder}, which does not extend it; prepare both "
            "with one --vocab"
        )
    if dataset.info.seq_len > phase.model.max_position_embeddings:
        raise InputError(
            f"{key}: has sequences of {dataset.info.seq_len} tokens, but model.max_position_embeddings="
            f"{phase.model.max_position_embeddings}; prepare it with --seq_len {phase.seq_len}"
        )
    if not dataset.size("eval") or not sum(other.size("eval") for other in phase.datasets):
        raise InputError(f"{key}: it or {run.folder} has no eval split; prepare both with --eval_fraction above 0")
    return _make_eval_loader(phase.config, [dataset])


def count_epochs(loader: TrainLoader, step: int) -> dict[str, float]:
    """Returns the epochs of each dataset read after `step` steps, by its index in `data.path`."""
    seen = loader.epochs(step)
    return {"epoch": seen[0]} if len(seen) == 1 else {f"epoch_{place}": count for place, count in enumerate(seen)}


def count_seen(phases: Sequence[LoadedPhase], step: int) -> dict[str, int]:
    """Returns `tokens_seen`, with padding, and `examples_seen` after `step` steps of a run with these phases.

    Both are functions of the step alone. For packed rows, a row counts as the mean number of sequences in a row.
    """
    tokens = examples = 0
    for loaded in phases:
        phase = loaded.phase
        rows = max(0, min(step, phase.stop) - phase.start) * phase.config.global_batch_size
        tokens += rows * phase.seq_len
        examples += round(rows * loaded.train_loader.sequences_a_row)
    return {"tokens_seen": tokens, "examples_seen": examples}


def log_data(loaded: LoadedPhase, start: int) -> None:
    """Logs data and predictions of a phase after step `start`, and the targets that `data.max_predictions` drops."""
    phase, loader = loaded.phase, loaded.train_loader
    rows = phase.config.global_batch_size
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
    if not loaded.eval_loader.batches:
        log.warning(
            "Steps %d-%d: no evaluation, because the dataset has no eval split or eval_batches=0", start + 1, phase.stop
        )
    masking = make_masking(phase.config)
    if masking is None or masking.predictions(phase.seq_len) == prediction_counts(phase.seq_len, masking.mask_rate):
        return
    lengths = np.arange(phase.seq_len + 1)
    counts = sum(np.bincount(dataset.lengths("train"), minlength=len(lengths)) for dataset in phase.datasets)
    log.warning(
        "Steps %d-%d: data.max_predictions=%d predicts %d of the %d targets of a full sequence "
        "(objective.mask_rate=%g), and %.1f%% of all tokens; -1 predicts all targets",
        start + 1, phase.stop, masking.max_predictions, masking.predictions(phase.seq_len),
        prediction_counts(phase.seq_len, masking.mask_rate), masking.mask_rate,
        100 * (counts @ masking.predictions(lengths)) / (counts @ lengths),
    )  # fmt: skip
