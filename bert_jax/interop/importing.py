"""Models of other software: detects the format of a folder, and opens or imports the model in it."""

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.atomic import new_folder
from bert_jax.interop import huggingface_reading, tensorflow_checkpoints
from bert_jax.interop.huggingface_reading import CONFIG, Source
from bert_jax.interop.weight_files import INDEX, PICKLE, PICKLE_INDEX, WHOLE
from bert_jax.model.bert import Parameters
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
_TENSORFLOW_INDEX = tensorflow_checkpoints.INDEX
_OTHER_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def import_checkpoint(source: str, output: str, *, lowercase: bool | None = None) -> Checkpoint:
    """Converts a model to a checkpoint of parameters in `output`, written atomically.

    Args:
      source: a folder of `transformers`, see `huggingface_reading.read`; or a folder with a TensorFlow checkpoint, or
        the prefix of one, see `tensorflow_checkpoints.read`.
      output: a new folder; see `training.checkpoints` for its contents.
      lowercase: whether text is lowercased; None takes the source's setting.

    Raises:
      InputError: `output` already exists, or `source` holds no readable model. No code of a pickle is ever run.
    """
    folder = new_folder(output)
    check_place(folder)
    with _on_this_machine(source) as here:
        log.info("Reading %s", source)
        found = _read(here, lowercase, option="--source=")
        parameters = found.read_parameters()
        sizes = [{"path": path.name, "bytes": path.stat().length} for path in _files_read(here)]
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
        with _on_this_machine(location) as here:
            return open_folder(here)
    try:
        return open_checkpoint(location).tokenizer
    except DamagedError:
        raise
    except InputError as error:
        raise InputError(f"{error}; or a {FILE}, or a folder with one") from error


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint(Checkpoint):
    """A model in files of other software, used without an import; it has no checksums that a load could verify."""

    read_parameters: Callable[[], Parameters]

    def reference(self) -> dict[str, Any]:
        """Returns `path` and `step`; there is no `digest`."""
        return {"path": str(self.path), "step": self.step, "digest": None}

    def _restore(self, target: Parameters, *, is_partial: bool) -> Parameters:
        read = self.read_parameters()
        parts = {part: read[part] for part in target}
        result: Parameters = jax.tree.map(
            lambda leaf, value: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: value[at]),
            target,
            parts,
        )
        return result


def holds_model(location: str) -> bool:
    """Returns whether a folder has weights of `transformers` or TensorFlow, or a prefix is that of a checkpoint."""
    given = remote.parse_path(location)
    names = _names_in(given)
    if names & {WHOLE, INDEX, PICKLE, PICKLE_INDEX} or any(name.endswith(_TENSORFLOW_INDEX) for name in names):
        return True
    # Listed last: not every folder whose parts may be read may be listed itself.
    return f"{tensorflow_checkpoints.prefix_name(given.name)}{_TENSORFLOW_INDEX}" in _names_in(given.parent)


def _names_in(folder: epath.Path) -> set[str]:
    if remote.is_remote(folder):
        return {*remote.sizes(folder)}
    return {child.name for child in folder.iterdir()} if folder.is_dir() else set()


def open_source(location: str) -> Checkpoint:
    """Opens the model that `import_checkpoint` would import from `location`, and writes nothing.

    The weights of local files are read by each `load_parameters`; those of a store are read here. Raises InputError if
    `location` holds no readable model.
    """
    path = remote.parse_path(location)
    with _on_this_machine(location) as here:
        log.info("Reading %s", location)
        found = _read(here, None)
        read_parameters = found.read_parameters
        if remote.is_remote(path):  # whose local copy is deleted below
            read_parameters = partial(dict, read_parameters())
    return ForeignCheckpoint(
        path=path, bert_config=found.bert_config, tokenizer=found.tokenizer, heads=found.heads, config={}, step=0,
        dataset_hashes=(), task=found.task, read_parameters=read_parameters,
    )  # fmt: skip


@contextmanager
def _on_this_machine(source: str) -> Iterator[epath.Path]:
    """Yields the source, or its place in a local copy with only the files to read; errors name the given path."""
    given = remote.parse_path(source)
    if not remote.is_remote(given):
        yield given
        return
    folder, name, sizes = given, "", remote.sizes(given)
    if not sizes or [*sizes] == [given.name]:  # the prefix of a checkpoint, or one of its files
        folder, name, sizes = given.parent, given.name, remote.sizes(given.parent)
    if not sizes:
        raise InputError(f"{given}: no file of a model found; give the folder of a model")
    weights = _weight_files(sizes)
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as copy:
        local = Path(copy) / folder.name  # whose name may state the case
        local.mkdir()
        for file, size in sizes.items():
            if file in weights or file.endswith(_SMALL):
                atomic.download(folder / file, local / file, size=size)
            else:
                (local / file).touch()  # so that `_read` sees the name
        try:
            yield epath.Path(local / name) if name else epath.Path(local)
        except InputError as error:
            raise InputError(str(error).replace(str(local), str(folder))) from error


def _weight_files(names: Collection[str]) -> set[str]:
    """Returns the files with weights: safetensors if there are any, else those of TensorFlow, else pickles."""

    tensorflow = {name for name in names if name.endswith(".index") or tensorflow_checkpoints.DATA.search(name)}
    kinds = (
        {name for name in names if name.endswith(".safetensors")}, tensorflow,
        {name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")},
    )  # fmt: skip
    return next((kind for kind in kinds if kind), set())


def _files_read(source: epath.Path) -> list[epath.Path]:
    """Returns the files of weights and the small ones beside them, by name, for the provenance."""
    folder = source if source.is_dir() else source.parent
    paths = {path.name: path for path in folder.iterdir() if path.is_file()}
    weights = _weight_files(paths)
    return [path for name, path in sorted(paths.items()) if name in weights or name.endswith(_SMALL)]


def _read(source: epath.Path, lowercase: bool | None, *, option: str = "") -> Source:
    """Describes a model of any format. InputError, with the `option` that names it and the fix, if there is none."""
    names = sorted(child.name for child in source.iterdir()) if source.is_dir() else []
    if {WHOLE, INDEX} & {*names}:
        return _read_huggingface(source, names, lowercase, option)
    if (prefix := tensorflow_checkpoints.find_prefix(source)) is not None:
        return tensorflow_checkpoints.read(prefix, lowercase=lowercase)
    if not source.is_dir():
        raise InputError(
            f"{option}{source}: local folder or checkpoint not found; download the model, and give its folder"
        )
    if {PICKLE, PICKLE_INDEX} & {*names}:
        return _read_huggingface(source, names, lowercase, option)
    if pickles := [name for name in names if name.endswith(_OTHER_PICKLES)]:
        raise InputError(
            f"{option}{source}: found {pickles[0]} but no {WHOLE}; load it in torch, and save the model with its "
            "save_pretrained"
        )
    raise InputError(
        f"{option}{source}: no supported model found; expected {CONFIG} and {WHOLE} (or {INDEX}), or a TensorFlow "
        f"checkpoint with {tensorflow_checkpoints.BERT_CONFIG}"
    )


def _read_huggingface(folder: epath.Path, names: list[str], lowercase: bool | None, option: str) -> Source:
    if CONFIG not in names:
        raise InputError(f"{option}{folder}: {CONFIG} not found; copy it from the source of the weights")
    return huggingface_reading.read(folder, lowercase=lowercase)
