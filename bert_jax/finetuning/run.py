"""One run of fine-tuning, from a checkpoint and a task to scores and predictions.

The step, its sharding, checkpoints, resuming and metrics are those of pre-training.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import atomic, provenance, remote
from bert_jax.files.atomic import read_json, write_json
from bert_jax.finetuning.batches import BatchOrder, Predictor, check_segments
from bert_jax.finetuning.fine_tuned import KINDS, RESULT_FILE, describe_result, digests, read_task
from bert_jax.finetuning.losses import task_objective
from bert_jax.finetuning.task import Split, Task
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.model.task_heads import BertForTask, TaskHead, layers_needed
from bert_jax.parallel.mesh import check_divisibility
from bert_jax.progress import Bars, silent
from bert_jax.runtime.interpreter import StopSignal
from bert_jax.runtime.processes import check_agreement, is_first
from bert_jax.sections import from_mapping, to_dict
from bert_jax.tracking.metrics import finite_json
from bert_jax.tracking.throughput import Throughput, finetuning_flops
from bert_jax.tracking.trackers import Tracker
from bert_jax.training.checkpointer import Checkpointer
from bert_jax.training.checkpoints import FOLDER, Checkpoint, newest_intact, open_checkpoint
from bert_jax.training.checks import check_attention, check_environment, check_profile
from bert_jax.training.initialization import initialize_from
from bert_jax.training.loop import Evaluate, LogMetrics, Save, StepRange, Trace, run_steps
from bert_jax.training.optimizer import check_schedule, learning_rate_schedule, make_optimizer
from bert_jax.training.run import Run, begin_run, check_same_config
from bert_jax.training.train_step import (
    StateSpec,
    TrainState,
    TrainStep,
    describe_state,
    drop_parts,
    make_train_step,
    model_settings,
    quick_compile_options,
    shards_state,
)

log = logging.getLogger(__name__)


def finetune_once(
    config: FinetuneConfig, workdir: str, *, needs_scores: bool = False, stop: StopSignal | None = None,
    bars: Bars = silent, trackers: Sequence[Tracker] = (),
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Runs `finetune` for a config without a search. `needs_scores`: InputError without a dev file."""
    with begin_run(config, workdir, "finetune", stop=stop, bars=bars, trackers=trackers) as run:
        return _finetune(run, config, needs_scores)


def _finetune(run: Run, config: FinetuneConfig, needs_scores: bool) -> dict[str, dict[str, float]]:
    # --- Checks, before any work. The run uses what they build --------------------------------------------------------
    check_config(config)
    setup = _set_up(config, run.mesh, needs_scores)
    run.stalls.beat()
    folder, task, order = run.folder, setup.task, setup.order

    # --- State: 1. resume from the newest checkpoint, 2. start from a pre-trained encoder, 3. or from scratch --------
    run.enter_workdir()
    latest = claim(folder, config, setup.before, order.hash)
    check_agreement("checkpoint to start from", (latest or setup.before).path.name)
    description = {  # of the task too, so that a checkpoint can be used without its files
        "tokenizer": setup.before.tokenizer.to_json(), "config": to_dict(config),
        "task": _record(setup, task),
        "heads": ["pooler"] if "pooler" in setup.spec.abstract.parameters else [],
    }  # fmt: skip
    checkpointer = Checkpointer(folder, description, keep=config.checkpoint.keep)
    run.stack.callback(checkpointer.close)
    start, state, position = checkpointer.first_state(
        latest, setup.spec.abstract,
        setup.spec.make if config.from_scratch else functools.partial(initialize_from, setup.before, setup.spec),
    )  # fmt: skip
    files = {split: path for split in ("train", "dev", "test") if (path := getattr(config.task, split))}
    described = {
        "name": task.name, "path": config.data.path, "files": files, "digests": digests(config), "hash": order.hash
    }  # fmt: skip
    run.open(
        config, checkpointer, start=start, total=order.total_steps,
        inputs={"init": setup.before.reference(), "task": described},
    )  # fmt: skip

    # --- Loop ----------------------------------------------------------------------------------------------------
    evaluate = _EvaluateSplits(run, setup)
    if start < order.total_steps:
        state = _train(run, setup, state, evaluate, position.get("unlogged"))
    checkpointer.wait()

    # --- Result --------------------------------------------------------------------------------------------------
    scores = _finish(run, setup, state.parameters, evaluate.final)
    texts = (f"{split}/{name} {value:.4f}" for split, values in scores.items() for name, value in values.items())
    place = folder / FOLDER / str(run.total)
    log.info("Finished step %d: %s; checkpoint %s", run.total, "  ".join(texts) or "nothing is scored", place)
    return scores


# --- Set-up ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setup:
    """A run whose inputs are open and checked: checkpoint, task and programs."""

    config: FinetuneConfig
    before: Checkpoint
    model: BertConfig
    task: Task
    splits: Sequence[Split]
    order: BatchOrder
    head: TaskHead
    spec: StateSpec
    train_step: TrainStep
    predictor: Predictor


def _set_up(config: FinetuneConfig, mesh: Mesh, needs_scores: bool) -> _Setup:
    """Opens the checkpoint, reads the task and makes the programs; raises the InputErrors of `finetune`."""
    log.info("Opening the checkpoint %s", config.init)
    before = open_checkpoint(config.init)
    model = model_of(config, before.bert_config, mesh)

    log.info("Reading and tokenizing the files of the task")
    task, training, splits = read_task(config, before.tokenizer, needs_scores=needs_scores)
    rows = training.encoded
    check_segments(model.type_vocab_size, rows.sequences, "task.train: ")
    if not any(split.is_labelled for split in splits):
        log.warning("No split has labels, so that nothing is scored; set task.dev to a labelled file")
    head = TaskHead(task.kind, task.size, **to_dict(config.head))
    platform = mesh.devices.flat[0].platform
    order = BatchOrder(rows, config, functools.partial(finetuning_flops, model, head), platform, model.is_decoder)
    log.info(
        "Task %s: %d training examples, %d steps; other splits: %s", task.name, len(rows), order.total_steps,
        ", ".join(f"{split.name} {len(split.encoded)}" for split in splits) or "none",
    )  # fmt: skip

    spec, train_step = plan_step(mesh, config, model, head, order.total_steps)
    predictor = Predictor(
        mesh, spec.graph, spec.shardings.parameters, before.tokenizer,
        batch_size=-(-config.eval_batch_size // mesh.size) * mesh.size, max_seq_len=config.task.max_seq_len,
        lengths=order.lengths, segments=model.type_vocab_size, last_position=model.is_decoder,
    )  # fmt: skip
    return _Setup(config, before, model, task, splits, order, head, spec, train_step, predictor)


def _record(setup: _Setup, task: Task) -> dict[str, Any]:
    """Returns the item `task` of checkpoints, with which they are used without the files of the task."""
    return {**setup.head.to_dict(), **task.record()}


def plan_step(
    mesh: Mesh, config: FinetuneConfig, model: BertConfig, head: TaskHead, total_steps: int
) -> tuple[StateSpec, TrainStep]:
    """Returns the state's specification and the jitted training step, which compiles once per padded length."""
    recipe = config.optimizer
    check_schedule(recipe, recipe.warmup_proportion, total_steps)
    check_profile(config, total_steps)
    schedule = learning_rate_schedule(recipe.learning_rate, recipe.warmup_proportion, total_steps, recipe)
    platform = mesh.devices.flat[0].platform
    settings = {"build": BertForTask, "head": head, **model_settings(config, model.num_hidden_layers, platform, mesh)}
    optimizer = make_optimizer(recipe, drop_parts(head.frozen, abstract_parameters(model, **settings)[2]))
    zero1 = shards_state(config.mesh.zero1, platform)
    spec = describe_state(mesh, model, optimizer, config.seed, zero1=zero1, frozen=head.frozen, **settings)
    return spec, make_train_step(
        mesh, spec, optimizer, schedule, task_objective(head),
        seed=config.seed, gradient_reduce_dtype=jnp.dtype(config.gradient_reduce_dtype),
        compiler_options=quick_compile_options(mesh),
    )  # fmt: skip


# --- Loop --------------------------------------------------------------------------------------------------------


def _train(
    run: Run, setup: _Setup, state: TrainState, evaluate: "_EvaluateSplits", unlogged: dict[str, Any] | None
) -> TrainState:
    """Trains from step `run.start` + 1 to the end, evaluates and saves; returns the last state. `state` is donated."""
    config, order = setup.config, setup.order
    throughput = Throughput(order.work)
    make_batch = functools.partial(order.batch, tokenizer=setup.before.tokenizer)
    steps = StepRange(
        run.start, run.total, config, setup.train_step, make_batch, config.global_batch_size * order.encoded.group,
        throughput, warmup_key="optimizer.warmup_proportion",
    )  # fmt: skip
    log_metrics = LogMetrics(
        run, throughput, every=config.log_every_steps, last=run.total,
        extra=lambda step: {"epoch": step / order.steps_an_epoch, **order.count_seen(step)},
        unlogged=unlogged,
    )  # fmt: skip

    def save(step: int, state: TrainState) -> None:
        tuned_at, task = evaluate.tuned
        run.checkpointer.description["task"] = _record(setup, task if step == tuned_at else setup.task)
        run.save(step, state, setup.model, {"datasets": [order.hash], "unlogged": log_metrics.unlogged()})

    hooks = [
        Trace(config.profile.steps, run),
        *([Evaluate(evaluate, every=order.steps_an_epoch)] if evaluate.scored else []),
        log_metrics,
        Save(save, every=config.checkpoint.every_steps),
    ]
    return run_steps(run, steps, state, hooks)


class _EvaluateSplits:
    """Evaluates the splits with labels and logs their scores.

    `final` has the outputs and scores of the last step, by split; empty before it. `tuned` is the last evaluated step,
    and the task with the settings that its scores determine.
    """

    def __init__(self, run: Run, setup: _Setup):
        self._run, self._setup = run, setup
        self.scored = [split for split in setup.splits if split.is_labelled]
        self.final: dict[str, tuple[list[np.ndarray], dict[str, float]]] = {}
        self.tuned = 0, setup.task

    def __call__(self, step: int, state: TrainState) -> dict[str, float]:
        run, setup = self._run, self._setup
        outputs, split_scores = {}, {}
        for split in self.scored:
            outputs[split.name] = _outputs(run, setup.predictor, state.parameters, split)
            split_scores[split.name] = setup.task.score(split, outputs[split.name])
        self.tuned = step, setup.task.tuned(split_scores[self.scored[0].name])
        if step == run.total:
            self.final = {name: (outputs[name], scores) for name, scores in split_scores.items()}
        row = {f"{name}/{metric}": value for name, scores in split_scores.items() for metric, value in scores.items()}
        run.trackers.log(step, {**row, **setup.order.count_seen(step)}, split="eval")
        log.info("Step %d: %s", step, "  ".join(f"{name} {value:.4f}" for name, value in row.items()))
        return row


def _outputs(run: Run, predictor: Predictor, parameters: Parameters, split: Split) -> list[np.ndarray]:
    with run.progress(split.name, predictor.batches(split.encoded)) as on_batch:
        return predictor.outputs(parameters, split.encoded, on_batch)


# --- Result ------------------------------------------------------------------------------------------------------


def _finish(
    run: Run, setup: _Setup, parameters: Parameters, final: Mapping[str, tuple[list[np.ndarray], dict[str, float]]]
) -> dict[str, dict[str, float]]:
    """Scores and predicts every split, and writes scores and predictions.

    `final` spares the splits that were evaluated at the last step, see `_EvaluateSplits`.
    """
    result: dict[str, dict[str, float]] = {}
    target = run.folder / "predictions"
    if is_first():
        atomic.make_folder(target)
    for split in setup.splits:
        outputs, scores = final.get(split.name) or (_outputs(run, setup.predictor, parameters, split), None)
        if split.is_labelled:
            result[split.name] = scores or setup.task.score(split, outputs)
        if is_first():
            setup.task.write(split, outputs, target)
    if is_first():
        described = describe_result(setup.task, setup.splits, run.total, result)
        write_json(run.folder / RESULT_FILE, json.loads(finite_json(described)))
    return result


# --- Checks, before any work -------------------------------------------------------------------------------------


def check_config(config: FinetuneConfig) -> None:
    """Raises InputError, with the key, for a value out of range."""
    check_environment(config)
    if config.task.kind not in KINDS:
        raise InputError(f"task.kind={config.task.kind}: must be one of {', '.join(KINDS)}")
    if config.head.bilstm_layers > 1 and not config.head.bilstm:
        raise InputError(f"head.bilstm_layers={config.head.bilstm_layers}: requires a BiLSTM; set head.bilstm=768")
    head = TaskHead(KINDS[config.task.kind].kind, 1, **to_dict(config.head))
    if head.features == "embeddings" and not head.bilstm and not head.per_token:
        raise InputError(
            "head.features=embeddings: without a BiLSTM the head reads only the embedding of [CLS], which does not "
            "depend on the text; set head.bilstm"
        )
    if not config.init:
        raise InputError("init=: expected the checkpoint to start from, such as init=runs/base")


def model_of(config: FinetuneConfig, encoder: BertConfig, mesh: Mesh) -> BertConfig:
    """Returns the encoder with the config's dropout. InputError if it does not fit the mesh, the task or the head."""
    model = dataclasses.replace(encoder, **to_dict(config.model))
    if config.task.max_seq_len > model.max_position_embeddings:
        raise InputError(
            f"task.max_seq_len={config.task.max_seq_len}: the encoder reads at most {model.max_position_embeddings} "
            "tokens; lower it"
        )
    features = config.head.features
    if features and layers_needed(features) > model.num_hidden_layers:
        raise InputError(
            f"head.features={features}: requires at least {layers_needed(features)} layers, the encoder has "
            f"{model.num_hidden_layers}; use embeddings, last or sum_all"
        )
    if 2 * config.head.bilstm % mesh.shape["fsdp"]:
        raise InputError(
            f"head.bilstm={config.head.bilstm}: 2 * head.bilstm is not divisible by mesh.fsdp={mesh.shape['fsdp']}"
        )
    check_divisibility(mesh, model, config.global_batch_size, config.gradient_accumulation)
    check_attention(config, model, config.task.max_seq_len, mesh)
    return model


# Keys that may change when a run resumes; init and data.path if parameters and examples are the same there.
CHANGEABLE = (
    "log_every_steps", "eval_batch_size", "max_nonfinite_steps", "gradient_accumulation", "mesh.", "attention",
    "remat", "gradient_reduce_dtype", "scan_layers", "checkpoint.", "profile.", "tracking.", "stall_", "data.path",
    "init", "compilation_cache",
)  # fmt: skip


def claim(folder: epath.Path, config: FinetuneConfig, encoder: Checkpoint, dataset_hash: str) -> Checkpoint | None:
    """Returns the newest checkpoint of a workdir, None for a new one. InputError if it holds another run."""
    before = newest_intact(folder)
    if before is None:
        return None
    if before.task is None:
        raise InputError(f"workdir={folder}: holds a pre-training run; choose another folder")
    check_same_run(folder, before.config, config, encoder)
    if before.dataset_hashes != (dataset_hash,):
        raise InputError(
            f"workdir={folder}: its run was trained on other examples than those of data.path={config.data.path}; "
            "choose another folder"
        )
    return before


def check_same_run(
    folder: epath.Path, before: Mapping[str, Any], config: FinetuneConfig, encoder: Checkpoint,
    files: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Raises InputError if the run in a folder had another config, or started from other parameters than `encoder`.

    So it does if one of `files`, the task's `digests`, is not that of the run.
    """
    check_same_config(folder, from_mapping(FinetuneConfig, before), config, CHANGEABLE)
    path = folder / provenance.FILE
    starts = read_json(path)["runs"] if remote.exists(path) else []
    if starts and starts[0]["inputs"]["init"]["digest"] != encoder.reference()["digest"]:
        raise InputError(
            f"workdir={folder}: its run started from other parameters than init={config.init} has now; set init to "
            "one step, WORKDIR/checkpoints/STEP, or choose another folder"
        )
    had = starts[-1]["inputs"]["task"].get("digests", {}) if starts else {}
    if changed := [split for split, found in (files or {}).items() if found != had.get(split, found)]:
        raise InputError(
            f"workdir={folder}: its run had other examples than {', '.join(changed)} of data.path={config.data.path} "
            "has now; choose another folder"
        )
