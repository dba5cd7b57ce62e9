"""The user's cache folder: `$BERT_JAX_CACHE`, or `~/.cache/bert_jax`.

A user without a home, such as a bare user id in a container, has a folder in that of temporary files.
"""

import os
import stat
import tempfile
from pathlib import Path

CACHE_VARIABLE = "BERT_JAX_CACHE"


def cache_folder() -> Path:
    """Returns the cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).absolute()
    try:
        return Path.home().absolute() / ".cache" / "bert_jax"
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"bert_jax-{os.getuid()}")


def make_private(folder: Path) -> str:
    """Makes a folder that only this user may write to. Returns why an existing one is not private, or an empty string.

    A folder is not private either if it cannot be made, or if everybody may rename one above it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        return str(error)
    status = folder.stat()
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    for above in folder.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"everybody may write to {above} (mode {stat.S_IMODE(mode):o})"
    return ""
