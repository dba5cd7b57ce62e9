"""Digests of what a command leaves behind, by name: equal for two runs that did the same."""

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from bert_jax.tracking.throughput import NOT_REPRODUCIBLE

NOT_COMPARED = ("provenance.json", "lock", "*.tfevents.*")
"""Files with times, names of processes and versions."""
ITEMS = ("position", "bert_config", "config", "tokenizer", "heads")
"""JSON of a checkpoint, but for its digests, which depend on the names of folders."""
TIMES = (*NOT_REPRODUCIBLE, "seconds", "checksum")
"""Keys of metrics and results that differ between runs; a checksum covers times and the names of folders."""
_lock = threading.Lock()
logging.getLogger("absl").setLevel(logging.ERROR)


def outcome(output: Path) -> dict[str, str]:
    """Returns a digest per file of a folder, without its times; of a checkpoint one per array."""
    found = {}
    for path in _files(output):
        name = path.relative_to(output).as_posix()
        found[name] = _digest(_without_times(path).replace(str(output).encode(), b"OUTPUT"))
    for step in _steps(output):
        for name, digest in _checkpoint(step, output).items():
            found[f"{step.relative_to(output).as_posix()}/{name}"] = digest
    return found


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Returns the names that one side lacks, or whose digests differ."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


def unreadable_steps(output: Path) -> list[str]:
    """Returns the errors of the newest checkpoints of all workdirs that look complete and cannot be restored.

    An older one may be half deleted.
    """
    newest: dict[Path, Path] = {}
    for step in _steps(output):
        if step.parent not in newest or int(step.name) > int(newest[step.parent].name):
            newest[step.parent] = step
    errors = []
    for step in newest.values():
        try:
            _checkpoint(step, output)
        except Exception as error:
            errors.append(f"{step.name}: {type(error).__name__}: {str(error)[:200]}")
    return errors


def is_writing(output: Path) -> bool:
    """Returns whether a file or checkpoint beside or below `output` is half written right now."""
    beside = output.parent.glob(f"*{output.name}.*") if output.parent.is_dir() else ()
    try:
        return any(is_partial(path) for path in [*beside, *output.rglob("*")])
    except FileNotFoundError:  # renamed meanwhile
        return False


def is_partial(path: Path) -> bool:
    """Returns whether the name of a file or folder says that it is being written."""
    return "orbax-checkpoint-tmp" in path.name or path.name.endswith((".partial", ".tmp")) or ".partial-" in str(path)


def _files(folder: Path) -> Iterator[Path]:
    if _is_step(folder):
        return
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if path.is_file() and "checkpoints" not in inside and not any(path.match(name) for name in NOT_COMPARED):
            yield path


def _is_step(folder: Path) -> bool:
    return (folder / "parameters").is_dir()


def _steps(folder: Path) -> list[Path]:
    """Returns the folders of steps below all workdirs of a folder, or the folder itself if it is one."""
    if _is_step(folder):
        return [folder]
    return sorted(path for path in folder.rglob("checkpoints/*") if path.name.isdigit() and path.is_dir())


def _without_times(path: Path) -> bytes:
    if path.name not in ("metrics.jsonl", "result.json", "search.json", "config.json"):
        return path.read_bytes()
    values = [_drop_times(json.loads(line)) for line in _documents(path)]
    return json.dumps(values, sort_keys=True).encode()


def _documents(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def _drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_times(one) for name, one in value.items() if name not in TIMES}
    return [_drop_times(one) for one in value] if isinstance(value, list) else value


def _checkpoint(step: Path, output: Path) -> dict[str, str]:
    found = {}
    for name in ITEMS:
        if (step / name / "metadata").exists():
            found[name] = _digest((step / name / "metadata").read_bytes().replace(str(output).encode(), b"OUTPUT"))
    with _lock:
        for item in ("parameters", "optimizer"):
            if (step / item).exists():
                for path, array in jax.tree_util.tree_leaves_with_path(_arrays(step / item)):
                    kind = f"{array.dtype}{list(array.shape)}"
                    found[item + jax.tree_util.keystr(path)] = f"{kind} {_digest(array.tobytes())}"
    return found


def _arrays(folder: Path) -> Any:
    """Returns the pytree of numpy arrays that Orbax wrote to a folder, on any number of devices."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder).item_metadata
        whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), getattr(metadata, "tree", metadata))
        return checkpointer.restore(folder, restore_args=whole)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
