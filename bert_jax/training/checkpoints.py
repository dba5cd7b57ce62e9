"""Checkpoints: each step's folder is one atomic Orbax composite, complete by itself or not there.

WORKDIR/checkpoints/STEP/
  parameters     the model's
  optimizer      moments and counters
  position       batches consumed, one integer, and the hash of the dataset that the last came from
  bert_config    as bert_config.json
  tokenizer      the vocabulary and how it is applied
  config         the run's
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.config import ConfigDict
from bert_jax.data.dataset import DatasetInfo
from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import BertJaxError, InputError
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import Parameters
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
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"{folder} is damaged or of another model ({type(error).__name__}: {reason}): delete that folder to go on "
            "from the step before"
        ) from error


class Checkpointer:
    """Saves and restores the states of one workdir, asynchronously, keeping the newest few."""

    def __init__(self, workdir: epath.Path, *, keep: int, config: ConfigDict, tokenizer: WordPieceTokenizer):
        self._folder = workdir / FOLDER
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
        )
        self._about = {
            "tokenizer": tokenizer.to_json(),
            "config": json.loads(config.to_json_best_effort()),
        }

    def latest_step(self) -> int | None:
        """The newest complete step, None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, *, bert_config: BertConfig, dataset: DatasetInfo) -> None:
        """Starts saving `state`; the arrays are copied off the devices before this returns.

        `dataset` is what the step's batch came from.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(state.parameters),
                optimizer=ocp.args.StandardSave(_optimizer_item(state)),
                position=ocp.args.JsonSave({"next_batch": step, "dataset": dataset.hash}),
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
        """Raises what went wrong in a save that runs in the background."""
        self._manager.check_for_errors()

    def wait(self) -> None:
        """Returns when every save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the folder."""
        self._manager.close()


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself, and where it is; the parameters are loaded on demand."""

    path: epath.Path
    bert_config: BertConfig
    tokenizer: WordPieceTokenizer
    config: dict[str, Any]
    step: int
    dataset_hash: str

    def load_parameters(self, shardings: Parameters | None = None) -> Parameters:
        """All parameters, fp32, laid out as `shardings` says or on the first device."""
        _, shapes, _ = abstract_parameters(self.bert_config)
        if shardings is None:
            first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: first, shapes)
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )
        with _damage_named(self.path), ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self.path / "parameters", target)


def newest_step(workdir: epath.Path) -> epath.Path | None:
    """The folder of a workdir's newest complete step, None where there is none."""
    if not (workdir / FOLDER).exists():
        return None
    steps = [child for child in (workdir / FOLDER).iterdir() if child.name.isdigit()]
    return max(steps, key=lambda child: int(child.name), default=None)


def open_checkpoint(location: str) -> Checkpoint:
    """The checkpoint at a CHECKPOINT: a workdir (its newest complete step) or one step's folder.

    Raises InputError where there is none.
    """
    given = epath.Path(location)
    if not given.exists():
        raise InputError(f"{given} does not exist: a checkpoint is a workdir or one of its checkpoints/STEP")
    path = newest_step(given.resolve()) or given.resolve()
    if not (path / "parameters").exists() or not (path / "bert_config").exists():
        raise InputError(f"{given} holds no complete checkpoint: give a workdir or one of its checkpoints/STEP")
    items = ("bert_config", "tokenizer", "config", "position")
    with _damage_named(path), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        about = checkpointer.restore(path, args=ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in items}))
        return Checkpoint(
            path=path,
            bert_config=BertConfig.from_dict(about.bert_config),
            tokenizer=WordPieceTokenizer.from_json(about.tokenizer),
            config=about.config,
            step=about.position["next_batch"],
            dataset_hash=about.position["dataset"],
        )
