"""Pre-training from a config to checkpoints and metrics: checks, state, then the steps of each phase.

`bert-jax pretrain --config=bert_tiny --workdir=runs/tiny --config.data.path=DATASET` calls `pretrain` here.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from etils import epath
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.config_keys import PretrainConfig
from bert_jax.data.loading.loader import Prefetch
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model import BertConfig, abstract_parameters, parameter_count
from bert_jax.model.bert import HEADS, heads_of
from bert_jax.parallel.mesh import AnyMesh, make_mesh, put_batch, rows_here
from bert_jax.progress import Bars, silent
from bert_jax.runtime.interpreter import StopSignal
from bert_jax.runtime.processes import check_agreement
from bert_jax.sections import checked, to_dict
from bert_jax.tracking.metrics import SAMPLES, read_metrics
from bert_jax.tracking.throughput import Throughput, key_values, pretraining_work
from bert_jax.tracking.trackers import Tracker
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import Checkpoint, check_place, newest_step, save_parameters
from bert_jax.training.evaluation import Evaluator, MaskedSamples
from bert_jax.training.initialization import fill_in_from_checkpoint, initialize_from, open_init, repeat_positions
from bert_jax.training.loop import Evaluate, LogMetrics, Save, StepRange, Trace, run_steps
from bert_jax.training.objectives import make_objective
from bert_jax.training.optimizer import leave_untrained, make_optimizer
from bert_jax.training.phases import Phase, Plan, count_epochs, count_seen, log_data, open_phases
from bert_jax.training.run import Run, begin_run, claim_workdir
from bert_jax.training.train_step import (
    Metrics,
    StateSpec,
    TrainState,
    TrainStep,
    check_memory,
    describe_state,
    drop_parts,
    make_train_step,
    model_settings,
    shards_state,
)

log = logging.getLogger(__name__)


def pretrain(
    config: PretrainConfig, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent,
    trackers: Sequence[Tracker] = (),
) -> dict[str, float]:  # fmt: skip
    """Runs the pre-training of `config` in `workdir`, and resumes from its newest checkpoint if there is one.

    Returns the last evaluation; empty if the dataset has no eval split or the run was finished before.

    Args:
      config: the run; see `configs/default.py`.
      workdir: folder for checkpoints and metrics.
      stop: a `StopSignal` that is already active; by default one is active during this call.
      bars: shows progress.
      trackers: receivers of the metrics, in process 0; closed at the end.

    Raises:
      InputError: config, dataset and devices do not match, or the workdir holds another run.
      Interrupted: a stop signal was received, such as SIGTERM; the state is saved.
      BertJaxError: too many non-finite steps in a row, and the state is saved; or the workdir is in use.
    """
    checked("config", PretrainConfig, config)
    with begin_run(config, workdir, "pretrain", stop=stop, bars=bars, trackers=trackers) as run:
        return _pretrain(run, config)


def _pretrain(run: Run, config: PretrainConfig) -> dict[str, float]:
    # --- Checks, before any work. The run uses what they build --------------------------------------------------------
    folder, mesh = run.folder, run.mesh
    config = fill_in_from_checkpoint(config, folder)
    log.info("Opening the datasets")
    phases = open_phases(config, mesh)
    run.stalls.beat()
    run.enter_workdir()
    before = claim_workdir(folder, phases)
    start = before.step if before else 0
    scores, is_last = _scores_at(folder, start)
    is_unscored = start == config.total_steps and not scores and phases[-1].eval_loader.batches > 0
    if is_last and (config.target.is_reached(scores) or (start == config.total_steps and not is_unscored)):
        log.info("%s is finished: step %d of %d%s", folder, start, config.total_steps, _target(config, scores))
        return {}
    init = open_init(phases) if config.init and before is None else None
    source = before or init
    check_agreement("checkpoint to start from", source.path.name if source else "none")
    current = next((phase for phase in phases if phase.stop > start), phases[-1])
    planned = spec, train_step = plan_step(mesh, current, current.model)
    check_memory(spec.abstract, mesh.local_devices)

    # --- State: 1. from the newest checkpoint, 2. from another run's parameters, 3. from scratch ----------------------
    milestones = {*(before.milestones if before else ())}  # those of other configs stay
    if before and config.checkpoint.is_milestone(start):
        milestones.add(start)
    checkpointer = Checkpointer(
        folder, {"tokenizer": phases[0].datasets[0].tokenizer.to_json(), "config": to_dict(config)},
        keep=config.checkpoint.keep, is_kept=lambda step: step in milestones or config.checkpoint.is_milestone(step),
    )  # fmt: skip
    run.stack.callback(checkpointer.close)
    start, state, position = checkpointer.first_state(
        before, spec.abstract, partial(initialize_from, init, spec) if init else spec.make
    )  # fmt: skip
    inputs = describe_inputs(phases, init)
    run.open(config, checkpointer, start=start, total=config.total_steps, inputs=inputs)
    trace = Trace(config.profile.steps, run)
    log.info(
        "%s parameters on %d %s devices, mesh %s; steps %d to %d of %d; checkpoints and metrics go to %s",
        f"{parameter_count(phases[0].model):,}", jax.device_count(), jax.devices()[0].device_kind,
        ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()), start + 1, config.total_steps,
        config.total_steps, folder,
    )  # fmt: skip

    # --- Phases, in order ----------------------------------------------------------------------------------------
    evaluation: dict[str, float] = {}
    if is_unscored:  # total_steps was lowered to a step that had been saved
        with jax.set_mesh(mesh):
            evaluation = _make_evaluate(run, phases, phases[-1], spec)(start, state)
    for phase in phases:
        if start < phase.stop and not config.target.is_reached(evaluation or scores):
            spec, train_step = planned if phase is current else plan_step(mesh, phase, phase.model)
            if phase.repeated and start <= phase.start:
                state = replace(state, parameters=repeat_positions(state.parameters, phase.repeated))
            state, evaluation = _train_phase(
                run, phases, phase, spec, train_step, state, max(start, phase.start), position.get("unlogged"),
                milestones, trace,
            )  # fmt: skip
    checkpointer.wait()
    shown = f"eval {key_values(evaluation)}" if evaluation else "nothing is scored"
    step = int(jax.device_get(state.step))
    reached = _target(config, evaluation or scores)
    log.info("Finished step %d%s: %s; checkpoint %s", step, reached, shown, newest_step(folder))
    return evaluation


def _scores_at(folder: epath.Path, step: int) -> tuple[dict[str, Any], bool]:
    """Returns the evaluation of `step` in the metrics of a workdir, and whether no row is later.

    The evaluation is {} if there is none, and at step 0, which ends no run.
    """
    rows = read_metrics(folder)
    scores = [row for row in rows if row["step"] == step > 0 and row.get("split") == "eval"]
    return scores[-1] if scores else {}, all(row["step"] <= step for row in rows)


def _target(config: PretrainConfig, scores: Mapping[str, float]) -> str:
    """Returns how the scores of an evaluation compare with the target, for the log; "" without a target."""
    word = "reached" if config.target.is_reached(scores) else "not reached"
    return f", target.metric={config.target.metric} of {config.target.value} {word}" if config.target.metric else ""


def describe_inputs(phases: Sequence[Phase], init: Checkpoint | None) -> dict[str, Any]:
    """Returns the datasets with their hashes, the vocabulary and the initial checkpoint, for a provenance record."""
    datasets = list(dict.fromkeys(dataset for phase in phases for dataset in phase.datasets))
    return {
        "datasets": [{"path": str(dataset.folder), "hash": dataset.info.hash} for dataset in datasets],
        "vocabulary": {"sha256": datasets[0].tokenizer.sha256},
        **({"init": init.reference()} if init else {}),
    }


# --- The programs ------------------------------------------------------------------------------------------------


def plan_state(
    mesh: AnyMesh, config: PretrainConfig, model: BertConfig, platform: str | None = None
) -> tuple[optax.GradientTransformationExtraArgs, StateSpec]:
    """Makes the optimizer and the plan of the state. Phases differ only in how the model runs.

    `platform` is that of the mesh's devices; it is required for an `AbstractMesh`.
    """
    info = abstract_parameters(model)[2]
    optimizer = make_optimizer(config.optimizer, info)
    if untrained := [part for part in make_objective(config).untrained if part in info]:
        optimizer = leave_untrained(optimizer, untrained)
    platform = platform or mesh.devices.flat[0].platform
    settings = model_settings(config, model.num_hidden_layers, platform, mesh)
    zero1 = shards_state(config.mesh.zero1, platform)
    return optimizer, describe_state(mesh, model, optimizer, config.seed, zero1=zero1, **settings)


def plan_step(mesh: Mesh, plan: Plan, model: BertConfig) -> tuple[StateSpec, TrainStep]:
    """Makes the plan of the state and the jitted training step of a phase."""
    config = plan.config
    optimizer, spec = plan_state(mesh, config, model)
    return spec, make_train_step(
        mesh, spec, optimizer, plan.schedule(), make_objective(config),
        seed=config.seed, gradient_reduce_dtype=jnp.dtype(config.gradient_reduce_dtype),
    )  # fmt: skip


# --- One phase ---------------------------------------------------------------------------------------------------


def _train_phase(
    run: Run, phases: Sequence[Phase], phase: Phase, spec: StateSpec, train_step: TrainStep, state: TrainState,
    start: int, unlogged: dict[str, Any] | None, milestones: set[int], trace: Trace,
) -> tuple[TrainState, dict[str, float]]:  # fmt: skip
    """Trains from step `start` + 1 to the end of the phase, evaluates and saves. Returns state and last evaluation.

    `state` is the state after `start` steps; it is donated. `unlogged` are the sums of metrics of a run that resumes.
    `milestones` are those that were saved, to which it adds. Raises the errors of `pretrain`.
    """
    config, loader = phase.config, phase.train_loader
    run.checkpointer.description["heads"] = trained_heads(phase)
    log_data(phase, start)
    work = pretraining_work(config, phase.model, loader)
    throughput = Throughput(lambda step: work)
    log_metrics = LogMetrics(
        run, throughput, every=config.log_every_steps, last=phase.stop,
        extra=lambda step: {**count_epochs(loader, step), **count_seen(phases, step)},
        unlogged=unlogged if phase.start < start == run.start else None,
    )  # fmt: skip

    def save(step: int, state: TrainState) -> None:
        milestones.update({step} if config.checkpoint.is_milestone(step) else ())
        position = {
            "datasets": phase.dataset_hashes, "unlogged": log_metrics.unlogged(), "milestones": sorted(milestones)
        }  # fmt: skip
        run.save(step, state, phase.model, position)

    evaluate = _make_evaluate(run, phases, phase, spec)
    evaluation = Evaluate(evaluate, every=config.eval_every_steps, is_reached=config.target.is_reached)
    hooks = [
        log_metrics,
        trace,
        *([evaluation] if phase.eval_loader.batches else []),
        Save(save, every=config.checkpoint.every_steps, is_chosen=config.checkpoint.is_milestone),
    ]
    if start == 0 and config.eval_at_start and phase.eval_loader.batches:
        with jax.set_mesh(run.mesh):
            evaluation.after(0, state)
    if start == 0 and run.start == 0 and config.checkpoint.is_milestone(0) and 0 not in milestones:
        save(0, state)
    steps = StepRange(start, phase.stop, config, train_step, loader.batch, config.global_batch_size, throughput)
    return run_steps(run, steps, state, hooks), evaluation.scores


def trained_heads(phase: Phase) -> list[str]:
    """Returns the heads that a checkpoint of a phase has: without the next-sentence head if it is not trained."""
    return [head for head in heads_of(phase.model) if head != "nsp_head" or phase.config.objective.nsp]


def _make_evaluate(
    run: Run, phases: Sequence[Phase], phase: Phase, spec: StateSpec
) -> Callable[[int, TrainState], dict[str, float]]:
    """Makes the evaluation of a phase, which logs and returns its scores, and logs what it measured."""
    loader, target = phase.eval_loader, phase.config.target
    evaluator = Evaluator(run.mesh, spec.graph, spec.shardings.parameters, loader, make_objective(phase.config))
    samples = MaskedSamples(run.mesh, spec, loader, phase.config.tracking.samples) if loader.batches else None
    measured = {
        "data": ",".join(dataset.info.hash for dataset in loader.datasets),
        "sequences": sum(map(loader.real_rows, range(loader.batches))),
    }

    def evaluate(step: int, state: TrainState) -> dict[str, float]:
        with run.progress("evaluate", loader.batches) as on_batch:
            values = evaluator.run(state.parameters, on_batch)
        log.info("Step %d: evaluation: %s", step, key_values(values))
        reached = {"target_reached": int(target.is_reached(values))} if target.metric else {}
        run.trackers.log(step, {**values, **measured, **reached, **count_seen(phases, step)}, split="eval")
        if samples and (fills := samples.fill(state.parameters)):
            run.trackers.log(step, {"samples": fills}, split=SAMPLES)
        return values

    return evaluate


# --- The parts, for another loop -------------------------------------------------------------------------------------


class Training:
    """The parts of a run, for a training loop of one's own: data, mesh, model, optimizer and jitted step.

    The batches, the state and the step are those of `pretrain` with the same config, to the bit::

        training = bert_jax.Training(bert_jax.load_config("bert_tiny", {"data.path": "data"}))
        state = training.initial_state()
        for step, batch in training.batches():
            state, metrics = training.step(state, batch)
        training.save("runs/own", state)

    Attributes:
      config: the run's config, with inferred values filled in.
      mesh: the `jax.sharding.Mesh` of `config.mesh`.
      model: the model's `BertConfig`.
      tokenizer: the tokenizer of the dataset.
    """

    def __init__(self, config: PretrainConfig, devices: Sequence[jax.Device] | None = None):
        """Opens the dataset of `config.data.path`, and plans the state and the step; allocates no parameters.

        `devices` are those of the mesh, by default all.

        Raises InputError if config, dataset and devices do not match, and for a config of several phases.
        """
        checked("config", PretrainConfig, config)
        self.mesh = make_mesh(config.mesh, devices) if devices else make_mesh(config.mesh)
        self._phase, *others = open_phases(fill_in_from_checkpoint(config), self.mesh)
        if others:
            raise InputError(f"phases: expected one phase, got {1 + len(others)}; make a Training for each")
        phase = self._phase
        self.config, self.model, self.tokenizer = phase.config, phase.model, phase.datasets[0].tokenizer
        self._spec, self._step = plan_step(self.mesh, phase, self.model)
        self._init: Checkpoint | None = None

    def initial_state(self) -> TrainState:
        """Makes the state of step 0: from the checkpoint `config.init`, else at random from `config.seed`."""
        if not self.config.init:
            return self._spec.make()
        self._init = open_init([self._phase])
        return initialize_from(self._init, self._spec)

    def batches(self, start: int = 0) -> Iterator[tuple[int, Batch[jax.Array]]]:
        """Yields (step, batch) for the steps `start` + 1 to `config.total_steps`, prefetched by a thread.

        A batch is [A, B / A, ...], A microbatches of B / A rows, sharded over the mesh; see `Batch`.
        """
        config = self.config
        rows = rows_here(self.mesh, config.global_batch_size, config.gradient_accumulation)

        def make(step: int) -> Batch[jax.Array]:
            batch = self._phase.train_loader.batch(step, rows)
            return put_batch(self.mesh, batch, config.gradient_accumulation, batch_size=config.global_batch_size)

        with closing(Prefetch(make, start, config.total_steps)) as batches:
            yield from enumerate(batches, start + 1)

    def step(self, state: TrainState, batch: Batch[jax.Array]) -> tuple[TrainState, Metrics]:
        """Returns the state after one update, and its metrics as scalars on the device. `state` is donated.

        Metrics: `loss`, `mlm_loss`, `mlm_accuracy`, `nsp_loss`, `nsp_accuracy`, `learning_rate`, `grad_norm`,
        `nonfinite_steps`, `nonfinite_streak`; losses in nats.
        """
        with jax.set_mesh(self.mesh):
            return self._step(state, batch)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns the losses on `config.eval_batches` of the eval split, as `pretrain` logs them.

        Raises InputError if the dataset has no eval split.
        """
        if not self._phase.eval_loader.batches:
            raise InputError(
                f"data.path={self.config.data.path}: no eval split, or eval_batches=0; nothing to evaluate"
            )
        with jax.set_mesh(self.mesh):
            return self._evaluator.run(state.parameters)

    @cached_property
    def _evaluator(self) -> Evaluator:
        spec, objective = self._spec, make_objective(self.config)
        return Evaluator(self.mesh, spec.graph, spec.shardings.parameters, self._phase.eval_loader, objective)

    def save(self, folder: str, state: TrainState) -> None:
        """Writes the parameters as a CHECKPOINT, for `bert_jax.load`, `finetune` and `export`; replaces `folder`.

        The optimizer's moments are not saved: such a checkpoint initializes a run, and resumes none. Neither is the
        next-sentence head if `config.objective.nsp` is False, because it is not trained.
        """
        target = remote.absolute(folder)
        check_place(target)
        heads = trained_heads(self._phase)
        save_parameters(
            target, drop_parts({*HEADS} - {*heads}, state.parameters), bert_config=self.model,
            tokenizer=self.tokenizer, heads=heads, inputs=describe_inputs([self._phase], self._init),
        )  # fmt: skip
