"""Atomic output folders of conversions, local or remote."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, partial_files, remote


def new_folder(output: str) -> epath.Path:
    """Returns the path of an output folder. Raises InputError unless it does not exist or is empty."""
    folder = remote.parse_path(output)
    if not output or remote.is_taken(folder):
        raise InputError(f"--output={output!r}: already exists and is not empty; expected a new or empty folder")
    return folder


@contextmanager
def whole_folder(folder: epath.Path, last: str) -> Iterator[epath.Path]:
    """Context manager that yields a temporary local folder and publishes it as `folder`; deletes it after an error.

    For a local `folder`, the temporary folder lies beside it and is renamed; leftovers of killed processes are deleted
    first. For a remote one, its files are uploaded one by one, `last` at the end: if `last` exists, the folder is
    complete. `folder` must not exist or must be empty, see `new_folder`.
    """
    if remote.is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as local:
            atomic.make_folder(folder)
            yield epath.Path(local)
            atomic.upload_folder(Path(local), folder, last=last)
        return
    final = Path(os.path.realpath(folder))
    final.parent.mkdir(parents=True, exist_ok=True)
    partial_files.delete_abandoned_folders(final)
    partial, lock = partial_files.create_folder(final)
    try:
        yield epath.Path(partial)
        os.replace(partial, final)  # replaces an empty folder, which epath does not
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)
