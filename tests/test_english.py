"""The English of code and prose: docstrings open with a verb or a noun, and a thing has one name, the field's."""

import ast
import re
from pathlib import Path

from support import helpers

FOLDERS = ("bert_jax", "configs", "launch", "benchmarks", "docs", "tests")
OPENINGS = {"as", "how", "of", "that", "what", "when", "where", "whether", "which", "who", "whose"}
FORBIDDEN = {  # a phrase, as a regular expression: the field's term
    r"made again": "rematerialized, recomputed",
    r"go(es|ing|ne)? on (from|with|at|where|as)": "resume, continue",
    r"tried again|tries again|try again": "retry",
    r"may pass": "transient error",
    r"whole or not at all": "atomic",
    r"cut along": "sharded along",
    r"made whole|makes? it whole": "all-gathered",
    r"whole along": "replicated along",
    r"(has|have) to lie": "must be",
    r"at the (most|least)\b": "at most, at least",
    r"mend(s|ed|ing)?": "fix",
    r"(do|does|did) not divide by": "is not divisible by",
    r"stands? there twice": "duplicate",
    r"wants a value": "expected",
    r"left out": "skipped, filtered, dropped",
    r"gone through": "read, complete",
    r"says? of (it|them)sel(f|ves)": "describes",
    r"where nothing is said": "by default",
}
SOURCES = sorted(
    path.relative_to(helpers.REPOSITORY)
    for folder in FOLDERS
    for path in (helpers.REPOSITORY / folder).rglob("*.py")
    if path.name != "test_english.py"
)
TEXTS = sorted(
    path.relative_to(helpers.REPOSITORY)
    for pattern in ("*.md", "docs/*.md", "docs/[a-z]*/*.md", "Makefile", ".ci/*", "benchmarks/*.sh", "launch/*.*")
    for path in helpers.REPOSITORY.glob(pattern)
    if path.suffix != ".py"
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


def test_terms_are_those_of_the_field():
    found = []
    for source in [*TEXTS, *(path for path in SOURCES if path.parts[0] != "tests")]:
        text = (helpers.REPOSITORY / source).read_text(encoding="utf-8")
        found += [
            f"{source}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write {term}"
            for phrase, term in FORBIDDEN.items()
            for match in re.finditer(rf"\b(?:{phrase})\b".replace(" ", r"\s+(#\s+)?"), text, re.IGNORECASE)
        ]
    assert not found, "\n".join(found)
