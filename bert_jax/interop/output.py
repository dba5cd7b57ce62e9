"""Where a conversion writes to."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from etils import epath

from bert_jax.errors import InputError


def new_folder(output: str) -> epath.Path:
    """The path of a folder that does not exist or is empty; InputError where something is there."""
    folder = epath.Path(output)
    if not output or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InputError(f"--output: {output!r} is taken: choose a new folder")
    return folder


@contextmanager
def whole_folder(folder: epath.Path) -> Iterator[epath.Path]:
    """A folder of another name beside `folder`, which takes its place at the end, or is deleted where anything fails.

    `folder` does not exist or is empty, see `new_folder`.
    """
    folder = epath.Path(os.path.realpath(folder))
    partial = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, folder)  # which does not mind an empty folder, as epath does
    except BaseException:
        partial.rmtree(missing_ok=True)
        raise
