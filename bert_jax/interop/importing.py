"""Models of other software: finds the weights of a folder, and opens or imports the model."""

import dataclasses
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.interop import huggingface_reading, tensorflow_checkpoints
from bert_jax.interop.huggingface_reading import CONFIG, ForeignCheckpoint
from bert_jax.interop.tensorflow_checkpoints import belongs_to, prefix_name
from bert_jax.interop.weight_files import TENSORFLOW_INDEX, WHOLE, find_weights
from bert_jax.text.conversion import open_folder
from bert_jax.text.tokenizer import FILE, SETTINGS, Tokenizer, read_tokenizer
from bert_jax.training.checkpoints import (
    FOLDER,
    Checkpoint,
    DamagedError,
    check_place,
    open_checkpoint,
    save_parameters,
)

log = logging.getLogger(__name__)

_SMALL = (".json", ".txt", ".model", "checkpoint")


def import_checkpoint(
    source: str, output: str, *, lowercase: bool | None = None, layers: Sequence[int] | None = None,
    drop: Sequence[str] = (),
) -> Checkpoint:  # fmt: skip
    """Converts a model to a checkpoint of parameters in `output`, written atomically.

    Args:
      source: a folder of `transformers`, or a file of weights in one, see `huggingface_reading.read`; or a folder with
        a TensorFlow checkpoint, or the prefix of one, see `tensorflow_checkpoints.read`.
      output: a new folder; see `training.checkpoints` for its contents.
      lowercase: whether text is lowercased; None takes the source's setting.
      layers: the layers to import, from 0 and in their new order, such as (0, 2, 4); a layer may be repeated. None for
        all.
      drop: beginnings of the names of weights that are not imported, such as `crf.`; all others must be used.

    Raises:
      InputError: `output` already exists, or `source` holds no readable model. No code of a pickle is ever run.
    """
    folder = atomic.new_folder(output)
    check_place(folder)
    log.info("Reading %s", source)
    place = _locate(remote.parse_path(source))
    with _on_this_machine(place) as local:
        found = _read(place, local, lowercase=lowercase, layers=layers, drop=drop)
        parameters = found.read_parameters()
    sizes = [{"path": name, "bytes": size} for name, size in sorted(place.needed().items())]
    log.info("Writing %s", folder)
    save_parameters(
        folder, parameters, bert_config=found.bert_config, tokenizer=found.tokenizer, heads=found.heads,
        task=found.task, inputs={"source": {"path": source, "files": sizes}},
    )  # fmt: skip
    return open_checkpoint(output)


def open_tokenizer(location: str) -> Tokenizer:
    """Opens a tokenizer with all of its rules.

    Args:
      location: a `tokenizer.json`; a folder with one: a dataset, an export, or one of `transformers`; a folder of
        `transformers` with a `vocab.txt` or a SentencePiece model; or a CHECKPOINT.

    Raises InputError for anything else.
    """
    path = remote.parse_path(location)
    if path.suffix == ".json":
        return read_tokenizer(path)
    if path.suffix in (".txt", ".model") and not path.is_dir():
        raise InputError(
            f"{location}: expected a {FILE}; convert it with `bert-jax vocab --from {location} --output {FILE}`"
        )
    is_workdir = remote.exists(path / FOLDER)  # which has a config.json of another kind
    if not is_workdir and any(remote.exists(path / name) for name in (FILE, CONFIG, SETTINGS)):
        with _on_this_machine(_Place(path, path, _list_files(path), [])) as folder:
            return open_folder(folder)
    try:
        return open_checkpoint(location).tokenizer
    except DamagedError:
        raise
    except InputError as error:
        raise InputError(f"{error}; or a {FILE}, or a folder with one") from error


def holds_model(location: str) -> bool:
    """Returns whether a folder has weights of other software, or a path is such a file or a checkpoint's prefix."""
    return bool(_locate(remote.parse_path(location)).weights)


def open_source(location: str) -> ForeignCheckpoint:
    """Opens the model that `import_checkpoint` would import from `location`, and writes nothing.

    The weights of local files are read by each `load_parameters`; those of a store are read here. Raises InputError if
    `location` holds no readable model.
    """
    path = remote.parse_path(location)
    log.info("Reading %s", location)
    place = _locate(path)
    with _on_this_machine(place) as folder:
        found = _read(place, folder)
        if remote.is_remote(path):  # whose local copy is deleted below
            return dataclasses.replace(found, path=path, read_parameters=partial(dict, found.read_parameters()))
    return dataclasses.replace(found, path=path)


@dataclass(frozen=True)
class _Place:
    """The `folder` of a model, the bytes of its files by name, and those that may hold the `weights`, [] if none."""

    given: epath.Path
    folder: epath.Path
    sizes: Mapping[str, int]
    weights: list[str]

    def needed(self) -> dict[str, int]:
        """Returns the files with the weights, and the small ones beside them."""
        names = {*self.weights}
        for first in self.weights:
            if first.endswith(".index.json"):
                stem, _, suffix = first.removesuffix(".index.json").rpartition(".")
                names |= {name for name in self.sizes if name.startswith(stem) and name.endswith(f".{suffix}")}
            elif first.endswith(TENSORFLOW_INDEX):
                names |= {*filter(belongs_to, self.sizes)}
        return {name: size for name, size in self.sizes.items() if name in names or name.endswith(_SMALL)}


def _locate(path: epath.Path) -> _Place:
    """Finds the weights in a folder, or those of a file or of the prefix of a checkpoint in its folder."""
    sizes = _list_files(path)
    if sizes and [*sizes] != [path.name]:  # as an object of a store is listed
        return _Place(path, path, sizes, find_weights(sizes))
    sizes = _list_files(path.parent)  # last: not every folder whose parts may be read may be listed itself
    index = f"{prefix_name(path.name)}{TENSORFLOW_INDEX}"
    return _Place(path, path.parent, sizes, find_weights({index} & {*sizes} or {path.name} & {*sizes}))


def _list_files(folder: epath.Path) -> dict[str, int]:
    """Returns the bytes of what is directly in a folder, by name; {} if it is not a folder."""
    if remote.is_remote(folder):
        return remote.sizes(folder)
    paths = folder.iterdir() if folder.is_dir() else []
    return {path.name: path.stat().length if path.is_file() else 0 for path in paths}


@contextmanager
def _on_this_machine(place: _Place) -> Iterator[epath.Path]:
    """Yields the folder of a place, or a local copy with only the files to read; errors name the given path."""
    folder = place.folder
    if not remote.is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as copy:
        local = epath.Path(copy) / folder.name  # whose name may state the case
        local.mkdir()
        for file, size in place.needed().items():
            atomic.download(folder / file, Path(local / file), size=size)
        try:
            yield local
        except InputError as error:
            raise InputError(str(error).replace(str(local), str(folder))) from error


def _read(place: _Place, folder: epath.Path, **options: Any) -> ForeignCheckpoint:
    """Describes the model of a place in a local folder. InputError if there is none."""
    if not place.weights:
        raise InputError(
            f"{place.given}: no model found on this machine or in a store; expected a folder with {CONFIG} and "
            f"{WHOLE}, a file of weights in it, or a TensorFlow checkpoint with {tensorflow_checkpoints.BERT_CONFIG}"
        )
    if place.weights[0].endswith(TENSORFLOW_INDEX):
        prefix = tensorflow_checkpoints.choose_prefix(folder, place.weights)
        return tensorflow_checkpoints.read(prefix, **options)
    if len(place.weights) > 1:
        raise InputError(f"{folder}: found several files of weights, {', '.join(place.weights)}; give one of them")
    if CONFIG not in place.sizes:
        raise InputError(f"{folder}: {CONFIG} not found; copy it from the source of the weights")
    return huggingface_reading.read(folder / place.weights[0], **options)
