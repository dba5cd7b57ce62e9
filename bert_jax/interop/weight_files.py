"""Weights in files: names and shapes at once, values one by one.

The files are safetensors, or those of torch, which unpickles them without running code; each is a single file, or
shards with an index. TensorFlow's are read by `tensorflow_checkpoints`.
"""

import json
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from bert_jax.errors import InputError, install_hint

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TENSORFLOW_INDEX = ".index"
"""The end of the name of a TensorFlow checkpoint's index."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SINGLE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # ends of the names of single files

_DTYPES = ("F32", "F16", "BF16", "float32", "float16", "bfloat16")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # keys under which trainers save a state dict


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file.

    Attributes:
      file: the file.
      name: the name in the file.
      shape: the shape in `transformers`.
      dtype: the name of the dtype.
      value: reads the value, of `shape`.
    """

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    value: Callable[[], np.ndarray]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"

    def read(self) -> np.ndarray:
        """Reads the value as fp32. InputError if it has another dtype than F32, F16 and BF16, or is not finite."""
        if self.dtype not in _DTYPES:
            raise InputError(f"{self.file}: {self.name} has dtype {self.dtype}; expected F32, F16 or BF16")
        value = self.value().astype(np.float32)
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


def find_weights(names: Collection[str]) -> list[str]:
    """Returns the files that may hold the weights of a folder with files of these names; [] if there are none.

    It is the one that `transformers` reads, safetensors first. A TensorFlow checkpoint comes before a pickle; without
    any of these they are all files whose names end as those of weights.
    """
    tensorflow = sorted(name for name in names if name.endswith(TENSORFLOW_INDEX))
    groups = ([WHOLE], [INDEX], tensorflow, *([name] for name in _PICKLES))
    usual = next((group for group in groups if {*group} & {*names}), None)
    return usual or sorted(name for name in names if name.endswith(_SINGLE))


def open_weights(path: epath.Path) -> dict[str, StoredWeight]:
    """Returns every weight by name, of a file of safetensors or torch, or of the shards that an index lists.

    Raises InputError for a damaged or missing file, an index that does not match its shards, and a pickle without
    torch, or with anything but weights.
    """
    if path.suffix != ".json":
        return _open_file(path)
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise InputError(f"{path}: weight_map must map weight names to files")
    weights: dict[str, StoredWeight] = {}
    for file in sorted(set(placed.values())):
        shard = path.parent / file
        if shard.name != file or not shard.is_file():
            raise InputError(f"{path}: shard {file!r} not found in its folder; copy all shards")
        inside = _open_file(shard)
        if wrong := sorted(inside.keys() ^ {name for name, where in placed.items() if where == file}):
            where = "missing from" if wrong[0] in inside else "only in"
            raise InputError(
                f"{shard}: weight {wrong[0]!r} is {where} {path.name}; use the shards and index of one model"
            )
        weights |= inside
    return weights


def _open_file(path: epath.Path) -> dict[str, StoredWeight]:
    if not path.is_file():  # for example a copied link to a cache that was not copied
        raise InputError(
            f"{path}: expected a file, got a {'folder' if path.is_dir() else 'broken link'}; copy the weights there"
        )
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)


def _open_safetensors(path: epath.Path) -> dict[str, StoredWeight]:
    def value(name: str) -> np.ndarray:
        with safe_open(str(path), "numpy") as opened:
            result: np.ndarray = opened.get_tensor(name)
            return result

    try:
        with safe_open(str(path), "numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredWeight(path, name, tuple(part.get_shape()), part.get_dtype(), partial(value, name))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise InputError(f"{path}: damaged ({error}); download it again") from error


def _open_pickle(path: epath.Path) -> dict[str, StoredWeight]:
    """Opens a state dict that torch saved. `weights_only` builds tensors and containers alone, and runs no code."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path}: reading {path.name} requires torch, which loads its weights without running code; run: "
            f"{install_hint('parity')}"
        ) from error
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a file of weights alone, or damaged ({reason:.80}); not loaded") from error

    def is_state_dict(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(tensor, torch.Tensor) for tensor in value.values())

    wrapped = [key for key in _WRAPPERS if isinstance(content, dict) and is_state_dict(content.get(key))]
    if not is_state_dict(content) and len(wrapped) != 1:
        raise InputError(
            f"{path}: expected weights by name, or one of {', '.join(_WRAPPERS)} with them"
            f"{', got ' + ' and '.join(wrapped) if wrapped else ''}; not loaded"
        )
    tensors = content if is_state_dict(content) else content[wrapped[0]]

    def value(name: str) -> np.ndarray:
        result: np.ndarray = tensors[name].float().numpy()
        return result

    return {
        name: StoredWeight(
            path, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), partial(value, name)
        )
        for name, tensor in tensors.items()
    }
