"""Import of checkpoints from other software: detects a folder's format and reads it."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.local_listing import similar_name
from bert_jax.files.output_folder import new_folder
from bert_jax.interop import huggingface
from bert_jax.interop.safetensors_files import INDEX, WHOLE, read_json
from bert_jax.training.checkpointing.checkpoints import Checkpoint, check_place, open_checkpoint, save_parameters

log = logging.getLogger(__name__)

_READ = (".json", ".txt", ".safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def import_checkpoint(source: str, output: str, *, lowercase: bool | None = None) -> Checkpoint:
    """Converts the folder `source` to a checkpoint of parameters in `output`, written atomically.

    Args:
      source: a folder of `transformers`; see `huggingface.read`.
      output: a new folder; see `training.checkpointing.checkpoints` for its contents.
      lowercase: whether text is lowercased; None takes the source's setting.

    Raises:
      InputError: `output` already exists, or `source` holds no readable model. Nothing is ever unpickled.
    """
    folder = new_folder(output)
    check_place(folder)
    with _on_this_machine(source) as here:
        _check_source(here)
        log.info("Reading %s", source)
        found = huggingface.read(here, lowercase=lowercase)
    log.info("Writing %s", folder)
    save_parameters(
        folder, found.parameters, bert_config=found.bert_config, tokenizer=found.tokenizer, heads=found.heads
    )
    return open_checkpoint(output)


@contextmanager
def _on_this_machine(source: str) -> Iterator[epath.Path]:
    """Yields the folder, or a local copy of a remote one with only the files to read; errors name the given path."""
    folder = remote.parse_path(source)
    if not remote.is_remote(folder):
        yield folder
        return
    sizes = remote.sizes(folder)
    if not sizes:
        raise InputError(f"--source={folder}: no file found; give the folder of a model")
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as copy:
        for name, size in sizes.items():
            if name.endswith(_READ):
                atomic.download(folder / name, Path(copy) / name, size=size)
            else:
                (Path(copy) / name).touch()  # so that `_check_source` sees the name
        try:
            yield epath.Path(copy)
        except InputError as error:
            raise InputError(str(error).replace(copy, str(folder))) from error


def _check_source(folder: epath.Path) -> None:
    """Raises InputError unless the folder has config.json and safetensors; the message says how to convert others."""
    if not folder.is_dir():
        raise InputError(
            f"--source={folder}: local folder not found{similar_name(folder)}; download the model, and give its folder"
        )
    names = sorted(child.name for child in folder.iterdir())
    if {WHOLE, INDEX} & {*names}:
        if huggingface.CONFIG not in names:
            raise InputError(
                f"--source={folder}: {huggingface.CONFIG} not found; copy it from the source of the weights"
            )
        return
    if tensorflow := [name for name in names if name.endswith((".index", ".meta"))]:
        raise InputError(f"--source={folder}: TensorFlow checkpoints ({tensorflow[0]}) are not supported")
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise InputError(
            f"--source={folder}: found {pickles[0]} but no {WHOLE}; pickles are not read, since they can run any code. "
            f"If you trust it, {_conversion(folder, pickles)}"
        )
    raise InputError(
        f"--source={folder}: no supported model found; expected {huggingface.CONFIG} and {WHOLE} (or {INDEX})"
    )


def _conversion(folder: epath.Path, pickles: list[str]) -> str:
    if not any(name.startswith("pytorch_model") for name in pickles):
        return "load it in torch, and save the model with its save_pretrained"
    path = folder / huggingface.CONFIG
    named = huggingface.named_architectures(path, read_json(path)) if path.exists() else []
    architecture = next((name for name in named if name in huggingface.ARCHITECTURES), "BertForPreTraining")
    return (
        f'convert it: python -c "from transformers import {architecture} as M; '
        f'M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}, safe_serialization=True)"'
    )
