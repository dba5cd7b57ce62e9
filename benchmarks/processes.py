"""Processes of benchmarks: commands of bert_jax, functions of a script, and sides that are measured in turn.

A process runs `python processes.py MODULE FUNCTION ARGUMENTS`, with the arguments as JSON, and prints the result as
JSON in its last line. Errors of a process are on its stderr.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BERT_JAX = (sys.executable, "-m", "bert_jax.cli")


class UnsupportedError(Exception):
    """This machine cannot run the side."""


def python_path() -> str:
    """Returns a PYTHONPATH with benchmarks/, which configs there import from."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def bert_jax(*words: object, statuses: Sequence[int] = (0,), **environment: str) -> str:
    """Runs a command of `bert-jax`, with `environment` added, to an expected status; returns what it prints."""
    command, environment = [*BERT_JAX, *map(str, words)], {"PYTHONPATH": python_path(), **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | environment)
    if done.returncode not in statuses:
        done.check_returncode()
    return done.stdout


def prepare_dataset(folder: Path, text: Path, vocabulary: Sequence[object], *options: object) -> Path:
    """Returns the dataset FOLDER/data of a text; makes it, and FOLDER/tokenizer.json, if they are missing.

    `vocabulary` and `options` are those of `bert-jax vocab` and of `bert-jax prepare`.
    """
    tokenizer, data = folder / "tokenizer.json", folder / "data"
    if not tokenizer.exists():
        bert_jax("vocab", *vocabulary, "--output", tokenizer)
    if not (data / "dataset.json").exists():
        bert_jax("prepare", "--input", text, "--vocab", tokenizer, "--output", data, *options)
    return data


def data_folder() -> Path:
    """Returns the folder that BERT_JAX_DATA names. Exits with an error if it is not set."""
    if folder := os.environ.get("BERT_JAX_DATA"):
        return Path(folder)
    raise SystemExit("BERT_JAX_DATA is not set; set it to the folder of the corpora, tasks and vocabularies")


def call_command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Returns the command of a process that calls a function of a script or module in benchmarks/."""
    return [sys.executable, __file__, *_name(function), json.dumps(arguments, default=str)]


def call(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Returns what a function returns in a process of its own, with `environment` added to that of this process."""
    command = call_command(function, *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | environment)
    return json.loads(done.stdout.splitlines()[-1])


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns the module and the name of a function; the module of a script is not `__main__`."""
    module = function.__module__
    return Path(sys.argv[0]).stem if module == "__main__" else module, function.__name__


def _call(module: str, name: str, arguments: Sequence[Any]) -> Any:
    return getattr(importlib.import_module(module), name)(*arguments)


# --- Sides ------------------------------------------------------------------------------------------------------------


class Side:
    """Process of one side: `make` returns, for these arguments, the function that runs a round and measures it.

    A round is run for each line on the stdin of the process.
    """

    def __init__(self, make: Callable[..., Callable[[], float]], *arguments: Any, **environment: str):
        self._process = subprocess.Popen(
            call_command(serve, *_name(make), arguments),
            env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

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
        raise RuntimeError(f"{self._process.args}: status {self._process.wait()}; its error is above")

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


def take_turns(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Returns what each side measured in `rounds` rounds of all in turn, and ends them.

    Leaves out a side that this machine cannot run, with a line that says so.
    """
    found: dict[str, list[float]] = {}
    try:
        for name, side in sides.items():
            try:
                side.wait()
                found[name] = []
            except UnsupportedError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
        for number in range(rounds):
            for name, values in found.items():
                values.append(sides[name].round())
            measured = ", ".join(f"{name} {values[-1]:.4f} s" for name, values in found.items())
            print(f"round {number + 1}: {measured}", file=sys.stderr, flush=True)
    finally:
        for side in sides.values():
            side.close()
    return found


def serve(module: str, name: str, arguments: Sequence[Any]) -> None:
    """Makes a side, says so, and runs a round for each line of stdin; results and errors are lines of JSON."""
    try:
        run_round = _call(module, name, arguments)
        print(json.dumps({"value": 0.0}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"value": run_round()}), flush=True)
    except Exception as error:
        kind = "unsupported" if isinstance(error, UnsupportedError) else "error"
        print(json.dumps({kind: f"{type(error).__name__}: {error}"}), flush=True)
        raise


if __name__ == "__main__":
    _, module, name, arguments = sys.argv
    print(json.dumps(_call(module, name, json.loads(arguments))))
