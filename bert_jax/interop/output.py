"""Where a conversion writes to."""

from etils import epath

from bert_jax.errors import InputError


def new_folder(output: str) -> epath.Path:
    """The path of a folder that does not exist or is empty; InputError where something is there."""
    folder = epath.Path(output)
    if not output or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InputError(f"--output: {output!r} is taken: choose a new folder")
    return folder
