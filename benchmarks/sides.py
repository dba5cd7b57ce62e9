"""Processes that are measured in turn: each runs a round per line on its stdin."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class UnsupportedError(Exception):
    """This machine cannot run the side."""


class Side:
    """Process of one side; `command` are the arguments of this Python, `environment` is added to that of this process.

    The command calls `serve`.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._name = name

    def wait(self) -> float:
        """Returns the number in the next line. Raises the error of the process."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                if "unsupported" in answer:
                    raise UnsupportedError(answer["unsupported"])
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return float(answer["value"])
        raise RuntimeError(f"{self._name} ended with status {self._process.wait()}")

    def round(self) -> float:
        """Runs a round, and returns what it measured."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


def serve(make: Callable[[], Callable[[], float]]) -> None:
    """Makes a side, says so, and runs a round per line of stdin; results and errors are lines of JSON."""
    try:
        run_round = make()
        _answer(value=0.0)
        for _ in sys.stdin:
            _answer(value=run_round())
    except UnsupportedError as error:
        _answer(unsupported=str(error))
    except Exception as error:
        _answer(error=f"{type(error).__name__}: {error}")
        raise


def _answer(**content: Any) -> None:
    print(json.dumps(content), flush=True)
