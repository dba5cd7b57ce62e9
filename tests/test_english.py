"""Docstrings open with a verb or a noun."""

import ast
import re
from pathlib import Path

from support import helpers

FOLDERS = ("bert_jax", "configs", "launch", "benchmarks", "docs", "tests")
OPENINGS = {"as", "how", "of", "that", "what", "when", "where", "whether", "which", "who", "whose"}
SOURCES = sorted(
    path.relative_to(helpers.REPOSITORY) for folder in FOLDERS for path in (helpers.REPOSITORY / folder).rglob("*.py")
)


def docstrings(source: Path) -> list[tuple[int, str]]:
    """Returns the line and the first line of every docstring of a file."""
    nodes = ast.walk(ast.parse((helpers.REPOSITORY / source).read_text(encoding="utf-8")))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (getattr(node, "lineno", 1), docstring.split("\n")[0])
        for node in nodes if isinstance(node, kinds) and (docstring := ast.get_docstring(node))
    ]  # fmt: skip


def test_docstrings_open_with_a_verb_or_a_noun():
    found = [
        f"{source}:{line}: {first}"
        for source in SOURCES
        for line, first in docstrings(source)
        if (words := re.findall(r"[A-Za-z]+", first)) and words[0].lower() in OPENINGS
    ]
    assert not found, "\n".join(found)
