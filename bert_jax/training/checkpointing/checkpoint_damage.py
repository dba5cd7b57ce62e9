"""Damage of checkpoints: what of an error of Orbax is one, and what the digests say of arrays that were read."""

import functools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from etils import epath

from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import remote
from bert_jax.training.checkpointing.checkpoint_digests import changed_arrays, is_known

log = logging.getLogger(__name__)


class DamagedError(InputError):
    """A checkpoint that is there and cannot be read, or does not hold what was saved."""


# What TensorStore says, in an error without a type of its own, where the files may be intact.
_DENIED = re.compile("PERMISSION_DENIED|UNAUTHENTICATED")
_TRANSIENT = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


@contextmanager
def damage_named(folder: epath.Path) -> Iterator[None]:
    """Raises DamagedError, one line that names the folder, for what Orbax says of a checkpoint that it cannot read."""
    try:
        yield
    except (DamagedError, MemoryError, jax.errors.JaxRuntimeError):  # the last: no memory on a device
        raise
    except Exception as error:  # TensorStore raises bare ones
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if isinstance(error, PermissionError) or _DENIED.search(str(error)):
            raise InputError(f"{folder} may not be read ({reason}): check your permissions") from error
        if _TRANSIENT.search(str(error)) or (remote.is_remote(folder) and remote.is_transient(error)):
            raise BertJaxError(f"{folder} could not be read ({reason})") from error
        raise DamagedError(
            f"{folder} is damaged or of another model ({reason}): use an earlier step, or make it again"
        ) from error


def changed_error(folder: epath.Path, names: Sequence[str]) -> DamagedError:
    """Returns the error for arrays or items that are not what was saved."""
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return DamagedError(f"{folder} is damaged ({named}: not what was saved): use an earlier step, or make it again")


@functools.cache  # said once of each
def _say_unverified(folder: epath.Path) -> None:
    log.info("%s has no digests that this version knows: its arrays are not verified", folder)


def check_arrays(folder: epath.Path, arrays: dict[str, Any], digests: dict[str, Any] | None) -> None:
    """Raises DamagedError that names the arrays which are not what was saved; all processes have to call it."""
    if digests is None or not is_known(digests):
        _say_unverified(folder)
    elif changed := changed_arrays(arrays, digests):
        raise changed_error(folder, changed)
