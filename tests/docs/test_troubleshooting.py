"""Messages on the page of troubleshooting: the program still prints each, so that a search for one finds the page."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from support.helpers import REPOSITORY

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
VALUE = re.compile(r"%(?:\.\d+)?[sdfg]")
OTHERS = re.compile(r"text,label|^[{}]|^  \"")  # files and JSON, not messages
VALUE_WORD = re.compile(r"[\d=/_\[\]<>'\"]|\w\.\w")
LEAST_SHARE = 0.35
"""Share of a message that has to be the program's own words, and not values."""


def literals(node: ast.AST) -> list[str]:
    """Returns the fixed parts of a string or an f-string, without its values."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
        joined = "".join("\0" if part is None else str(part) for part in parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        joined = VALUE.sub("\0", node.value).replace("%%", "%")
    else:
        return []
    return joined.split("\0")


@cache
def templates() -> list[tuple[int, list[str]]]:
    """Returns the number of letters and the fixed parts of each text in the code."""
    found = []
    for path in sorted((REPOSITORY / "bert_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = [" ".join(part.replace("--", "").split()) for part in literals(node)]
            if sum(map(len, parts)) >= 12:
                found.append((letters(" ".join(parts)), parts))
    return found


def letters(text: str) -> int:
    """Counts the letters of a text's words, without those that look like values."""
    return sum(character.isalpha() for word in text.split() if not VALUE_WORD.search(word) for character in word)


def is_printed(message: str) -> bool:
    """Returns True if the fixed parts of some template, in their order, make up enough of the message.

    The code names a parameter where the command line names its option: "--" does not count. A message that ends in
    "..." may end within a part.
    """
    message = message.replace("--", "")
    words = " ".join(message.removesuffix("...").split())
    needed = LEAST_SHARE * letters(words)
    return any(
        letters(" ".join(found_parts(parts, words, is_cut=words != message))) >= needed
        for count, parts in templates() if count >= needed
    )  # fmt: skip


def found_parts(parts: list[str], words: str, *, is_cut: bool) -> list[str]:
    """Returns the parts of a template that a message has, in their order; none if one before its end is missing."""
    at, found = 0, []
    for part in parts:
        place = words.find(part, at)
        if place < 0:
            starts = range(at, len(words)) if is_cut else ()
            rest = next((words[start:] for start in starts if part.startswith(words[start:])), "")
            return [*found, rest] if rest else []
        found.append(part)
        at = place + len(part)
    return found


def is_part_printed(fragment: str) -> bool:
    """Returns True if a fixed part of some template holds the fragment, or the other way round."""
    fragment = fragment.replace("--", "")
    return any(
        fragment in part or (len(part.strip()) >= 12 and part.strip() in fragment)
        for _, parts in templates() for part in parts
    )  # fmt: skip


def messages(page: Path = PAGE) -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [line for line in lines if not OTHERS.search(line)]


def fragments(page: Path = PAGE) -> list[str]:
    """Returns the quoted parts of messages in the first columns of tables."""
    tables = re.findall(
        r"^\| message contains .*\n\|[ -|]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    cells = [row.split("|")[1] for table in tables for row in table.splitlines()]
    return [part.strip() for cell in cells for quoted in re.findall(r"`([^`]+)`", cell) for part in quoted.split("...")]


def test_there_are_messages():
    assert len(messages()) > 40
    assert len(fragments()) > 15


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_of_the_program(message: str):
    assert is_printed(message), message


@pytest.mark.parametrize("fragment", fragments())
def test_parts_of_messages_are_those_of_the_program(fragment: str):
    assert is_part_printed(fragment), fragment


@pytest.mark.parametrize(
    "message",
    ["the run has failed for a reason that nobody knows", "--workdir=a: holds one more run with a config of its own"],
)
def test_other_messages_are_not_found(message: str):
    assert not is_printed(message)
