"""Fine-tuning, from a checkpoint and a task to scores and predictions.

    bert-jax finetune --config=finetune/glue:sst2 --workdir=runs/sst2 \\
      --config.init=runs/base --config.data.path=glue/SST-2

The step, its sharding, checkpoints, resuming and metrics are those of pre-training.
"""

import functools
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.finetuning.batch_order import BatchOrder, work_of_steps
from bert_jax.finetuning.best_step import BestStep
from bert_jax.finetuning.forward import Predictor
from bert_jax.finetuning.inputs.batching import Encoding
from bert_jax.finetuning.losses import task_objective
from bert_jax.finetuning.results import (
    PREDICTIONS,
    RESULT_FILE,
    Final,
    describe_best,
    describe_result,
    scoring_warnings,
    write_result,
)
from bert_jax.finetuning.resuming import claim
from bert_jax.finetuning.task import Split, Task
from bert_jax.finetuning.task_checks import check_best, check_config, check_head, check_segments, model_of
from bert_jax.finetuning.task_kinds import read_task
from bert_jax.finetuning.tasks.class_weights import class_weights
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.parallel.host_batches import abstract_batch, rows_here
from bert_jax.parallel.mesh import check_divisibility, make_mesh
from bert_jax.parallel.step_program import TrainStep, quick_compile_options, scans_layers
from bert_jax.progress import Bars, silent
from bert_jax.runtime.compilation_cache import kept_programs
from bert_jax.runtime.preemption import StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.runtime.watchdog import StallWatch
from bert_jax.sections import to_dict
from bert_jax.tracking.flops import finetuning_flops
from bert_jax.tracking.throughput import Throughput
from bert_jax.tracking.trackers import Tracker
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import FOLDER, Checkpoint, open_checkpoint
from bert_jax.training.checks import check_attention, compute_dtype
from bert_jax.training.initialization import initialize_from
from bert_jax.training.loop import Evaluate, LogMetrics, Save, StepRange, Trace, run_steps
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bert_jax.training.run import Run, enter_workdir, log_result, open_run
from bert_jax.training.state import StateSpec, TrainState, describe_state, drop_parts
from bert_jax.training.train_step import make_train_step

log = logging.getLogger(__name__)


def finetune(
    config: FinetuneConfig, workdir: str, *, needs_scores: bool = False, stop: StopSignal | None = None,
    bars: Bars = silent, trackers: Sequence[Tracker] = (),
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Fine-tunes a checkpoint in `workdir`, resuming from the newest checkpoint there, if any.

    At the end it scores the labelled splits and writes `WORKDIR/result.json`. Predictions for every split but the
    training split go to `WORKDIR/predictions`. Both are of the last step, or with `keep_best` of the best epoch's.

    Returns the official metrics of each labelled split, by split name.

    Args:
      config: the run; see `configs/finetune/default.py`.
      workdir: folder of checkpoints, metrics and predictions.
      needs_scores: raise InputError if no split can be scored; set by a search, which compares scores.
      stop: an active `StopSignal`; by default one is active during this call.
      bars: creates progress bars.
      trackers: receivers of the metrics, in process 0; closed at the end.

    Raises:
      InputError: the config, the checkpoint, the task's files and the devices are inconsistent, or the workdir holds
        another run or is in use.
      Interrupted: SIGTERM or SIGINT was received; the state is saved.
      BertJaxError: too many consecutive steps were not finite; the state is saved.
    """
    with ExitStack() as stack:
        return _finetune(
            config, workdir, needs_scores, stop or stack.enter_context(StopSignal()), bars, trackers, stack
        )


def _finetune(
    config: FinetuneConfig, workdir: str, needs_scores: bool, stop: StopSignal, bars: Bars, trackers: Sequence[Tracker],
    stack: ExitStack,
) -> dict[str, dict[str, float]]:  # fmt: skip
    # --- Checks, before any work. The run uses what they build --------------------------------------------------------
    if not workdir:
        raise InputError("--workdir is empty; give a folder")
    folder = remote.absolute(workdir)
    check_config(config)
    stalls = stack.enter_context(closing(StallWatch(config.stall_minutes, ends=config.stall_exit)))
    setup = _set_up(config, folder, needs_scores, stack)
    stalls.beat()
    task, order = setup.task, setup.order

    # --- State: 1. resume from the newest checkpoint, 2. start from a pre-trained encoder, 3. or from scratch --------
    lock = enter_workdir(folder, stack)
    latest = claim(folder, config, order.hash)
    setup = replace(setup, predictor=setup.predictor.with_lengths(order.lengths))
    start = latest.step if latest else 0
    _compile_ahead(setup, start, stack)  # while the checkpoint is read
    best = BestStep(
        keep_best=config.keep_best, **to_dict(config.early_stopping),
        scored=next({"split": split.name, "hash": split.hash()} for split in setup.splits if split.score)
        if config.keep_best else None,
    )  # fmt: skip
    checkpointer = _open_checkpointer(setup, folder, best)
    stack.callback(checkpointer.close)
    start, state, unlogged = _first_state(setup, folder, checkpointer, best, start)
    run = open_run(
        folder, config, setup.mesh, checkpointer, stop, lock, stalls, bars, stack,
        start=start, total=order.total_steps, name="finetune",
        inputs={"init": setup.before.reference(), "task": _describe_task(task, config, order)},
        trackers=trackers,
    )  # fmt: skip

    # --- Loop ----------------------------------------------------------------------------------------------------
    evaluate = _EvaluateSplits(run, setup, best)
    if start < order.total_steps and not best.ends_training():
        state = _train(run, setup, state, best, evaluate, unlogged)
    checkpointer.wait()

    # --- Result --------------------------------------------------------------------------------------------------
    last = int(jax.device_get(state.step))
    step = best.best or last
    chosen = folder / FOLDER / str(step)

    def parameters() -> Parameters:
        if step == last:
            return state.parameters
        log.info("Loading the parameters of the best step, %d", step)
        settings = build_settings(config, setup.mesh, setup.model, setup.head)
        return open_checkpoint(str(chosen)).load_parameters(setup.spec.shardings.parameters, **settings)

    scores = _finish(
        run, folder, setup, functools.cache(parameters), step, evaluate.final,
        describe_best(best, last, order.steps_an_epoch, order.total_steps) if config.keep_best else {},
    )  # fmt: skip
    place = shlex.quote(str(folder))
    log_result(
        chosen, last,
        "  ".join(f"{split}/{name} {value:.4f}" for split, values in scores.items() for name, value in values.items()),
        [
            f"evaluate --checkpoint={place} --data=FILE",
            f"predict --checkpoint={place} --input=FILE --output=predictions.jsonl",
            f"export --checkpoint={place} --output=FOLDER",
            f"report {place} --output=report.html",
        ],
    )  # fmt: skip
    return scores


# --- Set-up ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setup:
    """A run whose inputs are open and checked: checkpoint, task and programs."""

    config: FinetuneConfig
    before: Checkpoint
    model: BertConfig
    mesh: Mesh
    task: Task
    splits: Sequence[Split]
    order: BatchOrder
    head: TaskHead
    spec: StateSpec
    train_step: TrainStep
    predictor: Predictor

    @property
    def batch_size(self) -> int:
        """Rows of the global batch; an example may have several."""
        return self.config.global_batch_size * self.order.encoded.group

    def rows_here(self) -> np.ndarray:
        """Returns the rows of a batch that this process has to make."""
        return rows_here(self.mesh, self.batch_size, self.config.gradient_accumulation)


def _set_up(config: FinetuneConfig, folder: epath.Path, needs_scores: bool, stack: ExitStack) -> _Setup:
    """Opens the checkpoint, reads the task and makes the programs; raises the InputErrors of `finetune`."""
    log.info("Opening the checkpoint %s", config.init)
    before = open_checkpoint(config.init)
    model = model_of(config, before.bert_config)
    mesh = make_mesh(config.mesh)
    stack.enter_context(kept_programs(config.compilation_cache, folder))
    check_divisibility(mesh, model, config.global_batch_size, config.gradient_accumulation)
    check_attention(config, model, config.task.max_seq_len, mesh)

    log.info("Reading and tokenizing the files of the task")
    task = read_task(config, Encoding(before.tokenizer, config.task.max_seq_len, last_position=model.is_decoder))
    rows, splits = task.train(), task.splits()
    check_segments(model, rows)
    weights = class_weights(config.task.class_weights, task.label_names, () if rows.labels is None else rows.labels)
    check_best(config, splits)
    if needs_scores and not any(split.score for split in splits):
        raise InputError("task.dev: a search requires a labelled split to compare runs; set it to a labelled file")
    head = TaskHead(task.kind, task.size, **to_dict(config.head))
    check_head(head, mesh)
    platform = mesh.devices.flat[0].platform
    order = BatchOrder(rows, config, functools.partial(finetuning_flops, model, head), platform)
    for warning in scoring_warnings(splits):
        log.warning(warning)
    log.info(
        "Task %s: %d training examples, %d steps; other splits: %s", task.name, len(rows), order.total_steps,
        ", ".join(f"{split.name} {len(split.examples)}" for split in splits) or "none",
    )  # fmt: skip

    spec, train_step = plan_step(mesh, config, model, head, order.total_steps, weights)
    predictor = Predictor(
        mesh, spec.graph, spec.shardings.parameters, before.tokenizer,
        batch_size=-(-config.eval_batch_size // mesh.size) * mesh.size, max_seq_len=config.task.max_seq_len,
    )  # fmt: skip
    return _Setup(config, before, model, mesh, task, splits, order, head, spec, train_step, predictor)


def _describe_task(task: Task, config: FinetuneConfig, order: BatchOrder) -> dict[str, Any]:
    """Returns the task's name, the given paths and the hash of the training examples, for a provenance record."""
    given = {split: path for split in ("train", "dev", "test") if (path := getattr(config.task, split))}
    return {"name": task.name, "path": config.data.path, "files": given, "hash": order.hash}


def build_settings(config: FinetuneConfig, mesh: Mesh, model: BertConfig, head: TaskHead) -> dict[str, Any]:
    """Returns the settings of the model with its head, for `abstract_parameters`."""
    platform = mesh.devices.flat[0].platform
    return {
        "build": BertForTask, "head": head, "dtype": compute_dtype(config.dtype, platform),
        "attention": config.attention, "remat": config.remat,
        "scan_layers": scans_layers(config.scan_layers, model.num_hidden_layers, platform),
    }  # fmt: skip


def plan_step(
    mesh: Mesh, config: FinetuneConfig, model: BertConfig, head: TaskHead, total_steps: int,
    class_weights: Sequence[float] = (),
) -> tuple[StateSpec, TrainStep]:  # fmt: skip
    """Returns the state's specification and the jitted training step, which compiles once per padded length."""
    recipe = config.optimizer
    schedule = learning_rate_schedule(
        recipe.learning_rate, int(recipe.warmup_proportion * total_steps), total_steps, decay_power=recipe.decay_power
    )
    settings = build_settings(config, mesh, model, head)
    optimizer = make_optimizer(recipe, drop_parts(head.frozen, abstract_parameters(model, **settings)[2]))
    spec = describe_state(
        mesh, model, optimizer, config.seed, zero1=config.mesh.zero1, frozen=head.frozen, **settings
    )  # fmt: skip
    return spec, make_train_step(
        mesh, spec, optimizer, schedule, task_objective(head, class_weights),
        seed=config.seed, gradient_reduce_dtype=jnp.dtype(config.gradient_reduce_dtype),
        compiler_options=quick_compile_options(mesh),
    )  # fmt: skip


# --- State -------------------------------------------------------------------------------------------------------


def _open_checkpointer(setup: _Setup, folder: epath.Path, best: BestStep) -> Checkpointer:
    """Opens the checkpoints of a workdir; each describes the task, so that it can be used without its files."""
    config, has_pooler = setup.config, "pooler" in setup.spec.abstract.parameters
    task = {**setup.head.to_dict(), "max_seq_len": config.task.max_seq_len, **setup.task.record()}
    description = {
        "tokenizer": setup.before.tokenizer.to_json(), "config": to_dict(config), "task": task,
        "heads": ["pooler"] if has_pooler else [],
    }  # fmt: skip
    return Checkpointer(folder, description, keep=config.checkpoint.keep, is_kept=lambda step: step == best.best)


def _compile_ahead(setup: _Setup, start: int, stack: ExitStack) -> None:
    """Starts to compile the step for the padded lengths of the first batches after `start`; `stack` ends it."""
    rows, microbatches = setup.rows_here(), setup.config.gradient_accumulation
    batches = (setup.order.batch(step, rows, setup.before.tokenizer) for step in setup.order.first_steps(start))
    setup.train_step.compile_ahead(
        setup.spec.abstract,
        (abstract_batch(setup.mesh, batch, microbatches, batch_size=setup.batch_size) for batch in batches),
        stack,
    )


def _first_state(
    setup: _Setup, folder: epath.Path, checkpointer: Checkpointer, best: BestStep, newest: int
) -> tuple[int, TrainState, dict[str, Any] | None]:
    """Returns the number of steps done, the state, and sums of metrics: those of `newest`, or initial ones if it is 0.

    If the newest step is damaged they are those of an earlier one. The training then repeats what followed.
    """
    if newest:
        start, state, position = checkpointer.restore(newest, setup.spec.abstract)
        best.restore(position.get("evaluations"))
        log.info("Resuming from step %d", start)
        if best.best is not None and start == newest:
            open_checkpoint(str(folder), best.best)  # InputError if it was deleted
        return start, state, position["unlogged"]
    if setup.config.from_scratch:
        log.info("Initializing the parameters")
        return 0, setup.spec.make(), None
    log.info("Loading the parameters of %s", setup.before.path)
    return 0, initialize_from(setup.before, setup.spec), None


# --- Loop --------------------------------------------------------------------------------------------------------


def _train(
    run: Run, setup: _Setup, state: TrainState, best: BestStep, evaluate: "_EvaluateSplits",
    unlogged: dict[str, Any] | None,
) -> TrainState:  # fmt: skip
    """Trains from step `run.start` + 1 to the end, evaluates and saves; returns the last state. `state` is donated."""
    config, order = setup.config, setup.order
    rows = setup.rows_here()
    throughput = Throughput(work_of_steps(setup.model, setup.head, order))
    steps = StepRange(
        run.start, run.total, setup.train_step,
        make_batch=lambda step: order.batch(step, rows, setup.before.tokenizer),
        batch_size=setup.batch_size,
        microbatches=config.gradient_accumulation,
        throughput=throughput,
        max_nonfinite_steps=config.max_nonfinite_steps,
        warmup_key="optimizer.warmup_proportion",
    )  # fmt: skip
    log_metrics = LogMetrics(
        run, throughput, every=config.log_every_steps, last=run.total,
        extra=lambda step: {"epoch": step / order.steps_an_epoch, **order.count_seen(step)},
        unlogged=unlogged,
    )  # fmt: skip

    def save(step: int, state: TrainState) -> None:
        position = {"datasets": [order.hash], "unlogged": log_metrics.unlogged()}
        if (evaluations := best.to_dict()) is not None:
            position["evaluations"] = evaluations
        run.checkpointer.save(step, state, setup.model, position)

    evaluation = Evaluate(evaluate, every=order.steps_an_epoch, is_enough=best.ends_training)
    hooks = [
        Trace(run.tracer),
        *([evaluation] if evaluate.scored else []),
        log_metrics,
        Save(save, every=config.checkpoint.every_steps, is_chosen=lambda step: step == best.best),
    ]
    return run_steps(run, steps, state, hooks)


class _EvaluateSplits:
    """Evaluates the splits with labels and logs their scores; adds each evaluation to the best step's.

    `final` has the outputs and scores of the step that is the result so far.
    """

    def __init__(self, run: Run, setup: _Setup, best: BestStep):
        self._run, self._setup, self._best = run, setup, best
        self.scored = [split for split in setup.splits if split.score is not None]
        self.final = Final()

    def __call__(self, step: int, state: TrainState) -> dict[str, float]:
        run, setup, best = self._run, self._setup, self._best
        outputs, split_scores = {}, {}
        for split in self.scored:
            assert split.score is not None
            outputs[split.name] = _outputs(run, setup.predictor, state.parameters, split, step)
            split_scores[split.name] = split.score(outputs[split.name])
        best.add(step, split_scores[self.scored[0].name][setup.task.main_metric])
        if step == best.best or (best.best is None and step == run.total):
            self.final = Final(step, outputs, split_scores)
        row = {f"{name}/{metric}": value for name, scores in split_scores.items() for metric, value in scores.items()}
        run.trackers.log(step, {**row, **setup.order.count_seen(step)}, split="eval")
        log.info("Step %d: %s", step, "  ".join(f"{name} {value:.4f}" for name, value in row.items()))
        if best.ends_training():
            log.info(
                "Step %d: ending the training early: %s/%s has not improved in %d epoch%s; the best is that of step %s",
                step, self.scored[0].name, setup.task.main_metric,
                best.without_improvement(), "" if best.without_improvement() == 1 else "s", best.best,
            )  # fmt: skip
        return row


def _outputs(run: Run, predictor: Predictor, parameters: Parameters, split: Split, step: int) -> list[np.ndarray]:
    with run.progress(split.name, predictor.batches(split.examples)) as on_batch:
        return predictor.outputs(parameters, split.examples, on_batch)


# --- Result ------------------------------------------------------------------------------------------------------


def _finish(
    run: Run, folder: epath.Path, setup: _Setup, parameters: Callable[[], Parameters], step: int, final: Final,
    best: Mapping[str, Any],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Scores and predicts every split with the parameters of `step`, and writes scores and predictions.

    `final` spares the splits that were evaluated at `step`. `best` has further keys of `result.json`.
    """
    result: dict[str, dict[str, float]] = {}
    target = folder / PREDICTIONS
    if is_first():
        atomic.make_folder(target)
    for split in setup.splits:
        is_done = final.step == step and split.name in final.outputs
        outputs = final.outputs[split.name] if is_done else _outputs(run, setup.predictor, parameters(), split, step)
        if split.score is not None:
            result[split.name] = final.scores[split.name] if is_done else split.score(outputs)
        if is_first():
            split.write(outputs, target)
    if is_first():
        described = {**describe_result(setup.task, setup.splits, step, result), **best}
        write_result(folder / RESULT_FILE, described)
    return result
