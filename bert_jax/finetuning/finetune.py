"""Fine-tuning, from a checkpoint and a task to scores and predictions.

    bert-jax finetune --config=finetune/glue:sst2 --workdir=runs/sst2 \\
      --config.init=runs/base --config.data.path=glue/SST-2

The step, its sharding, checkpoints, resuming and metrics are those of pre-training.
"""

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bert_jax.batch import HostBatch, map_arrays
from bert_jax.config import ConfigDict, flatten, load_config
from bert_jax.data.hashing import key_from
from bert_jax.data.preparation.tfds_corpus import is_tfds
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.finetuning.forward import Predictor
from bert_jax.finetuning.inputs.batching import EncodedExamples, Encoding, epoch_of_batches
from bert_jax.finetuning.losses import task_objective
from bert_jax.finetuning.task import Split, Task
from bert_jax.finetuning.task_checks import check_config, check_head, model_of
from bert_jax.finetuning.task_kinds import TASKS
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.parallel.host_batches import rows_here
from bert_jax.parallel.mesh import check_divisibility, make_mesh
from bert_jax.progress import Bars, silent
from bert_jax.runtime.preemption import StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.text.sequences import padded_length
from bert_jax.text.tokenization import WordPieceTokenizer
from bert_jax.tracking.flops import finetuning_flops
from bert_jax.tracking.metrics import finite_json
from bert_jax.tracking.throughput import StepWork, Throughput
from bert_jax.training.checkpointing.checkpoint_folders import newest_step
from bert_jax.training.checkpointing.checkpoints import Checkpoint, Checkpointer, newest_intact, open_checkpoint
from bert_jax.training.checks import check_attention, compute_dtype
from bert_jax.training.loop import Evaluate, Heartbeat, LogMetrics, Save, StepRange, Trace, run_steps
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer, warn_of_uncorrected_lamb
from bert_jax.training.run import Run, log_result, open_run
from bert_jax.training.state import StateSpec, TrainState, describe_state, drop_parts
from bert_jax.training.train_step import TrainStep, make_train_step
from bert_jax.training.warm_start import initialize_from
from bert_jax.training.workdir import enter_workdir

log = logging.getLogger(__name__)

RESULT_FILE = "result.json"
PREDICTIONS = "predictions"

# Keys that may change when a run resumes.
CHANGEABLE = (
    "log_every_steps", "eval_batch_size", "max_nonfinite_steps", "gradient_accumulation", "mesh.", "attention",
    "remat", "gradient_reduce_dtype", "scan_layers", "checkpoint.", "profile.", "stall_", "data.path", "init",
)  # fmt: skip
NEW_KEYS = ("data.sort_window",)
"""Keys that runs of earlier versions lack: such a run resumes without them."""


def finetune(
    config: ConfigDict, workdir: str, *, needs_scores: bool = False, stop: StopSignal | None = None, bars: Bars = silent
) -> dict[str, dict[str, float]]:
    """Fine-tunes a checkpoint in `workdir`, resuming from the newest checkpoint there, if any.

    At the end it scores the labelled splits and writes `WORKDIR/result.json`. Predictions for every split but the
    training split go to `WORKDIR/predictions`.

    Returns the official metrics of each labelled split, by split name.

    Args:
      config: the run; see `configs/finetune/default.py`.
      workdir: folder of checkpoints, metrics and predictions.
      needs_scores: raise InputError if no split can be scored; set by a search, which compares scores.
      stop: an active `StopSignal`; by default one is active during this call.
      bars: creates progress bars.

    Raises:
      InputError: the config, the checkpoint, the task's files and the devices are inconsistent, or the workdir holds
        another run or is in use.
      Interrupted: SIGTERM or SIGINT was received; the state is saved.
      BertJaxError: too many consecutive steps were not finite; the state is saved.
    """
    with ExitStack() as stack:
        return _finetune(config, workdir, needs_scores, stop or stack.enter_context(StopSignal()), bars, stack)


def _finetune(
    config: ConfigDict, workdir: str, needs_scores: bool, stop: StopSignal, bars: Bars, stack: ExitStack
) -> dict[str, dict[str, float]]:
    # --- Checks, before any work ---------------------------------------------------------------------------------
    if not workdir:
        raise InputError("--workdir is empty; give a folder")
    folder = remote.absolute(workdir)
    check_config(config)
    warn_of_uncorrected_lamb([config.optimizer])
    before = open_checkpoint(config.init)
    model = model_of(config, before.bert_config)
    mesh = make_mesh(config.mesh)
    check_divisibility(mesh, model, config.global_batch_size, config.gradient_accumulation)
    check_attention(config, model, config.task.max_seq_len, mesh)

    # --- Data ----------------------------------------------------------------------------------------------------
    encoding = Encoding(before.tokenizer, config.task.max_seq_len, last_position=model.is_decoder)
    task: Task = TASKS[config.task.kind](config, encoding)
    rows, splits = task.train(), task.splits()
    if needs_scores and not any(split.score for split in splits):
        raise InputError("task.dev: a search requires a labelled split to compare runs; set it to a labelled file")
    order = Order(rows, config)
    for warning in scoring_warnings(splits):
        log.warning(warning)
    log.info(
        "Task %s: %d training examples, %d steps; other splits: %s", task.name, len(rows), order.total_steps,
        ", ".join(f"{split.name} {len(split.examples)}" for split in splits) or "none",
    )  # fmt: skip

    # --- Model and step ------------------------------------------------------------------------------------------
    head = TaskHead(task.kind, task.size, **config.head)
    check_head(head, mesh)
    spec, train_step = plan_step(mesh, config, model, head, order.total_steps)
    predictor = Predictor(
        mesh, spec.graph, spec.shardings.parameters, before.tokenizer,
        batch_size=-(-config.eval_batch_size // mesh.size) * mesh.size, max_seq_len=config.task.max_seq_len,
    )  # fmt: skip

    # --- State: 1. resume from the newest checkpoint, 2. start from a pre-trained encoder, 3. or from scratch --------
    watch = enter_workdir(folder, config, stack)
    latest = claim(folder, config, order.hash)
    start = latest.step if latest else 0
    order.config = config = without_new_keys(config, latest.config if latest else None)
    record = {**head.about(), "max_seq_len": config.task.max_seq_len}
    checkpointer = Checkpointer(
        folder, keep=config.checkpoint.keep, config=config, tokenizer=before.tokenizer,
        task={**record, **task.record()}, heads=("pooler",) if "pooler" in spec.abstract.parameters else (),
    )  # fmt: skip
    stack.callback(checkpointer.close)
    if start:
        start, state = checkpointer.restore(start, spec.abstract)
        log.info("Resuming from step %d", start)
    elif config.from_scratch:
        state = spec.make()
    else:
        state = initialize_from(before, spec)
    run = open_run(
        folder, config, mesh, checkpointer, stop, watch, bars, stack,
        start=start, total=order.total_steps, name="finetune",
    )  # fmt: skip

    # --- Loop ----------------------------------------------------------------------------------------------------
    scored = [split for split in splits if split.score is not None]
    final = Final({}, {})

    def evaluate(step: int, state: TrainState) -> dict[str, float]:
        split_scores: dict[str, dict[str, float]] = {}
        for split in scored:
            assert split.score is not None
            outputs = _outputs(run, predictor, state, split, step)
            split_scores[split.name] = split.score(outputs)
            if step == order.total_steps:
                final.outputs[split.name], final.scores[split.name] = outputs, split_scores[split.name]
        row = {f"{name}/{metric}": value for name, scores in split_scores.items() for metric, value in scores.items()}
        run.writer.write(step, row, split="eval")
        log.info("Step %d: %s", step, "  ".join(f"{name} {value:.4f}" for name, value in row.items()))
        return row

    def save(step: int, state: TrainState) -> None:
        checkpointer.save(step, state, bert_config=model, dataset_hashes=(order.hash,), unlogged=log_metrics.unlogged())

    batch_size = config.global_batch_size * rows.group
    rows_of_step = rows_here(mesh, batch_size, config.gradient_accumulation)
    throughput = Throughput(_work(model, head, order))
    steps = StepRange(
        start, order.total_steps, train_step,
        make_batch=lambda step: order.batch(step, rows_of_step, before.tokenizer),
        batch_size=batch_size,
        microbatches=config.gradient_accumulation,
        throughput=throughput,
        max_nonfinite_steps=config.max_nonfinite_steps,
        warmup_key="optimizer.warmup_proportion",
    )  # fmt: skip
    log_metrics = LogMetrics(
        run, throughput, every=config.log_every_steps, start=start, last=order.total_steps,
        extra=lambda step: {"epoch": step / order.steps_an_epoch},
    )  # fmt: skip
    hooks = [
        Heartbeat(run.stalls),
        log_metrics,
        Trace(run.tracer),
        *([Evaluate(evaluate, every=order.steps_an_epoch)] if scored else []),
        Save(save, every=config.checkpoint.every_steps),
    ]
    if start < order.total_steps:
        state = run_steps(run, steps, state, hooks)
    checkpointer.wait()
    scores = _finish(run, folder, task, splits, predictor, state, final)
    place = shlex.quote(str(folder))
    log_result(
        folder, order.total_steps,
        "  ".join(f"{split}/{name} {value:.4f}" for split, values in scores.items() for name, value in values.items()),
        [
            f"evaluate --checkpoint={place} --data=FILE",
            f"predict --checkpoint={place} --input=FILE --output=predictions.jsonl",
            f"export --checkpoint={place} --output=FOLDER",
            f"report {place} --output=curves.png",
        ],
    )  # fmt: skip
    return scores


def plan_step(
    mesh: Mesh, config: ConfigDict, model: BertConfig, head: TaskHead, total_steps: int
) -> tuple[StateSpec, TrainStep]:
    """Returns the state's specification and the jitted training step, which compiles once per padded length."""
    dtype = compute_dtype(config.dtype, mesh.devices.flat[0].platform)
    settings = {
        "build": BertForTask, "head": head, "dtype": dtype, "attention": config.attention, "remat": config.remat,
        "scan_layers": config.scan_layers,
    }  # fmt: skip
    optimizer = make_optimizer(config.optimizer, drop_parts(head.frozen, abstract_parameters(model, **settings)[2]))
    spec = describe_state(
        mesh, model, optimizer, config.seed, zero1=config.mesh.zero1, frozen=head.frozen, **settings
    )  # fmt: skip
    recipe = config.optimizer
    schedule = learning_rate_schedule(
        recipe.learning_rate, int(recipe.warmup_proportion * total_steps), total_steps, decay_power=recipe.decay_power
    )
    train_step = make_train_step(
        mesh, spec, optimizer, schedule, task_objective(head), seed=config.seed,
        gradient_reduce_dtype=jnp.dtype(config.gradient_reduce_dtype),
    )  # fmt: skip
    return spec, train_step


@dataclass
class Order:
    """Maps a step to the examples of its batch: a pure function of (rows, config, step)."""

    rows: EncodedExamples
    config: ConfigDict

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise InputError("task.train: expected at least 1 training example, got 0")
        self._lengths = self.rows.lengths()
        self.steps_an_epoch = -(-len(self.rows) // self.config.global_batch_size)
        self.total_steps = self.config.num_epochs * self.steps_an_epoch
        self._epochs: dict[int, list[np.ndarray]] = {}
        parts = [key_from(*sequence.input_ids, sequence.first_length) for sequence in self.rows.sequences]
        labels = [np.asarray(label).tolist() for label in self.rows.labels] if self.rows.labels is not None else []
        self.hash = f"{key_from(*parts, *labels):016x}"  # equal for equal training data

    def examples(self, step: int) -> np.ndarray:
        """Returns the indices (int64) of the examples of the batch that follows `step` steps."""
        epoch, place = divmod(step, self.steps_an_epoch)
        if epoch not in self._epochs:
            batches = epoch_of_batches(
                self.rows, self.config.global_batch_size, self.config.seed, epoch,
                window=self.config.data.get("sort_window"),
            )  # fmt: skip
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: batches}
        return self._epochs[epoch][place]

    def seq_len(self, step: int) -> int:
        """Returns the padded length, in tokens, of that batch."""
        return padded_length(int(self._lengths[self.examples(step)].max()), self.config.task.max_seq_len)

    def batch(self, step: int, rows: np.ndarray, tokenizer: WordPieceTokenizer) -> HostBatch:
        """Returns the rows `rows` of that batch: the part of one process."""
        batch = self.rows.batch(self.examples(step), self.seq_len(step), self.config.global_batch_size, tokenizer)
        return map_arrays(lambda entry: entry[rows], batch)


def _work(model: BertConfig, head: TaskHead, order: Order) -> Callable[[int], StepWork]:
    def step_work(step: int) -> StepWork:
        examples, seq_len = order.examples(step - 1), order.seq_len(step - 1)
        rows = order.config.global_batch_size * order.rows.group
        flops = rows * finetuning_flops(model, head, seq_len)
        return StepWork(float(len(examples)), float(rows * seq_len), None, flops)

    return step_work


def claim(folder: epath.Path, config: ConfigDict, dataset_hash: str) -> Checkpoint | None:
    """Returns the newest checkpoint of a workdir, None for a new one. InputError if it holds another run."""
    before = newest_intact(folder)
    if before is None:
        return None
    if before.task is None:
        raise InputError(f"--workdir={folder}: holds a pre-training run; choose another folder")
    check_same_run(folder, before.config, config, sources=("init",))
    if before.dataset_hashes != (dataset_hash,):
        raise InputError(
            f"--workdir={folder}: its run was trained on other examples than those of data.path={config.data.path}; "
            "choose another folder"
        )
    return before


def without_new_keys(config: ConfigDict, before: Mapping[str, Any] | None) -> ConfigDict:
    """Returns `config` without the `NEW_KEYS` that the resumed run lacks.

    The run's new checkpoints lack them, too, so that the next start resumes in the same way.
    """
    if before is None or not (lacking := set(NEW_KEYS) - dict(flatten(ConfigDict(before))).keys()):
        return config
    log.info("Resuming a run that started without %s: its batch order does not change", ", ".join(lacking))
    config = config.copy_and_resolve_references()
    with config.unlocked():
        for parent, name in (key.split(".") for key in lacking):
            del config[parent][name]
    return config


def check_same_run(
    folder: epath.Path, before: Mapping[str, Any], config: ConfigDict, *, sources: Sequence[str] = ()
) -> None:
    """Raises InputError if the config differs from that of the run in `folder`, except in `CHANGEABLE` keys.

    `sources` are keys of paths that may change only if the old path no longer exists, because it was moved.
    """
    # A key that the run lacks stands for its default, so that a run of an earlier version resumes. `NEW_KEYS` do not:
    # a run without them differs from a run with their default.
    defaults = dict(flatten(load_config("finetune/default", keys_of="finetune/default")))
    old = {key: value for key, value in defaults.items() if key not in NEW_KEYS} | dict(flatten(ConfigDict(before)))
    new = dict(flatten(config))
    old = {key: list(value) if isinstance(value, tuple) else value for key, value in old.items()}
    new = {key: list(value) if isinstance(value, tuple) else value for key, value in new.items()}  # as JSON has it
    changed = [
        f"{key} {old.get(key)!r} -> {new[key]!r}" for key in new
        if old.get(key) != new[key]
        and (key in old or key not in NEW_KEYS)
        and (_is_elsewhere(old.get(key), new[key]) if key in sources else not key.startswith(CHANGEABLE))
    ]  # fmt: skip
    if changed:
        raise InputError(
            f"--workdir={folder}: holds a run with another config ({'; '.join(changed)}); choose another folder"
        )


def _is_elsewhere(before: str | None, now: str) -> bool:
    """Returns True if the old path still exists and is not the new path."""
    if not before or is_tfds(before):
        return bool(before)
    return remote.exists(remote.parse_path(before)) and remote.absolute(before) != remote.absolute(now)


@dataclass(frozen=True)
class Final:
    """Outputs and scores of the last step's evaluation, by split, reused at the end of the run."""

    outputs: dict[str, list[np.ndarray]]
    scores: dict[str, dict[str, float]]


def scoring_warnings(splits: Sequence[Split]) -> list[str]:
    """Returns warnings for the start of a run: no split can be scored, or some rows cannot."""
    scored = [split for split in splits if split.score is not None]
    if not scored:
        return ["No split has labels, so that nothing is scored; set task.dev to a labelled file"]
    return [
        f"Split {split.name}: {sum(split.left_out.values())} rows are not scored ({_listed(split.left_out)}), "
        f"{split.scorable} are scored"
        for split in scored if split.left_out
    ]  # fmt: skip


def unscored(workdir: str) -> dict[str, Any]:
    """Returns the outcome of a finished run without scores, as JSON: `checkpoint`, `step`, reason in `not_scored`."""
    newest = newest_step(remote.absolute(workdir))
    assert newest is not None
    return {
        "checkpoint": str(newest), "step": int(newest.name), "scores": {},
        "not_scored": "no split has labels; task.dev names a file with labels",
    }  # fmt: skip


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))


def describe_result(
    task: Task, splits: Sequence[Split], step: int, scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Returns the contents of `result.json`.

    Keys: `task`, `main_metric`, `step`, `scores` by split, and `rows`: for each scored split the number `scored` and
    the numbers `left_out` (skipped) by reason. If `f1` is that of one of two labels, also `positive_label`.
    """
    rows = {
        split.name: {"scored": split.scorable, "left_out": dict(split.left_out)}
        for split in splits if split.name in scores
    }  # fmt: skip
    positive = {} if task.positive_label is None else {"positive_label": task.positive_label}
    return {
        "task": task.name, "main_metric": task.main_metric, **positive, "step": step, "scores": dict(scores),
        "rows": rows,
    }  # fmt: skip


def _outputs(run: Run, predictor: Predictor, state: TrainState, split: Split, step: int) -> list[np.ndarray]:
    with run.progress(step, split.name, None) as on_batch:
        return predictor.outputs(state.parameters, split.examples, on_batch)


def _finish(
    run: Run, folder: epath.Path, task: Task, splits: Sequence[Split], predictor: Predictor, state: TrainState,
    final: Final,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Scores and predicts every split with the final state, and writes scores and predictions."""
    result: dict[str, dict[str, float]] = {}
    target, step = folder / PREDICTIONS, int(state.step)
    if is_first():
        atomic.make_folder(target)
    for split in splits:
        is_done = split.name in final.outputs
        outputs = final.outputs[split.name] if is_done else _outputs(run, predictor, state, split, step)
        if split.score is not None:
            result[split.name] = final.scores[split.name] if is_done else split.score(outputs)
        if is_first():
            split.write(outputs, target)
    if is_first():
        described = describe_result(task, splits, step, result)
        atomic.write_whole(folder / RESULT_FILE, (finite_json(described, indent=2) + "\n").encode())
    return result
