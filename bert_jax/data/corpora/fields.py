"""Fields of records: the error for a missing one, with those found and the most similar name."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from bert_jax.errors import InputError

_SHOWN_NAMES = 20
_SHOWN_CHARACTERS = 40  # of a name


def missing_field(where: str, field: str, found: Iterable[str], detail: str = "") -> InputError:
    """Returns the error for a record or table without the field `field`.

    Args:
      where: the file, with its line if it has lines.
      field: the name that was looked for.
      found: the names that exist.
      detail: what else the reader might check.
    """
    names = [name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..." for name in found]
    close = difflib.get_close_matches(field, names, 1)
    more = f" and {len(names) - _SHOWN_NAMES} more" if names[_SHOWN_NAMES:] else ""
    shown = ", ".join(names[:_SHOWN_NAMES]) + more
    fix = f"pass --text_field {close[0] if close else 'NAME'}{detail}"
    return InputError(f'{where}: no field "{field}", found {shown or "none"}; {fix}')


def nested_names(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the names of a record's fields; those of an object within it follow it, joined by dots."""
    names: list[str] = []
    for name, value in record.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            names += nested_names(value, f"{prefix}{name}.")
    return names
