"""Finds the files of a task's splits: those named in the config, or else those with their names in downloads."""

import os
from collections.abc import Mapping, Sequence

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import remote


def split_files(config: ConfigDict, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the path of each split found; `train` is required.

    Args:
      config: a run's config; `task.train`, `task.dev` and `task.test` name files, in `data.path` if relative.
      usual: file names of each split in downloads; the first that exists is used.

    Raises:
      InputError: training file not found.
    """
    found: dict[str, str] = {}
    for split, names in usual.items():
        if given := config.task[split]:
            found[split] = os.path.join(config.data.path, given)
        else:
            found |= usual_files(config.data.path, {split: names})
    if "train" not in found:
        raise InputError(
            f"data.path={config.data.path}: found none of {', '.join(usual['train'])}; set the training file with "
            "--config.task.train=FILE"
        )
    return found


def usual_files(folder: str, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the paths of a folder's splits, found by their usual names; the first name that exists is used."""
    found: dict[str, str] = {}
    for split, names in usual.items():
        paths = [os.path.join(folder, name) for name in names]
        if path := next((path for path in paths if remote.exists(remote.parse_path(path))), None):
            found[split] = path
    return found
