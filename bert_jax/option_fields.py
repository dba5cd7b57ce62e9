"""Options that are declared once, as fields of a dataclass: name, type, default, help, choices and range.

`command_line.arguments` makes the command line from fields with a help text.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from bert_jax.errors import InputError


def option(default: Any, help: str, **limits: Any) -> Any:
    """Declares a field as an option of the command line. `limits` are `choices`, `low`, `high` and a `metavar`."""
    return dataclasses.field(default=default, metadata={"help": help, **limits})


class CheckedOptions:
    """Base of dataclasses of options, whose values are checked."""

    def __post_init__(self) -> None:
        """Raises InputError for a field that is not among its choices or not in its range."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, limits = getattr(self, field.name), field.metadata
            low, high = limits.get("low"), limits.get("high")
            if "choices" in limits and value not in limits["choices"]:
                raise InputError(f"{field.name}={value!r}: expected one of {', '.join(limits['choices'])}")
            if low is not None and high is None and not value >= low:
                raise InputError(f"{field.name}={value}: must be at least {low}")
            if high is not None and not low <= value <= high:
                raise InputError(f"{field.name}={value}: must be in [{low}, {high}]")

    def check_unused(self, used: Collection[str], why: str) -> None:
        """Raises InputError, which says `why`, for an option that is not `used` and not at its default."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name not in used and value != field.default:
                given = field.name if value is True else f"{field.name}={value}"
                raise InputError(f"{given}: has no effect {why}")
