"""Checkpoints: each step's folder is one atomic Orbax composite, complete by itself or not there.

WORKDIR/checkpoints/STEP/
  parameters     the model's
  optimizer      moments and counters
  position       batches consumed, one integer, the hash of what each phase has read, up to the present one, and the
                 row at which that began to read each of its datasets, and the sums of the metrics of steps that no
                 logged row has yet
  bert_config    as bert_config.json
  tokenizer      the vocabulary and how it is applied
  config         the run's

Parameters that no run here has made are a folder like a step's, without optimizer, position and config, and with

  heads          which of `model.bert.HEADS` there are (a step of pre-training has them all)

A fine-tuned model's steps have `heads` as well, and

  task           what its output is of, and what has to be known to predict with it
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from bert_jax import remote
from bert_jax.config import ConfigDict
from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import BertJaxError, InputError
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.training.state import TrainState

FOLDER = "checkpoints"


def _optimizer_item(state: TrainState) -> dict[str, Any]:
    return {
        "state": state.optimizer_state,
        "step": state.step,
        "nonfinite_steps": state.nonfinite_steps,
        "nonfinite_streak": state.nonfinite_streak,
    }


@contextmanager
def _damage_named(folder: epath.Path) -> Iterator[None]:
    """Whatever Orbax says of a checkpoint that it cannot read, in one line that names it."""
    try:
        yield
    except (InputError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        if remote.is_remote(folder) and remote.is_transient(error):
            raise BertJaxError(f"{folder} could not be read ({type(error).__name__}: {error})") from error
        reason = str(error).strip().split("\n")[0]
        mend = "delete that folder to go on from the step before" if folder.name.isdigit() else "make it again"
        raise InputError(
            f"{folder} is damaged or of another model ({type(error).__name__}: {reason}): {mend}"
        ) from error


def check_place(folder: epath.Path) -> None:
    """InputError for a store that Orbax writes no checkpoints to."""
    if remote.is_remote(folder) and not os.fspath(folder).startswith("gs://"):
        raise InputError(f"{folder}: workdirs and checkpoints are on a disk or on gs://, datasets anywhere: choose one")


class Checkpointer:
    """Saves and restores the states of one workdir, asynchronously, keeping the newest few."""

    def __init__(
        self, workdir: epath.Path, *, keep: int, config: ConfigDict, tokenizer: WordPieceTokenizer,
        task: dict[str, Any] | None = None, heads: Collection[str] = HEADS,
    ):  # fmt: skip
        """`task` is of a fine-tuned model, `heads` what it has of those of pre-training; both are JSON."""
        self._folder = workdir / FOLDER
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
        )
        self._is_saving = False
        self._before_save: list[Callable[[], None]] = []
        self.unlogged: dict[str, Any] | None = None
        """Of the step that was restored: metrics that no logged row has yet; see `RunningMeans`."""
        self._about = {
            "tokenizer": tokenizer.to_json(),
            "config": json.loads(config.to_json_best_effort()),
        }
        if task is not None:
            self._about |= {"task": task, "heads": [head for head in HEADS if head in heads]}

    def latest_step(self) -> int | None:
        """The newest complete step, None where there is none."""
        return self._manager.latest_step()

    def before_each_save(self, function: Callable[[], None]) -> None:
        """Calls `function` at the beginning of every save, such as one that writes down what belongs to the step."""
        self._before_save.append(function)

    def save(
        self, step: int, state: TrainState, *, bert_config: BertConfig, dataset_hashes: Sequence[str],
        first_rows: Sequence[int] | None = None, unlogged: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Starts saving `state`; the arrays are copied off the devices before this returns.

        `dataset_hashes` are of what the phases have read that are begun, `first_rows` where the last of them began to
        read each of its datasets; without phases there is none. `unlogged` is what `RunningMeans.to_dict` says.
        """
        for function in self._before_save:
            function()
        self._is_saving = True
        position: dict[str, Any] = {"next_batch": step, "datasets": list(dataset_hashes), "unlogged": unlogged}
        if first_rows is not None:
            position["first_rows"] = list(first_rows)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(state.parameters),
                optimizer=ocp.args.StandardSave(_optimizer_item(state)),
                position=ocp.args.JsonSave(position),
                bert_config=ocp.args.JsonSave(bert_config.to_dict()),
                **{name: ocp.args.JsonSave(value) for name, value in self._about.items()},
            ),
        )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a step, laid out as `abstract` says, whatever mesh saved it."""
        with _damage_named(self._folder / str(step)):
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    parameters=ocp.args.StandardRestore(abstract.parameters),
                    optimizer=ocp.args.StandardRestore(_optimizer_item(abstract)),
                    position=ocp.args.JsonRestore(),
                ),
            )
        optimizer = restored.optimizer
        self.unlogged = restored.position.get("unlogged")
        if restored.position["next_batch"] != int(optimizer["step"]):
            raise BertJaxError(f"{self._folder / str(step)}: data position and optimizer step differ: it is damaged")
        return TrainState(
            step=optimizer["step"],
            parameters=restored.parameters,
            optimizer_state=optimizer["state"],
            nonfinite_steps=optimizer["nonfinite_steps"],
            nonfinite_streak=optimizer["nonfinite_streak"],
        )

    def check(self) -> None:
        """Raises what went wrong in a save, once it has ended in the background."""
        # Orbax has a method for it, but tells there nothing of what its thread of finishing touches has come upon.
        if self._is_saving and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when every save is on disk, or raises what went wrong in one."""
        self._is_saving = False
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the folder."""
        self._manager.close()


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself, and where it is; the parameters are loaded on demand.

    Without a run that made it, `config` and `dataset_hashes` are empty and `step` is 0. `first_rows` are the rows at
    which the phase began to read each of its datasets; None where the version that saved did not say.
    """

    path: epath.Path
    bert_config: BertConfig
    tokenizer: WordPieceTokenizer
    heads: tuple[str, ...]
    config: dict[str, Any]
    step: int
    dataset_hashes: tuple[str, ...]
    first_rows: tuple[int, ...] | None
    task: dict[str, Any] | None = None  # of a fine-tuned model

    @property
    def missing_heads(self) -> tuple[str, ...]:
        """What of `HEADS` is not there."""
        return tuple(head for head in HEADS if head not in self.heads)

    def require_heads(self, *heads: str, by: str) -> None:
        """InputError that names those of `heads` that are missing, and `by`, which needs them."""
        if missing := [head for head in heads if head not in self.heads]:
            raise InputError(f"{self.path} has no {', '.join(missing)}: {by} needs {', '.join(heads)}")

    def load_parameters(
        self, shardings: Parameters | None = None, *, parts: Collection[str] | None = None, **settings: Any
    ) -> Parameters:
        """Parameters, fp32, laid out as `shardings` says or on the first device.

        Args:
          shardings: of what is loaded, at the least.
          parts: which attributes of the model to load; by default all, and then the checkpoint has to have no more,
            but for what a task has on top.
          settings: of the model, for `abstract_parameters`: by default that of pre-training with the heads there are.
        """
        _, shapes, _ = abstract_parameters(self.bert_config, **(settings or {"heads": self.heads}))
        shapes = {part: shape for part, shape in shapes.items() if parts is None or part in parts}
        if shardings is None:
            first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: first, shapes)
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            {part: shardings[part] for part in shapes},
        )
        arguments = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=parts is not None or (self.task is not None and not settings),
        )
        with _damage_named(self.path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(self.path / "parameters", args=arguments)


def save_parameters(
    folder: epath.Path,
    parameters: Parameters,
    *,
    bert_config: BertConfig,
    tokenizer: WordPieceTokenizer,
    heads: Collection[str],
    task: dict[str, Any] | None = None,
) -> None:
    """Writes a checkpoint of parameters alone, which `open_checkpoint` reads: whole or not at all.

    `folder` is replaced: that it may be is for the caller to know. `parameters` lack what is not in `heads`; `task` is
    that of a fine-tuned model.
    """
    of_task = {} if task is None else {"task": ocp.args.JsonSave(task)}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            remote.absolute(folder),
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(parameters),
                bert_config=ocp.args.JsonSave(bert_config.to_dict()),
                tokenizer=ocp.args.JsonSave(tokenizer.to_json()),
                heads=ocp.args.JsonSave([head for head in HEADS if head in heads]),
                **of_task,
            ),
            force=True,
        )


def newest_step(workdir: epath.Path) -> epath.Path | None:
    """The folder of a workdir's newest complete step, None where there is none."""
    folder = workdir / FOLDER
    if not remote.exists(folder):
        return None
    steps = [child for child in remote.patiently(folder, lambda: list(folder.iterdir())) if child.name.isdigit()]
    newest_first = sorted(steps, key=lambda child: int(child.name), reverse=True)
    return next((step for step in newest_first if _is_whole(step)), None)


def _is_whole(folder: epath.Path) -> bool:
    """Whether the save of a checkpoint has ended: a remote one, which cannot be renamed, has a file that says so."""
    return remote.patiently(folder, lambda: ocp.utils.is_checkpoint_finalized(folder))


def _workdirs_in(folder: epath.Path) -> list[str]:
    """The names of those with a complete step: a search has several. Of a remote folder none, which would take long."""
    is_local = not remote.is_remote(folder) and folder.is_dir()
    return sorted(child.name for child in folder.iterdir() if newest_step(child)) if is_local else []


def open_checkpoint(location: str) -> Checkpoint:
    """The checkpoint at a CHECKPOINT: a workdir (its newest complete step), a step's folder, or imported parameters.

    Raises InputError where there is none.
    """
    given = remote.absolute(location)
    check_place(given)
    what = "a workdir, one of its checkpoints/STEP, or what `bert-jax import` wrote"
    if not remote.exists(given):
        raise InputError(f"{location} does not exist: a checkpoint is {what}")
    path = newest_step(given) or given
    if not all(remote.exists(path / item) for item in ("parameters", "bert_config")) or not _is_whole(path):
        runs = "".join(f" ({name} in it does)" for name in _workdirs_in(given)[:1])
        raise InputError(f"{location} holds no complete checkpoint{runs}: give {what}")
    from_run, has_heads, is_of_task = (remote.exists(path / item) for item in ("position", "heads", "task"))
    of_run = ("config", "position") if from_run else ()
    items = ("bert_config", "tokenizer", *of_run, *["heads"] * has_heads, *["task"] * is_of_task)
    with _damage_named(path), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        about = checkpointer.restore(path, args=ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in items}))
        return Checkpoint(
            path=path,
            bert_config=BertConfig.from_dict(about.bert_config),
            tokenizer=WordPieceTokenizer.from_json(about.tokenizer),
            heads=tuple(about.heads) if has_heads else HEADS,
            config=about.config if from_run else {},
            step=about.position["next_batch"] if from_run else 0,
            dataset_hashes=tuple(about.position["datasets"]) if from_run else (),
            first_rows=tuple(about.position["first_rows"]) if from_run and "first_rows" in about.position else None,
            task=about.task if is_of_task else None,
        )
