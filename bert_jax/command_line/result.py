"""The result of a command: values for programs, a text for people, and the commands that usually follow."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.errors import BertJaxError


class Result(dict[str, Any]):
    """The values of a result; `str` of it is what the command prints without `--json`.

    Attributes:
      text: the result in words; None for the values as JSON.
      next_commands: commands that usually follow.
      error: a failure of a part, which the command raises after it has printed the result.
    """

    def __init__(
        self, values: Mapping[str, Any], text: str | None = None, next_commands: Sequence[str] = (),
        error: BertJaxError | None = None,
    ) -> None:  # fmt: skip
        super().__init__(values)
        self.text, self.next_commands, self.error = text, next_commands, error

    def __str__(self) -> str:
        return self.to_json() if self.text is None else self.text

    def to_json(self) -> str:
        """Returns the values as JSON, in which a number that is not finite is null."""
        from bert_jax.tracking.metrics import finite_json

        return finite_json(self, indent=2, ensure_ascii=False)


def described(values: Mapping[str, Any]) -> str:
    """Returns a line for each value, with its name."""
    width = max(map(len, values))
    texts = {
        key: f"{value:,}"
        if type(value) is int
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
        for key, value in values.items()
    }
    return "\n".join(f"{key:<{width}}  {text}" for key, text in texts.items())


def quoted(value: str) -> str:
    """Quotes a value for the shell; a path that begins with "-" would be an option."""
    return shlex.quote(f"./{value}" if value.startswith("-") and value != "-" else value)
