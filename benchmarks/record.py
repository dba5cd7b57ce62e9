"""Writes the rows of a benchmark to JSON, with the environment that measured them, and renders them as Markdown.

    python benchmarks/record.py     # lists all results, those that are older than the code first

A benchmark prints, and the documentation shows, what `render` makes of the file in results/. A table is its columns,
each a heading and a format string over the keys of a row, and its rows, which hold numbers with their units in the key.
"""

import argparse
import ast
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
"""Packages whose versions are recorded for every benchmark."""


def add_json_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds `--json FILE`, by default results/NAME.json."""
    parser.add_argument(
        "--json", type=Path, default=RESULTS / f"{name}.json", metavar="FILE",
        help=f"output: the results as JSON (default: benchmarks/results/{name}.json)",
    )  # fmt: skip


def make_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Returns a parser with a script's docstring as its description, and with `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_argument(parser, name)
    return parser


class Record:
    """Holds the results of one benchmark, and writes them atomically after each change.

    `measures` are the files and folders, relative to the repository, whose change makes the results older than the
    code; the script itself is always one. `packages` are those whose versions matter besides `PACKAGES`. `command` is
    by default that of this process, and `device` the name of an accelerator, if the results are of one. `seconds`
    counts from here to the last write.
    """

    def __init__(
        self, path: Path, measures: Iterable[str], packages: Iterable[str] = (), *,
        command: str | None = None, device: str | None = None,
    ):  # fmt: skip
        self.path = path
        self._began = time.monotonic()
        script = f"benchmarks/{Path(sys.argv[0]).name}"
        measures = sorted({*measures, *([script] if (REPOSITORY / script).is_file() else [])})
        words = [script, *map(_without_folder, sys.argv[1:])]
        self.content: dict[str, Any] = {
            "name": path.stem,
            "command": command or shlex.join(["python", *words]),
            "date": today(),
            "seconds": 0.0,
            "environment": environment(packages) | ({"device": device} if device else {}),
            "code": {"measures": measures, "digest": code_digest(measures)},
            "values": {},
            "tables": {},
        }  # fmt: skip

    @property
    def stamp(self) -> dict[str, Any]:
        """Date, commit and code of a row, for tables that several runs fill."""
        return {
            "date": self.content["date"],
            "commit": self.content["environment"]["commit"],
            "code": self.content["code"]["digest"],
        }

    def earlier(self, table: str) -> list[dict]:
        """Returns the rows of a table in the existing file, or none."""
        if not self.path.exists():
            return []
        return json.loads(self.path.read_text(encoding="utf-8"))["tables"].get(table, {}).get("rows", [])

    def set_values(self, **values: Any) -> None:
        """Records single numbers, for sentences."""
        self.content["values"] |= values
        self.write()

    def set_table(self, table: str, columns: Mapping[str, str], rows: Iterable[dict]) -> None:
        self.content["tables"][table] = {"columns": dict(columns), "rows": list(rows)}
        self.write()

    def fill(
        self, table: str, columns: Mapping[str, str], keys: Sequence[str],
        works: Mapping[Any, Callable[[], list[dict]]], only: str = "",
    ) -> list[dict]:  # fmt: skip
        """Writes a table row by row and returns its rows; keeps earlier rows of this code, if a run was stopped.

        `works` make the rows, by their values of `keys`. With `only`, the others keep the rows that they have.
        """
        rows: dict[Any, list[dict]] = {key: [] for key in works}
        for row in self.earlier(table):
            rows.get(tuple(row[key] for key in keys), []).append(row)
        for key, work in works.items():
            is_current = bool(rows[key]) and all(row.get("code") == self.stamp["code"] for row in rows[key])
            if not is_current and only in " ".join(map(str, key)):
                print(*key, file=sys.stderr, flush=True)
                rows[key] = [row | self.stamp for row in work()]
            self.set_table(table, columns, itertools.chain.from_iterable(rows.values()))
        return list(itertools.chain.from_iterable(rows.values()))

    def write(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._began, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def render(self, table: str) -> str:
        return render(self.content["tables"][table])


def render(table: Mapping[str, Any]) -> str:
    """Returns a table in Markdown."""
    lines = ["| " + " | ".join(table["columns"]) + " |", "|" + " --- |" * len(table["columns"])]
    lines += ["| " + " | ".join(cell(form, row) for form in table["columns"].values()) + " |" for row in table["rows"]]
    return "\n".join(lines)


def cell(form: str, row: Mapping[str, Any]) -> str:
    """Returns the text of a cell: empty if the row lacks a key, with "?" for a number that is unknown (null)."""
    try:
        return form.format_map({key: _UNKNOWN if value is None else value for key, value in row.items()})
    except KeyError:
        return ""


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the median, the minimum and the maximum of values, with the keys that `with_range` formats."""
    return {f"{name}_{kind.__name__}": kind(values) for kind in (statistics.median, min, max)}


def with_range(name: str, form: str) -> str:
    """Returns the format of a median with its minimum and maximum."""
    return f"{{{name}_median:{form}}} ({{{name}_min:{form}}}-{{{name}_max:{form}}})"


class _Unknown:
    def __format__(self, specification: str) -> str:
        return "?"


_UNKNOWN = _Unknown()


def read(name: str) -> dict[str, Any]:
    """Returns the content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def provenance(content: Mapping[str, Any]) -> str:
    """Returns the line below a table: command, date, versions, machine, commit, and whether the code has changed."""
    found = content["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['cores']} cores" if found["cores"] else ""
    if found["cpu"]:
        machine += f" of {found['cpu']}"
    if vectors := found.get("instructions"):
        machine += " with AVX-512" if "avx512f" in vectors else " with AVX2" if "avx2" in vectors else ""
    if found.get("device"):
        machine = f"{found['device']}, {machine}"
    parts = [f"`{content['command']}`", content["date"] or "date not recorded", versions, machine]
    parts.append(f"commit {found['commit'][:10]}" if found["commit"] else "commit not recorded")
    line = ", ".join(part for part in parts if part) + "."
    older, rows = outdated(content)
    if older and older < rows:
        line += f" {older} of {rows} rows are older than the code that they measure."
    elif older and content["code"]["digest"]:
        line += " The code that it measures has changed since."
    return line + (f" {content['note']}" if content.get("note") else "")


def outdated(content: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of rows that were measured on other code than today's, and the number of all rows.

    A row without a stamp is as old as the file.
    """
    today = code_digest(content["code"]["measures"])
    rows = [row for table in content["tables"].values() for row in table["rows"]]
    return sum(row.get("code", content["code"]["digest"]) != today for row in rows), len(rows)


def code_digest(measures: Iterable[str]) -> str:
    """Returns a digest of the files in `measures`, in folders of the Python files, without comments and docstrings."""
    digest = hashlib.sha256()
    for name in sorted(measures):
        path = REPOSITORY / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []:
            digest.update(f"{file.relative_to(REPOSITORY).as_posix()}\0".encode())
            text = file.read_text(encoding="utf-8")
            digest.update((_code_of(text) if file.suffix == ".py" else text).encode() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def _code_of(source: str) -> str:
    """Returns the lines of a Python file without docstrings, comments of whole lines and empty lines."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    kept = [line for number, line in lines if number not in prose and line.strip() and line.lstrip()[0] != "#"]
    return "\n".join(kept)


def environment(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Returns versions, commit, CPU model, its vector instructions, and number of cores of this process."""
    versions = {"Python": platform.python_version()}
    for name in (*PACKAGES, *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = _cpu_info("flags").split()
    vectors = " ".join(sorted(flag for flag in flags if flag.startswith(("avx", "fma", "amx"))))
    cpu = _cpu_info("model name") or platform.processor()
    return {"versions": versions, "commit": _commit(), "cpu": cpu, "instructions": vectors, "cores": cores}


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def _commit() -> str | None:
    """Returns the commit, with "+" if tracked files were changed. Outside of a clone it is BERT_JAX_COMMIT, or None."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        code = ["bert_jax", "configs", "benchmarks", ":!benchmarks/results"]
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BERT_JAX_COMMIT")
    return head + "+" * bool(changed)


def _cpu_info(key: str) -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(rf"^{key}\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else ""


def _without_folder(argument: str) -> str:
    """Returns an argument of the command; of a path that is not below the working directory only the last part."""
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if value.startswith(("/", "..")) else argument


def list_results() -> str:
    """Returns the state and the command of each file in results/, those older than the code first."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        content = read(path.stem)
        older, rows = outdated(content)
        age = f"{older} of {rows} rows are older than the code" if older else "up to date"
        found.append((not older, f"{path.stem}: {age}, {content['date']}\n    {content['command']}"))
    return "\n".join(text for _, text in sorted(found))


if __name__ == "__main__":
    print(list_results())
