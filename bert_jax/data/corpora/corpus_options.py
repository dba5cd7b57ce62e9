"""Options of reading a corpus, and the declaration of options: name, type, default, help, choices and range.

`command_line.arguments` makes the command line from fields with a help text; `dataset.json` records the same fields.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.errors import InputError

TEXT_FIELD = "text"
"""Default of `--text_field`."""


def option(default: Any, help: str, **limits: Any) -> Any:
    """Declares a field as an option of the command line. `limits` are `choices`, `low`, `high` and a `metavar`."""
    return dataclasses.field(default=default, metadata={"help": help, **limits})


class Checked:
    """Base of dataclasses of options: checks choices and ranges."""

    def __post_init__(self) -> None:
        """Raises InputError for a field that is not among its choices or not in its range."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, limits = getattr(self, field.name), field.metadata
            low, high = limits.get("low"), limits.get("high")
            if "choices" in limits and value not in limits["choices"]:
                raise InputError(f"--{field.name}={value!r}: expected one of {', '.join(limits['choices'])}")
            if low is not None and high is None and not value >= low:
                raise InputError(f"--{field.name}={value}: must be at least {low}")
            if high is not None and not low <= value <= high:
                raise InputError(f"--{field.name}={value}: must be in [{low}, {high}]")


@dataclass(frozen=True)
class CorpusOptions(Checked):
    """Options for reading documents from files.

    Tables, JSON lines and WikiExtractor files mark their documents themselves. Documents of more than
    `max_document_bytes` are split at line ends.
    """

    documents: str = option(
        "blank_line",
        "document separator in plain text: a blank line, or the end of the file (for text with blank lines)",
        choices=("blank_line", "file"),
    )
    errors: str = option(
        "strict", "how to read invalid UTF-8: fail, or replace it by U+FFFD", choices=("strict", "replace")
    )
    text_field: str = option(
        TEXT_FIELD,
        "field or column with the text, in JSON lines, Parquet, Arrow, CSV, TSV and TFDS; a dot for a nested field",
        metavar="NAME",
    )
    max_document_bytes: int = dataclasses.field(default=16 << 20, metadata={"low": 1})
