"""The English of the code: docstrings open with a verb or a noun, and a thing has one name, the field's."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import helpers

FOLDERS = ("bert_jax", "configs", "launch", "benchmarks", "tests")
OPENINGS = {"as", "how", "of", "that", "what", "when", "where", "whether", "which", "who", "whose"}
FORBIDDEN = {  # a phrase, as a regular expression: the field's term
    r"made again": "rematerialized, recomputed",
    r"go(es|ing|ne)? on (from|with|at|where|as)": "resume, continue",
    r"tried again|tries again|try again": "retry",
    r"may pass": "transient error",
    r"whole or not at all": "atomic",
    r"cut along": "sharded along",
    r"made whole|makes? it whole": "all-gathered",
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
TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
SOURCES = sorted(
    path.relative_to(helpers.REPOSITORY)
    for folder in FOLDERS
    for path in (helpers.REPOSITORY / folder).rglob("*.py")
    if path.name != "test_english.py"
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and text of each comment and each string, docstrings included."""
    with path.open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(io.StringIO(file.read()).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(
                tokenize, "FSTRING_MIDDLE", -1
            ):
                yield token.start[0], token.string


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_docstrings_open_with_a_verb_or_a_noun(source: Path):
    found = []
    for node in ast.walk(ast.parse((helpers.REPOSITORY / source).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            words = re.findall(r"[A-Za-z]+", docstring.split("\n")[0])
            if words and words[0].lower() in OPENINGS:
                found.append(f"{source}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", [path for path in SOURCES if path.parts[0] != "tests"], ids=str)
def test_terms_are_those_of_the_field(source: Path):
    found = [
        f"{source}:{line}: {match[0]!r}: write {term}"
        for line, text in prose(helpers.REPOSITORY / source)
        for phrase, term in FORBIDDEN.items()
        for match in re.finditer(rf"\b{phrase}\b", re.sub(r"\s+", " ", text))
    ]
    assert not found, "\n".join(found)
