"""Which files a task's splits are in: those that the config names, or else those that go by the names they have in
downloads."""

import os
from collections.abc import Mapping, Sequence

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import remote


def split_files(config: ConfigDict, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The path of each split there is, `train` among them.

    Args:
      config: of a run; `task.train`, `task.dev` and `task.test` name files, in `data.path` if they are relative.
      usual: the names of each split in downloads, the first that is there is taken.

    Raises:
      InputError: there is no file to train on.
    """
    found: dict[str, str] = {}
    for split, names in usual.items():
        if given := config.task[split]:
            found[split] = os.path.join(config.data.path, given)
        else:
            found |= usual_files(config.data.path, {split: names})
    if "train" not in found:
        raise InputError(
            f"{config.data.path or 'data.path is empty, and here'} has none of {', '.join(usual['train'])}: name the "
            "file to train on, --config.task.train=FILE"
        )
    return found


def usual_files(folder: str, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the paths of the splits that a folder has under one of their usual names, of several the first."""
    found: dict[str, str] = {}
    for split, names in usual.items():
        paths = [os.path.join(folder, name) for name in names]
        if path := next((path for path in paths if remote.exists(remote.named(path))), None):
            found[split] = path
    return found
