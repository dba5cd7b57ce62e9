"""Reads `model.safetensors`, a single file or shards: names and shapes at once, values one by one."""

import json
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from bert_jax.errors import InputError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file, with its name in the file."""

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """Reads the value as fp32. InputError if it is not a float of at most 32 bits, or not finite."""
        if self.dtype not in ("F32", "F16", "BF16"):
            raise InputError(f"{self.file}: {self.name} has dtype {self.dtype}; expected F32, F16 or BF16")
        with safe_open(str(self.file), "numpy") as opened:
            value = opened.get_tensor(self.name).astype(np.float32)
        if not np.isfinite(value).all():
            raise InputError(f"{self.file}: {self.name} has values that are not finite; use another model")
        return value


def read_json(path: epath.Path) -> dict[str, Any]:
    """Returns the object in a JSON file. InputError if it is unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def open_weights(folder: epath.Path) -> dict[str, StoredWeight]:
    """Returns every weight, by name, of the folder's `model.safetensors`, or of the shards listed in its index.

    Raises InputError for a damaged or missing file, and for an index that does not match its shards.
    """
    if any(child.name == WHOLE for child in folder.iterdir()):
        return _open_file(folder / WHOLE)
    index = folder / INDEX
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise InputError(f"{index}: weight_map must map weight names to files")
    weights: dict[str, StoredWeight] = {}
    for file in sorted(set(placed.values())):
        if epath.Path(file).name != file or not (folder / file).is_file():
            raise InputError(f"{index}: shard {file!r} not found in its folder; copy all shards")
        inside = _open_file(folder / file)
        listed = {name for name, where in placed.items() if where == file}
        if wrong := sorted(inside.keys() ^ listed):
            where = "missing from" if wrong[0] in inside else "only in"
            raise InputError(
                f"{folder / file}: weight {wrong[0]!r} is {where} {INDEX}; use the shards and index of one model"
            )
        weights |= inside
    return weights


def _open_file(path: epath.Path) -> dict[str, StoredWeight]:
    if not path.is_file():  # for example a copied link to a cache that was not copied
        raise InputError(
            f"{path}: expected a file, got a {'folder' if path.is_dir() else 'broken link'}; copy the weights there"
        )
    try:
        with safe_open(str(path), "numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredWeight(path, name, tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise InputError(f"{path}: damaged ({error}); download it again") from error
