"""Opens a model for inference in any format: this package's, or that of other software without an import."""

from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.interop.importing import holds_model, open_source
from bert_jax.training.checkpoints import (
    Checkpoint,
    is_checkpoint,
    may_hold_checkpoints,
    open_checkpoint,
)


def open_model_of(location: str, step: int | None = None) -> Checkpoint:
    """Opens a MODEL; its parameters are loaded on demand, straight from its files.

    Args:
      location: a workdir (its newest step, or with `keep_best` its best), one of its checkpoints/STEP, the output of
        `bert-jax import`; or what import reads: a folder of `transformers` such as the output of `bert-jax export`, or
        a TensorFlow checkpoint.
      step: chooses a step of a workdir.

    Raises:
      InputError: there is no such model, or it cannot be read.
    """
    given = remote.parse_path(location)
    if step is None and not (may_hold_checkpoints(given) and is_checkpoint(given)):
        if holds_model(location):
            return open_source(location)
        if models := _models_in(location):
            raise InputError(f"{location}: holds several models; give one of them, such as {models[-1]}")
    return open_checkpoint(location, step)


def _models_in(location: str) -> list[str]:
    """Returns the folders in a local folder that hold models of other software, as `export --steps` writes them."""
    path = remote.parse_path(location)
    if remote.is_remote(path) or not path.is_dir():
        return []
    return sorted(str(child) for child in path.iterdir() if child.is_dir() and holds_model(str(child)))
