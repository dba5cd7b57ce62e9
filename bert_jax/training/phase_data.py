"""Data of a phase of pre-training: its masking, the loaders of both splits, and what the log says of them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.batch import Batch, map_arrays, pretraining_shapes
from bert_jax.config_keys import PretrainConfig
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import EvalLoader, TrainLoader, TrainRows
from bert_jax.data.loading.masking import Masking, prediction_counts
from bert_jax.errors import InputError
from bert_jax.parallel import host_batches
from bert_jax.parallel.mesh import check_divisibility, fill_in_accumulation
from bert_jax.text.vocabulary_extension import find_extension
from bert_jax.training.checks import check_attention
from bert_jax.training.phases import Phase

log = logging.getLogger(__name__)


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
