"""Reading `model.safetensors`, whole or in shards: names and shapes at once, values one by one."""

import json
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by it)
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from bert_jax.errors import InputError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file, by its name there."""

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The value in fp32. InputError where it is no float of 32 bits or less, and where it is not finite."""
        if self.dtype not in ("F32", "F16", "BF16"):
            raise InputError(f"{self.file}: {self.name} is of type {self.dtype}: only F32, F16 and BF16 are read")
        with safe_open(str(self.file), "numpy") as opened:
            value = opened.get_tensor(self.name).astype(np.float32)
        if not np.isfinite(value).all():
            raise InputError(f"{self.file}: {self.name} has values that are not finite: the model is of no use")
        return value


def read_json(path: epath.Path) -> dict[str, Any]:
    """The object in a JSON file; InputError where it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: an object is wanted, not a {type(value).__name__}")
    return value


def open_weights(folder: epath.Path) -> dict[str, StoredWeight]:
    """Every weight of the folder's `model.safetensors`, or of the shards that its index lists, by name.

    Raises InputError for a file that is damaged or missing, and for an index that does not fit its shards.
    """
    if any(child.name == WHOLE for child in folder.iterdir()):
        return _open_file(folder / WHOLE)
    index = folder / INDEX
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise InputError(f"{index}: there is no weight_map of names to files")
    weights: dict[str, StoredWeight] = {}
    for file in sorted(set(placed.values())):
        if epath.Path(file).name != file or not (folder / file).is_file():
            raise InputError(f"{index}: there is no {file!r} beside it: copy all shards")
        inside = _open_file(folder / file)
        listed = {name for name, where in placed.items() if where == file}
        if wrong := sorted(inside.keys() ^ listed):
            where = "not in the index" if wrong[0] in inside else "in the index alone"
            raise InputError(f"{folder / file}: {wrong[0]} is {where}: shards and index are of different models")
        weights |= inside
    return weights


def _open_file(path: epath.Path) -> dict[str, StoredWeight]:
    if not path.is_file():  # as where a link to a cache was copied, and the cache was not
        raise InputError(f"{path} is {'a folder' if path.is_dir() else 'a link to nothing'}: copy the weights there")
    try:
        with safe_open(str(path), "numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredWeight(path, name, tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise InputError(f"{path} is damaged ({error}): get it again") from error
