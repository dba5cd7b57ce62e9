"""What a command leaves behind, as digests by name: equal for two runs that did the same."""

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

NOT_COMPARED = ("provenance.json", "lease.json", "*.tfevents.*", "*.heartbeat", "preempted_*")
"""Files with times, names of processes and versions."""
TIMES = (*NOT_REPRODUCIBLE, "seconds", "checksum")
"""Keys of metrics and results that differ between runs; a checksum covers the times."""
_lock = threading.Lock()
logging.getLogger("absl").setLevel(logging.ERROR)


def outcome(output: Path) -> dict[str, str]:
    """Returns a digest per file of a folder, without its times; of a checkpoint one per array."""
    found = {}
    for path in _files(output):
        name = path.relative_to(output).as_posix()
        found[name] = _digest(_without_times(path))
    for step in _steps(output):
        for name, digest in _checkpoint(step).items():
            found[f"{step.relative_to(output).as_posix()}/{name}"] = digest
    return found


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Returns the names that one side lacks, or whose digests differ."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


def unreadable_steps(output: Path) -> list[str]:
    """Returns the errors of complete-looking checkpoints that cannot be restored."""
    errors = []
    for step in _steps(output):
        try:
            _checkpoint(step)
        except Exception as error:
            errors.append(f"{step.name}: {type(error).__name__}: {str(error)[:200]}")
    return errors


def is_writing(output: Path) -> bool:
    """Returns whether a file or checkpoint beside or below `output` is half written right now."""
    beside = output.parent.glob(f"{output.name}.*") if output.parent.is_dir() else ()
    try:
        return any(is_partial(path) for path in [*beside, *output.rglob("*")])
    except FileNotFoundError:  # renamed meanwhile
        return False


def is_partial(path: Path) -> bool:
    """Returns whether the name of a file or folder says that it is being written."""
    return "orbax-checkpoint-tmp" in path.name or path.name.endswith((".partial", ".tmp")) or ".prepare" in path.parts


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if path.is_file() and "checkpoints" not in inside and not any(path.match(name) for name in NOT_COMPARED):
            yield path


def _steps(folder: Path) -> list[Path]:
    """Returns the folders of steps below all workdirs of a folder."""
    return sorted(path for path in folder.rglob("checkpoints/*") if path.name.isdigit() and path.is_dir())


def _without_times(path: Path) -> bytes:
    if path.name not in ("metrics.jsonl", "result.json", "search.json"):
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


def _checkpoint(step: Path) -> dict[str, str]:
    found = {"position": _digest((step / "position" / "metadata").read_bytes())} if (step / "position").exists() else {}
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
