"""Damaged checkpoints: classifies errors of Orbax, and verifies arrays against their digests."""

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import remote
from bert_jax.training.checkpointing.checkpoint_digests import changed_arrays, is_known

log = logging.getLogger(__name__)


class DamagedError(InputError):
    """An existing checkpoint that cannot be read, or differs from what was saved."""


# Codes in TensorStore's untyped errors for which the files may be intact.
_DENIED = re.compile("PERMISSION_DENIED|UNAUTHENTICATED")
_TRANSIENT = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


@contextmanager
def convert_read_errors(folder: epath.Path) -> Iterator[None]:
    """Re-raises errors of Orbax on reading a checkpoint as one-line errors that name the folder.

    Missing permissions raise InputError, transient errors BertJaxError, all others DamagedError.
    """
    try:
        yield
    except (DamagedError, MemoryError, jax.errors.JaxRuntimeError):  # JaxRuntimeError: out of device memory
        raise
    except Exception as error:  # TensorStore raises untyped errors
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if isinstance(error, PermissionError) or _DENIED.search(str(error)):
            raise InputError(f"{folder} may not be read ({reason}); check your permissions") from error
        if _TRANSIENT.search(str(error)) or (remote.is_remote(folder) and remote.is_transient(error)):
            raise BertJaxError(
                f"{folder} could not be read because of a transient error ({reason}); rerun the command"
            ) from error
        raise DamagedError(
            f"{folder} is damaged or of another model ({reason}); use an earlier step, or recreate it"
        ) from error


def changed_error(folder: epath.Path, names: Sequence[str]) -> DamagedError:
    """Makes the error for arrays or items that differ from what was saved."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return DamagedError(f"{folder} is damaged ({listed} changed since the save); use an earlier step, or recreate it")


@functools.cache  # logs once per folder
def _log_unverified(folder: epath.Path) -> None:
    log.info("%s has no digests that this version knows; its arrays are not verified", folder)


def check_arrays(folder: epath.Path, found: Callable[[], Mapping[str, str]], digests: dict[str, Any] | None) -> None:
    """Raises DamagedError with the names of arrays that changed since the save; all processes have to call it.

    `found` returns the `array_digests` of what was read; it is not called if the checkpoint has no digests.
    """
    if digests is None or not is_known(digests):
        _log_unverified(folder)
    elif changed := changed_arrays(found(), digests):
        raise changed_error(folder, changed)
