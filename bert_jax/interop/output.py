"""Where a conversion writes to."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from bert_jax import remote, whole_files
from bert_jax.errors import InputError


def new_folder(output: str) -> epath.Path:
    """The path of a folder that does not exist or is empty; InputError where something is there."""
    folder = remote.named(output)
    if not output or remote.is_taken(folder):
        raise InputError(f"--output: {output!r} is taken: choose a new folder")
    return folder


@contextmanager
def whole_folder(folder: epath.Path, last: str) -> Iterator[epath.Path]:
    """A folder on this machine, which becomes `folder` at the end, or is deleted where anything fails.

    A local one lies beside it and is renamed. The files of a remote one are put one by one, `last` at the end: where
    that is, all are. `folder` does not exist or is empty, see `new_folder`.
    """
    if remote.is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as local:
            whole_files.make_folder(folder)
            yield epath.Path(local)
            whole_files.upload_folder(Path(local), folder, last=last)
        return
    folder = epath.Path(os.path.realpath(folder))
    partial = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, folder)  # which does not mind an empty folder, as epath does
    except BaseException:
        partial.rmtree(missing_ok=True)
        raise
