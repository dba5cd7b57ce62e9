"""The loop of one phase: batches in, steps, metrics, evaluations and checkpoints out."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bert_jax.config import ConfigDict
from bert_jax.data.loader import EvalLoader, TrainLoader, TrainRows
from bert_jax.data.masking import Masking
from bert_jax.data.prefetch import Prefetch
from bert_jax.errors import BertJaxError, Interrupted
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.objectives import pretraining
from bert_jax.progress import Bars
from bert_jax.training.batches import put_batch, rows_here
from bert_jax.training.checkpoints import Checkpointer
from bert_jax.training.checks import compute_dtype
from bert_jax.training.evaluation import Evaluator
from bert_jax.training.lease import Lease
from bert_jax.training.metrics import MetricsWriter, NoWriter
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.phases import Phase, Plan
from bert_jax.training.profiling import StepTracer
from bert_jax.training.stalls import StallWatch
from bert_jax.training.state import StateSpec, TrainState, describe_state
from bert_jax.training.stopping import StopSignal
from bert_jax.training.throughput import Throughput, summary
from bert_jax.training.train_step import STOP, Metrics, make_eval_step, make_train_step

log = logging.getLogger(__name__)


def make_masking(config: ConfigDict) -> Masking | None:
    """How masks are drawn; None for a left-to-right model. InputError for masks that cannot be."""
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
    """The loaders of both splits. InputError for masks that cannot be and an empty training split."""
    config = phase.config
    masking = make_masking(config)
    sources = [
        TrainRows(
            dataset,
            seed=config.seed,
            masking=masking,
            static_masks=config.objective.static_masks,
            max_sequences=config.data.max_sequences if config.data.packing else 1,
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
    )
    eval_loader = EvalLoader(
        phase.datasets,
        batch_size=config.global_batch_size // config.gradient_accumulation,
        batches=config.eval_batches * config.gradient_accumulation,
        left_to_right=masking is None,
    )
    return train_loader, eval_loader


def _epochs(loader: TrainLoader, step: int) -> dict[str, float]:
    """How often each dataset has been gone through after `step` steps, by its place in `data.path`."""
    seen = loader.epochs(step)
    return {"epoch": seen[0]} if len(seen) == 1 else {f"epoch_{place}": count for place, count in enumerate(seen)}


def plan_state(mesh: Mesh, config: ConfigDict, model: BertConfig) -> tuple[optax.GradientTransformation, StateSpec]:
    """The optimizer, and the plan of the state, which is the same in every phase but for how the model runs."""
    optimizer = make_optimizer(config.optimizer, abstract_parameters(model)[2])
    spec = describe_state(
        mesh, model, optimizer, config.seed, zero1=config.mesh.zero1,
        dtype=compute_dtype(config.dtype, mesh.devices.flat[0].platform), attention=config.attention,
        remat=config.remat,
        scan_layers=config.scan_layers,
    )  # fmt: skip
    return optimizer, spec


def plan_step(
    mesh: Mesh, plan: Plan, model: BertConfig
) -> tuple[StateSpec, Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Metrics]]]:
    """The plan of the state, and the jitted training step."""
    config = plan.config
    optimizer, spec = plan_state(mesh, config, model)
    train_step = make_train_step(
        mesh, spec, optimizer, plan.schedule(), pretraining(nsp=config.objective.nsp), seed=config.seed,
        gradient_reduce_dtype=jnp.dtype(config.gradient_reduce_dtype),
    )  # fmt: skip
    return spec, train_step


@dataclass(frozen=True)
class Run:
    """What the phases of a run share."""

    mesh: Mesh
    checkpointer: Checkpointer
    writer: MetricsWriter | NoWriter
    stop: StopSignal
    stalls: StallWatch
    tracer: StepTracer
    lease: Lease | None  # in the first process
    bars: Bars
    bar: Any  # of the whole run


def train_phase(run: Run, phase: Phase, state: TrainState, start: int) -> tuple[TrainState, dict[str, float]]:
    """Steps `start` + 1 to the end of the phase, which is evaluated and saved. Returns state and last evaluation.

    `state` is that after `start` steps; it is donated. Raises as `pretrain` does.
    """
    config = phase.config

    # --- Data ----------------------------------------------------------------------------------------------------
    train_loader, eval_loader = make_loaders(phase)
    log.info(
        "steps %d-%d: %d rows of %d tokens a step, %.1f%% of them real, %.3g sequences a row",
        start + 1, phase.stop, config.global_batch_size, phase.seq_len, 100 * train_loader.real_share,
        train_loader.sequences_a_row,
    )  # fmt: skip
    for source, epochs in zip(train_loader.sources, train_loader.epochs(phase.stop), strict=True):
        size = f"{source.dataset.size('train'):,}"
        log.info("  %s: %s instances, gone through %.3g times at the end", source.dataset.folder, size, epochs)
    if not eval_loader.batches:
        log.warning("there is no eval split (or eval_batches=0): there will be no evaluation")

    # --- Steps ---------------------------------------------------------------------------------------------------
    spec, train_step = plan_step(run.mesh, phase, phase.model)
    eval_step = make_eval_step(run.mesh, spec.graph, spec.shardings.parameters)
    evaluator = Evaluator(run.mesh, eval_step, eval_loader, phase.token_counts(), nsp=config.objective.nsp)

    # --- Loop ----------------------------------------------------------------------------------------------------
    microbatches = config.gradient_accumulation
    rows = rows_here(run.mesh, config.global_batch_size, microbatches)

    are_several = jax.process_count() > 1

    def make_batch(step: int) -> dict[str, jax.Array]:
        batch = train_loader.batch(step, rows)
        if are_several:
            batch[STOP] = np.full(len(rows), run.stop.received is not None, np.int32)
        return put_batch(run.mesh, batch, microbatches, batch_size=config.global_batch_size)

    batches = Prefetch(make_batch, start, phase.stop)
    run.bar.set_postfix_str("compiling")
    began = time.perf_counter()
    throughput = Throughput(config, phase.model, train_loader)
    evaluation: dict[str, float] = {}
    pending: Any = None  # the metrics of the step before: read while the device works on this one
    stops_together = False  # a process was asked to stop, and all know since the same step

    def settle() -> bool:
        """Reads the metrics of the pending step and logs them. True where too many in a row were not finite."""
        nonlocal pending, stops_together
        if pending is None:
            return False
        (at, device_values), pending = pending, None
        values = jax.device_get(device_values)
        stops_together = bool(values.pop(STOP, 0))
        throughput.finished(at, batches.waited)
        run.stalls.beat(at)
        if at % config.log_every_steps == 0 or at == phase.stop:
            row = {name: value.item() for name, value in values.items()} | throughput.rates(at)
            row |= _epochs(train_loader, at)
            run.writer.write(at, row)
            run.bar.set_postfix_str(summary(row))
        run.bar.update(1)
        return bool(values["nonfinite_streak"] >= config.max_nonfinite_steps)

    def evaluate(at: int) -> dict[str, float]:
        eval_bar = run.bars(total=eval_loader.batches, desc="evaluate", unit="batch", leave=False)

        def on_batch() -> None:
            eval_bar.update(1)
            run.stalls.beat(at)

        values = evaluator.run(state.parameters, on_batch)
        eval_bar.close()
        run.writer.write(at, values, split="eval")
        log.info("step %d: eval %s; unigram baseline %.2f", at, summary(values), values["unigram_loss"])
        throughput.pause()
        return values

    with closing(batches), jax.set_mesh(run.mesh), jax.transfer_guard("disallow"):
        for step, batch in enumerate(batches, start + 1):
            run.checkpointer.check()
            if run.lease:
                run.lease.check()
            is_hopeless = False
            if run.tracer.begins(step):
                is_hopeless = settle()
                throughput.pause()
                run.tracer.start()
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = train_step(state, batch)
            if step == start + 1:
                log.info("step %d: compiled after %.1f s", step, time.perf_counter() - began)
            is_hopeless = settle() or is_hopeless
            pending = step, metrics
            is_last, is_stop = step == phase.stop, stops_together if are_several else run.stop.received is not None
            is_eval = is_last or (config.eval_every_steps and step % config.eval_every_steps == 0)
            is_save = is_last or is_hopeless or is_stop or step % config.checkpoint.every_steps == 0
            is_traced = run.tracer.ends(step)
            if is_eval or is_save or is_traced:  # a step's row is written before it is saved, or a kill could lose it
                is_hopeless = settle() or is_hopeless
            if is_traced:
                run.tracer.close()
                throughput.pause()
            if is_eval and eval_loader.batches:
                evaluation = evaluate(step)
            if is_save:
                hashes = (*phase.read_before, phase.dataset_hash)
                run.checkpointer.save(step, state, bert_config=phase.model, dataset_hashes=hashes)
            if is_hopeless or is_stop:
                run.checkpointer.wait()
            if is_hopeless:
                raise BertJaxError(
                    f"loss, gradient or update were not finite {config.max_nonfinite_steps} times in a row, up to step "
                    f"{step}, which is saved: lower optimizer.learning_rate or raise optimizer.warmup_steps"
                )
            if is_stop:
                why = run.stop.received.name if run.stop.received else "another process was asked to stop"
                raise Interrupted(f"{why}: saved step {step}; the same command goes on from there")
    return state, evaluation
