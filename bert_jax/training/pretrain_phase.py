"""One phase of pre-training: its data, training step, evaluations and checkpoints."""

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bert_jax.config import ConfigDict
from bert_jax.data.loading.loader import EvalLoader, TrainLoader, TrainRows
from bert_jax.data.loading.masking import Masking, prediction_counts
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.parallel.host_batches import rows_here
from bert_jax.tracking.throughput import Throughput, pretraining_work, summary
from bert_jax.training.checks import compute_dtype
from bert_jax.training.evaluation import Evaluator
from bert_jax.training.loop import Run, StepRange, run_steps
from bert_jax.training.objectives import NEXT_SENTENCE_PARTS, pretraining
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.phases import Phase, Plan
from bert_jax.training.state import StateSpec, TrainState, describe_state
from bert_jax.training.train_step import TrainStep, make_eval_step, make_train_step

log = logging.getLogger(__name__)


def make_masking(config: ConfigDict) -> Masking | None:
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
    )
    eval_loader = EvalLoader(
        phase.datasets,
        batch_size=config.global_batch_size // config.gradient_accumulation,
        batches=config.eval_batches * config.gradient_accumulation,
        left_to_right=masking is None,
    )
    return train_loader, eval_loader


def log_data(phase: Phase, loader: TrainLoader, start: int) -> None:
    """Logs data and predictions of a phase after step `start`, and the targets that `data.max_predictions` drops."""
    log.info(
        "Steps %d-%d: %d rows of %d tokens per step (%.1f%% real), %.3g sequences and up to %d predictions per row",
        start + 1, phase.stop, phase.config.global_batch_size, phase.seq_len, 100 * loader.real_share,
        loader.sequences_a_row, loader.sources[0].predictions,
    )  # fmt: skip
    for source, row, epochs in zip(loader.sources, loader.next_rows(start), loader.epochs(phase.stop), strict=True):
        log.info(
            "Dataset %s: %s examples; step %d starts at row %s of %s in epoch %d; %.3g epochs are read after step %d",
            source.dataset.folder, f"{source.dataset.size('train'):,}", start + 1, f"{row % source.size + 1:,}",
            f"{source.size:,}", row // source.size + 1, epochs, phase.stop,
        )  # fmt: skip
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


def _epochs(loader: TrainLoader, step: int) -> dict[str, float]:
    """Returns the epochs of each dataset read after `step` steps, by its index in `data.path`."""
    seen = loader.epochs(step)
    return {"epoch": seen[0]} if len(seen) == 1 else {f"epoch_{place}": count for place, count in enumerate(seen)}


def plan_state(mesh: Mesh, config: ConfigDict, model: BertConfig) -> tuple[optax.GradientTransformation, StateSpec]:
    """Makes the optimizer and the plan of the state. Phases differ only in how the model runs."""
    untrained = () if config.objective.nsp else NEXT_SENTENCE_PARTS
    optimizer = make_optimizer(config.optimizer, abstract_parameters(model)[2], untrained=untrained)
    spec = describe_state(
        mesh, model, optimizer, config.seed, zero1=config.mesh.zero1,
        dtype=compute_dtype(config.dtype, mesh.devices.flat[0].platform), attention=config.attention,
        remat=config.remat,
        scan_layers=config.scan_layers,
    )  # fmt: skip
    return optimizer, spec


def plan_step(mesh: Mesh, plan: Plan, model: BertConfig) -> tuple[StateSpec, TrainStep]:
    """Makes the plan of the state and the jitted training step."""
    config = plan.config
    optimizer, spec = plan_state(mesh, config, model)
    train_step = make_train_step(
        mesh, spec, optimizer, plan.schedule(), pretraining(nsp=config.objective.nsp), seed=config.seed,
        gradient_reduce_dtype=jnp.dtype(config.gradient_reduce_dtype),
    )  # fmt: skip
    return spec, train_step


def train_phase(run: Run, phase: Phase, state: TrainState, start: int) -> tuple[TrainState, dict[str, float]]:
    """Trains from step `start` + 1 to the end of the phase, evaluates and saves. Returns state and last evaluation.

    `state` is the state after `start` steps; it is donated. Raises the errors of `pretrain`.
    """
    config = phase.config

    # --- Data ----------------------------------------------------------------------------------------------------
    train_loader, eval_loader = make_loaders(phase)
    log_data(phase, train_loader, start)
    if not eval_loader.batches:
        log.warning("No evaluation in this phase: the dataset has no eval split, or eval_batches=0")

    # --- Steps ---------------------------------------------------------------------------------------------------
    spec, train_step = plan_step(run.mesh, phase, phase.model)
    eval_step = make_eval_step(run.mesh, spec.graph, spec.shardings.parameters)
    evaluator = Evaluator(run.mesh, eval_step, eval_loader, nsp=config.objective.nsp)

    # --- Loop ----------------------------------------------------------------------------------------------------
    rows = rows_here(run.mesh, config.global_batch_size, config.gradient_accumulation)

    def evaluate(at: int, state: TrainState) -> dict[str, float]:
        eval_bar = run.bars(total=eval_loader.batches, desc="evaluate", unit="batch", leave=False)

        def on_batch() -> None:
            eval_bar.update(1)
            run.stalls.beat(at)

        values = evaluator.run(state.parameters, on_batch)
        eval_bar.close()
        run.writer.write(at, values, split="eval")
        log.info("Step %d: eval %s; unigram baseline %.2f", at, summary(values), values["unigram_loss"])
        return values

    def save(step: int, state: TrainState, unlogged: dict[str, Any]) -> None:
        hashes = (*phase.read_before, phase.dataset_hash)
        run.checkpointer.save(
            step, state, bert_config=phase.model, dataset_hashes=hashes, first_rows=phase.first_rows, unlogged=unlogged
        )

    steps = StepRange(
        start, phase.stop, train_step,
        make_batch=lambda step: train_loader.batch(step, rows),
        batch_size=config.global_batch_size,
        microbatches=config.gradient_accumulation,
        throughput=Throughput(pretraining_work(config, phase.model, train_loader)),
        log_every=config.log_every_steps,
        save_every=config.checkpoint.every_steps,
        evaluates_after=lambda step: bool(config.eval_every_steps) and step % config.eval_every_steps == 0,
        max_nonfinite_steps=config.max_nonfinite_steps,
        extra_metrics=lambda step: _epochs(train_loader, step),
        evaluate=evaluate if eval_loader.batches else None,
        save=save,
    )  # fmt: skip
    return run_steps(run, steps, state)
