"""Checkpoints made of what other software wrote: finds out what a folder holds, and reads it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.output_folder import new_folder
from bert_jax.interop import huggingface
from bert_jax.interop.safetensors_files import INDEX, WHOLE, read_json
from bert_jax.training.checkpointing.checkpoints import Checkpoint, check_place, open_checkpoint, save_parameters

_READ = (".json", ".txt", ".safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def import_checkpoint(source: str, output: str, *, lowercase: bool | None = None) -> Checkpoint:
    """Writes what the folder `source` holds as a checkpoint of parameters to `output`, whole or not at all.

    Args:
      source: a folder of `transformers`; see `huggingface.read`.
      output: a new folder; see `training.checkpoints` for what is in it.
      lowercase: whether text is lower-cased; None is what the source says.

    Raises:
      InputError: `output` is taken, or `source` holds nothing that can be read. Nothing is ever unpickled.
    """
    folder = new_folder(output)
    check_place(folder)
    with _on_this_machine(source) as here:
        _check_source(here)
        found = huggingface.read(here, lowercase=lowercase)
    save_parameters(
        folder, found.parameters, bert_config=found.bert_config, tokenizer=found.tokenizer, heads=found.heads
    )
    return open_checkpoint(output)


@contextmanager
def _on_this_machine(source: str) -> Iterator[epath.Path]:
    """The folder, or a copy of it where it is remote, without what is not read; errors name it as it was given."""
    folder = remote.named(source)
    if not remote.is_remote(folder):
        yield folder
        return
    sizes = remote.sizes(folder)
    if not sizes:
        raise InputError(f"--source: {folder} holds no file: name the folder of a model")
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as copy:
        for name, size in sizes.items():
            if name.endswith(_READ):
                atomic.download(folder / name, Path(copy) / name, size=size)
            else:
                (Path(copy) / name).touch()  # there to be refused
        try:
            yield epath.Path(copy)
        except InputError as error:
            raise InputError(str(error).replace(copy, str(folder))) from error


def _check_source(folder: epath.Path) -> None:
    """InputError where the folder has not both config.json and safetensors; says what to do with what it has."""
    if not folder.is_dir():
        raise InputError(f"--source: {folder} is not a folder on this machine: download the model, and name its folder")
    names = sorted(child.name for child in folder.iterdir())
    if {WHOLE, INDEX} & {*names}:
        if huggingface.CONFIG not in names:
            raise InputError(f"--source: {folder} has no {huggingface.CONFIG}: copy it from where the weights are from")
        return
    if tensorflow := [name for name in names if name.endswith((".index", ".meta"))]:
        raise InputError(f"--source: {folder} holds a TensorFlow checkpoint ({tensorflow[0]}): it cannot be read yet")
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise InputError(
            f"--source: {folder} has no {WHOLE}, only {pickles[0]}, and pickles can run any code: not read. If you "
            f"trust it, {_conversion(folder, pickles)}"
        )
    raise InputError(
        f"--source: {folder} holds no model that can be read: {huggingface.CONFIG} and {WHOLE} (or {INDEX}) are wanted"
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
