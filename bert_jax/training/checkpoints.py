"""Checkpoints: each step's folder is one Orbax composite, committed atomically.

WORKDIR/checkpoints/STEP/
  parameters     parameters of the model
  optimizer      moments and counters
  position       number of consumed batches; the dataset hash of each phase up to the current one; the sums of metrics
                 of steps that are not logged yet; the milestones so far
  bert_config    contents of bert_config.json
  tokenizer      the vocabulary and how it is applied
  config         config of the run
  provenance     the run that saved it, see `files/provenance.py`; never read back
  checksums.json {"format_version": 1, "files": {"parameters/d/1b9f...": [BYTES, CRC32], ...}}, which a load verifies

Imported parameters have a folder like that of a step, without optimizer, position and config, and with

  heads          the present ones of `model.bert.HEADS`

Steps have `heads` as well, without a next-sentence head that is not trained, and those of a fine-tuned model

  task           the output layers and the settings that prediction needs

Process 0 writes the checksums after all processes have written their arrays and before Orbax commits the step. A CRC32
finds every change of up to 32 adjacent bits, and any other with probability 1 - 2**-32.
"""

import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import atomic, provenance, remote
from bert_jax.files.atomic import check_version
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters, heads_of
from bert_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


FOLDER = "checkpoints"
_PARAMETER_ITEMS = ("parameters", "bert_config")  # of a step, and of imported parameters
_JSON_ITEMS = ("bert_config", "tokenizer", "config", "position", "heads", "task")
"""Items that describe a checkpoint, as far as it has them."""


def may_hold_checkpoints(folder: epath.Path) -> bool:
    """Returns whether Orbax supports the store of a folder."""
    return not remote.is_remote(folder) or os.fspath(folder).startswith("gs://")


def check_place(folder: epath.Path) -> None:
    """Raises InputError for a store that Orbax does not support."""
    if not may_hold_checkpoints(folder):
        raise InputError(
            f"{folder}: workdirs and checkpoints must be on a disk or on gs://; datasets may be in any store"
        )


@dataclass(frozen=True)
class Checkpoint:
    """Description and path of a checkpoint; parameters are loaded on demand.

    For imported parameters, `config` and `dataset_hashes` are empty and `step` is 0.
    """

    path: epath.Path
    bert_config: BertConfig
    tokenizer: Tokenizer
    heads: tuple[str, ...]
    config: dict[str, Any]
    step: int
    dataset_hashes: tuple[str, ...]
    milestones: tuple[int, ...] = ()
    task: dict[str, Any] | None = None  # of a fine-tuned model

    def reference(self) -> dict[str, Any]:
        """Returns `path`, `step` and `digest`, which copies of the checkpoint share, for a provenance record."""
        return {"path": str(self.path), "step": self.step, "digest": fingerprint(self.path)}

    def load_parameters(
        self, shardings: Parameters | None = None, *, parts: Collection[str] | None = None, **settings: Any
    ) -> Parameters:
        """Loads fp32 parameters with `shardings`, by default on the first device.

        Raises DamagedError, an InputError, with the names of files that changed since the save.

        Args:
          shardings: a tree with at least the loaded parts.
          parts: attributes of the model to load; by default all, and then imported parameters may have no others except
            those of a task.
          settings: model settings for `abstract_parameters`; by default pre-training with the present heads.
        """
        _, shapes, _ = abstract_parameters(self.bert_config, **(settings or {"heads": self.heads}))
        shapes = {part: shape for part, shape in shapes.items() if parts is None or part in parts}
        if shardings is None:
            first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: first, shapes)
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes, {part: shardings[part] for part in shapes},
        )  # fmt: skip
        return self._restore(target, is_partial=bool(parts or self.config or (self.task and not settings)))

    def _restore(self, target: Parameters, *, is_partial: bool) -> Parameters:
        """Verifies and reads the parameters in `target`, a tree of jax.ShapeDtypeStruct with shardings.

        `is_partial` allows others in the checkpoint. A checkpoint of another format overrides this.
        """
        verify(self.path, ["parameters"])
        return read_arrays(self.path / "parameters", target, is_partial=is_partial)


def read_arrays(item: epath.Path, target: Any, *, is_partial: bool = False) -> Any:
    """Reads the arrays of an item of a checkpoint, in `target`, a tree of jax.ShapeDtypeStruct with shardings.

    `is_partial` allows others in the item. Calls the handler without a `Checkpointer`, whose barrier would block the
    other processes if one of them fails to read.
    """
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    arguments = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=is_partial)
    with convert_read_errors(item.parent), closing(ocp.PyTreeCheckpointHandler()) as handler:
        return handler.restore(item, args=arguments)


def other_vocabulary_error(checkpoint: Checkpoint, dataset: PreparedDataset) -> InputError:
    """Returns the error for a dataset whose vocabulary is not that of a checkpoint."""
    return InputError(
        f"{dataset.folder} was prepared with another vocabulary than {checkpoint.path} was trained with; prepare the "
        f"corpus with --vocab {checkpoint.path}"
    )


def check_finite(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Raises InputError with the names of non-finite parameters. They must not be sharded over processes."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves if not np.isfinite(jax.device_get(leaf)).all()
    ]  # fmt: skip
    if names:
        raise InputError(f"{checkpoint.path} has NaN or infinity in {', '.join(names[:3])}; use an earlier step")


def save_parameters(
    folder: epath.Path,
    parameters: Parameters,
    *,
    bert_config: BertConfig,
    tokenizer: Tokenizer,
    heads: Collection[str],
    task: dict[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint of parameters alone, atomically; `open_checkpoint` reads it.

    Replaces `folder` without asking. `parameters` have only the heads in `heads`; `task` is that of a fine-tuned model.
    `inputs` are those of its provenance record.
    """
    items = {
        "bert_config": bert_config.to_dict(),
        "tokenizer": tokenizer.to_json(),
        "heads": [head for head in HEADS if head in heads],
        **({} if task is None else {"task": task}),
    }
    items["provenance"] = provenance.record(inputs or {})
    path = remote.absolute(folder)
    options = ocp.AsyncOptions(
        create_directories_asynchronously=False,  # else threads wait ten minutes for a folder that cannot be made
        post_finalization_callback=lambda: write_checksums(path),
    )
    with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options) as checkpointer:
        checkpointer.save(
            path,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(parameters),
                **{name: ocp.args.JsonSave(value) for name, value in items.items()},
            ),
            force=True,
        )
        checkpointer.wait_until_finished()


def newest_intact(workdir: epath.Path) -> Checkpoint | None:
    """Opens the newest complete step, None in a new workdir. Logs and skips damaged ones; does not read arrays.

    Raises InputError if there are steps, but none is intact, and for a store that Orbax does not support.
    """
    check_place(workdir)
    for folder in complete_steps(workdir):
        try:
            return read_checkpoint(folder)
        except DamagedError as error:
            log.warning("%s", error)
    if newest := newest_step(workdir):
        raise InputError(f"workdir={workdir}: {newest} and the steps before it are damaged; delete them to start anew")
    return None


def is_checkpoint(given: epath.Path) -> bool:
    """Returns whether a path is a workdir with a complete step, the folder of a step, or imported parameters.

    Raises InputError for a store that Orbax does not support.
    """
    check_place(given)
    return all(remote.exists(given / item) for item in _PARAMETER_ITEMS) or newest_step(given) is not None


def open_checkpoint(location: str) -> Checkpoint:
    """Opens a CHECKPOINT: a workdir, the folder of a step, or imported parameters.

    Of a workdir it opens the newest complete step. Raises InputError if there is none, and for one of a newer version.
    """
    given = remote.absolute(location)
    check_place(given)
    step = newest_step(given)
    if step is None and not (is_saved(given) and all(remote.exists(given / item) for item in _PARAMETER_ITEMS)):
        problem = "holds no complete checkpoint" if remote.exists(given) else "does not exist"
        raise InputError(
            f"{location} {problem}; expected a workdir, one of its checkpoints/STEP, or the output of `bert-jax "
            f"import`, which reads folders of transformers"
        )
    return read_checkpoint(step or given)


def read_checkpoint(folder: epath.Path) -> Checkpoint:
    """Opens the folder of a step, or of imported parameters. Raises DamagedError if it is not complete."""
    with convert_read_errors(folder):
        saved = {name.partition("/")[0] for name in _read(folder)}
        items = read_items(folder, [name for name in _JSON_ITEMS if name in saved])
        position, config = items.get("position", {}), BertConfig.from_dict(items["bert_config"])
        return Checkpoint(
            path=folder,
            bert_config=config,
            tokenizer=Tokenizer.from_json(items["tokenizer"]),
            heads=tuple(items.get("heads", heads_of(config))),
            config=items.get("config", {}),
            step=position.get("next_batch", 0),
            dataset_hashes=tuple(position.get("datasets", ())),
            milestones=tuple(position.get("milestones", ())),
            task=items.get("task"),
        )


def read_items(folder: epath.Path, names: Sequence[str]) -> dict[str, Any]:
    """Verifies and reads items of JSON in the folder of a checkpoint."""
    verify(folder, names)
    with convert_read_errors(folder):  # `ocp.Checkpointer` would wait for all processes
        return {name: json.loads(atomic.read_whole(folder / name / "metadata")) for name in names}


def step_folders(workdir: epath.Path) -> list[epath.Path]:
    """Returns the folders with the name of a step, newest first, whatever they contain."""
    folder = workdir / FOLDER
    steps = [child for child in remote.children(folder) if re.fullmatch("0|[1-9][0-9]*", child.name)]
    return sorted(steps, key=lambda child: int(child.name), reverse=True)


def complete_steps(workdir: epath.Path) -> Iterator[epath.Path]:
    """Yields the folders of complete steps, newest first; a save that was killed is not one."""
    return filter(is_saved, step_folders(workdir))


def newest_step(workdir: epath.Path) -> epath.Path | None:
    """Returns the folder of a workdir's newest complete step, or None."""
    return next(complete_steps(workdir), None)


def is_saved(folder: epath.Path) -> bool:
    """Returns whether a checkpoint is committed: by a rename on a disk, by a marker file in a store."""
    with remote.store_errors(folder):
        return ocp.utils.is_checkpoint_finalized(folder)


def set_aside(step: epath.Path) -> epath.Path:
    """Renames the folder of a step to STEP.damaged, which is not the name of a step, and returns the new path.

    A store copies and then deletes its files. A kill between the two leaves both, and the next run repeats it.
    """
    taken = {child.name for child in remote.children(step.parent)}
    names = (f"{step.name}.damaged{number}" for number in ["", *(f"-{count}" for count in range(2, len(taken) + 3))])
    with remote.store_errors(step):
        return step.rename(step.parent / next(name for name in names if name not in taken))


FILE = "checksums.json"
FORMAT_VERSION = 1
"""Version of all items of a checkpoint."""

_OF_ORBAX = ("_CHECKPOINT_METADATA", "commit_success.txt")  # written at the commit, and not read
_CHUNK = 16 << 20
_THREADS = 8
_TRANSIENT = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")  # in TensorStore's untyped errors


class DamagedError(InputError):
    """An existing checkpoint that cannot be read, or differs from what was saved."""


def write_checksums(path: epath.Path) -> None:
    """Writes the checksums of all files of a checkpoint that Orbax has written and is about to commit as `path`.

    On a disk its folder has another name until then.
    """
    folder = next(
        (one for one in remote.children(path.parent) if one.name.startswith(f"{path.name}.orbax-checkpoint-tmp")), path
    )
    content = {"format_version": FORMAT_VERSION, "files": _checksums(folder, sorted(_names(folder)))}
    (folder / FILE).write_text(json.dumps(content) + "\n")


def verify(folder: epath.Path, items: Collection[str], *, share: tuple[int, int] = (0, 1)) -> None:
    """Raises DamagedError if files of some items of a checkpoint have changed since the save, are missing or new.

    With a `share` of (i, n) it reads every n-th file alone, from the i-th: that of one of n processes.
    """
    with convert_read_errors(folder):
        saved = {name: entry for name, entry in _read(folder).items() if name.partition("/")[0] in items}
        names = {f"{item}/{name}" for item in items for name in _names(folder / item)}
        found = _checksums(folder, sorted(names & saved.keys())[share[0] :: share[1]])
    changed = sorted(names ^ saved.keys()) + [name for name, entry in found.items() if entry != saved[name]]
    if changed:
        listed = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise DamagedError(
            f"{folder} is damaged ({listed} changed since the save); use an earlier step, or recreate it"
        )


def fingerprint(folder: epath.Path) -> str:
    """Returns a SHA-256 that is the same for copies of a checkpoint, and for no other."""
    with convert_read_errors(folder):
        return hashlib.sha256(json.dumps(_read(folder), sort_keys=True).encode()).hexdigest()


def _read(folder: epath.Path) -> dict[str, list[int]]:
    """Returns size and checksum of each file."""
    content = json.loads(atomic.read_whole(folder / FILE))
    check_version(folder / FILE, content, FORMAT_VERSION)
    return dict(content["files"])


def _names(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    """Yields the paths of all files below a folder, relative to it."""
    for child in remote.children(folder):
        if child.name not in (*_OF_ORBAX, FILE):
            yield from _names(child, f"{prefix}{child.name}/") if child.is_dir() else [prefix + child.name]


def _checksums(folder: epath.Path, names: Collection[str]) -> dict[str, list[int]]:
    """Returns the bytes of each file and their CRC32."""

    def compute(name: str) -> list[int]:
        size = crc = 0
        with remote.store_errors(folder / name), (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return [size, crc]

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(compute, names), strict=True))


@contextmanager
def convert_read_errors(folder: epath.Path) -> Iterator[None]:
    """Re-raises errors on reading a checkpoint as one-line errors that name the folder.

    Missing permissions raise InputError, transient errors BertJaxError, all others DamagedError.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):  # JaxRuntimeError: out of device memory
        raise
    except Exception as error:  # TensorStore raises untyped errors
        if isinstance(error, BertJaxError) and not isinstance(error.__cause__, FileNotFoundError):
            raise
        reason = f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        if isinstance(error, PermissionError) or "PERMISSION_DENIED" in reason:
            raise InputError(f"{folder} may not be read {reason}; check your permissions") from error
        if isinstance(error, (ConnectionError, TimeoutError)) or _TRANSIENT.search(reason):
            raise BertJaxError(f"{folder} could not be read {reason}; rerun the command") from error
        raise DamagedError(
            f"{folder} is damaged or of another model {reason}; use an earlier step, or recreate it"
        ) from error
