"""The commands: public functions, whose parameters are the options and whose docstrings are the help.

Each imports what it needs: `bert-jax prepare` does not wait for JAX. It returns a `Result`.
"""

from collections.abc import Mapping
from typing import Any

from bert_jax.errors import BertJaxError


class Result(dict[str, Any]):
    """The values of a result.

    Attributes:
      text: what the command prints without `--json`; None for the values as JSON.
      error: a failure of a part, which the command raises after it has printed the result.
    """

    def __init__(self, values: Mapping[str, Any], text: str | None = None, error: BertJaxError | None = None) -> None:
        super().__init__(values)
        self.text, self.error = text, error

    def __str__(self) -> str:
        return self.to_json() if self.text is None else self.text

    def to_json(self) -> str:
        """Returns the values as JSON, in which a number that is not finite is null."""
        from bert_jax.tracking.metrics import finite_json

        return finite_json(self, indent=2, ensure_ascii=False)
