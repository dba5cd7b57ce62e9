"""What a command leaves behind, as digests by name: equal for two runs that did the same."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

NOT_COMPARED = ("provenance.json", "lease.json", "*.tfevents.*", "*.heartbeat", "preempted_*")
"""Files with times, names of processes and versions."""
TIMES = ("time", "seconds", "tokens_per_second", "examples_per_second", "mfu", "step_seconds_p90", "step_seconds_p99")
"""Keys of metrics and results that differ between runs."""
_lock = threading.Lock()


def outcome(output: Path) -> dict[str, str]:
    """Returns a digest per file of a file or folder, without its times; of a checkpoint one per array."""
    if output.is_file():
        return {output.name: _digest(output.read_bytes())}
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
        return any(_is_partial(path) for path in [*beside, *output.rglob("*")])
    except FileNotFoundError:  # renamed meanwhile
        return False


def _is_partial(path: Path) -> bool:
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
                with ocp.StandardCheckpointer() as checkpointer:
                    tree = checkpointer.restore(step / item)
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                    array = np.asarray(leaf)
                    kind = f"{array.dtype}{list(array.shape)}"
                    found[item + jax.tree_util.keystr(path)] = f"{kind} {_digest(array.tobytes())}"
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
