"""Weights in files of `transformers`: names and shapes at once, values one by one.

They are in `model.safetensors`, or in `pytorch_model.bin`, which torch unpickles without running code; each is a single
file, or shards with an index.
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from bert_jax.errors import InputError
from bert_jax.extras import install_hint

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

_DTYPES = ("F32", "F16", "BF16")
_TORCH_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class StoredWeight(Protocol):
    """A weight in a file, with its name in the file."""

    @property
    def name(self) -> str:
        """The name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in `transformers`."""

    def read(self) -> np.ndarray:
        """Reads the value as fp32. InputError if it is not a float of at most 32 bits, or not finite."""


@dataclass(frozen=True)
class FileWeight:
    """A weight in a file of `transformers`; `dtype` is the name that safetensors uses."""

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    value: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        if self.dtype not in _DTYPES:
            raise InputError(f"{self.file}: {self.name} has dtype {self.dtype}; expected F32, F16 or BF16")
        return finite(self.file, self.name, self.value().astype(np.float32))


def finite(file: epath.Path, name: str, value: np.ndarray) -> np.ndarray:
    """Returns the value of a weight. InputError if it is not finite."""
    if not np.isfinite(value).all():
        raise InputError(f"{file}: {name} has values that are not finite; use another model")
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
    """Returns every weight of a folder by name; safetensors if there are any.

    Raises InputError for a damaged or missing file, an index that does not match its shards, and a pickle without
    torch, or with anything but weights.
    """
    names = {child.name for child in folder.iterdir()}
    if WHOLE in names:
        return _open_safetensors(folder / WHOLE)
    if INDEX in names:
        return _open_shards(folder / INDEX, _open_safetensors)
    return _open_pickle(folder / PICKLE) if PICKLE in names else _open_shards(folder / PICKLE_INDEX, _open_pickle)


def _open_shards(
    index: epath.Path, open_file: Callable[[epath.Path], dict[str, StoredWeight]]
) -> dict[str, StoredWeight]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise InputError(f"{index}: weight_map must map weight names to files")
    weights: dict[str, StoredWeight] = {}
    folder = index.parent
    for file in sorted(set(placed.values())):
        if epath.Path(file).name != file or not (folder / file).is_file():
            raise InputError(f"{index}: shard {file!r} not found in its folder; copy all shards")
        inside = open_file(folder / file)
        listed = {name for name, where in placed.items() if where == file}
        if wrong := sorted(inside.keys() ^ listed):
            where = "missing from" if wrong[0] in inside else "only in"
            raise InputError(
                f"{folder / file}: weight {wrong[0]!r} is {where} {index.name}; use the shards and index of one model"
            )
        weights |= inside
    return weights


def _open_safetensors(path: epath.Path) -> dict[str, StoredWeight]:
    _check_file(path)

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            with safe_open(str(path), "numpy") as opened:
                result: np.ndarray = opened.get_tensor(name)
                return result

        return read

    try:
        with safe_open(str(path), "numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: FileWeight(path, name, tuple(part.get_shape()), part.get_dtype(), reader(name))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise InputError(f"{path}: damaged ({error}); download it again") from error


def _open_pickle(path: epath.Path) -> dict[str, StoredWeight]:
    """Opens a state dict that torch saved. `weights_only` builds tensors and containers alone, and runs no code."""
    _check_file(path)
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path}: reading {path.name} requires torch, which loads its weights without running code; run: "
            f"{install_hint('parity')}"
        ) from error
    try:
        tensors = torch.load(str(path), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a file of weights alone, or damaged ({reason:.80}); not loaded") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise InputError(f"{path}: expected a state dict, weights by name; not loaded")
    return {
        name: FileWeight(
            path, name, tuple(tensor.shape), _TORCH_DTYPES.get(str(tensor.dtype), str(tensor.dtype)),
            partial(_to_numpy, tensor),
        )
        for name, tensor in tensors.items()
    }  # fmt: skip


def _to_numpy(tensor: Any) -> np.ndarray:
    result: np.ndarray = tensor.float().numpy()
    return result


def _check_file(path: epath.Path) -> None:
    if not path.is_file():  # for example a copied link to a cache that was not copied
        raise InputError(
            f"{path}: expected a file, got a {'folder' if path.is_dir() else 'broken link'}; copy the weights there"
        )
