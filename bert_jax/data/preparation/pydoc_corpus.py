"""Built-in English corpus from CPython's documentation, without a download.

It consists of Python's help topics (`pydoc_data`) and the docstrings of its standard library, as prose. The library is
parsed with `ast`, so no module is imported or executed. The text depends only on the Python version.
"""

import ast
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "__phello__",
    }
)
_MIN_WORDS = 4
_MIN_LETTERS = 0.75  # of a paragraph's characters, without spaces
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_RULE = re.compile(r"[^\w\s]{3,}(\s+[^\w\s]{3,})*")  # ====, ----, table borders
_DIRECTIVE = re.compile(r"(\.\. |:[\w ]+:( |$)|@\w+)")  # .. note::, :param x:, @param x
_BULLET = re.compile(r"([-*+•]|\(?\d{1,2}[.)])\s+")
_MARKUP = re.compile(r":[\w:+-]+:`|[`*]+|(?<=\w)_(?=[\s.,;)])")  # :class:`x`, ``x``, *x*, a link's_
_WORD = re.compile(r"[^\W\d_]{2,}|[aAI]\b")


def documents() -> Iterator[str]:
    """Yields a document for each help topic, then one for each module with docstrings, one paragraph a line.

    A module's document is its docstring and those of its classes and functions, in the order of the source. Examples,
    underlines, tables, other text that does not look like prose, and duplicate paragraphs of a document are dropped.
    The order is deterministic: topics by name, modules by path.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        if document := _document([topics[name]]):
            yield document
    for path in _sources():
        if document := _document(_docstrings(path)):
            yield document


def source_bytes() -> int:
    """Returns the bytes that `documents` reads, for progress bars."""
    return sum(path.stat().st_size for path in _sources())


def _sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(_walk(root), key=lambda path: path.relative_to(root).parts)


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _walk(entry)
        elif entry.suffix == ".py" and not entry.name.startswith("_sysconfigdata"):
            yield entry


def _docstrings(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():  # Old modules contain invalid escapes.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    return list(_docstrings_of(tree))


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _DEFINITIONS) and (docstring := ast.get_docstring(node, clean=False)):
        yield docstring
    for child in ast.iter_child_nodes(node):
        yield from _docstrings_of(child)


def _document(texts: list[str]) -> str:
    paragraphs = (paragraph for text in texts for paragraph in _paragraphs(text))
    return "\n".join(dict.fromkeys(filter(_is_prose, paragraphs)))


def _paragraphs(text: str) -> Iterator[str]:
    """Yields paragraphs of a docstring as single lines; they end at blank lines, bullets and changes of indentation."""
    paragraph: list[str] = []
    indent = 0
    in_example = False
    for line in inspect.cleandoc(text).split("\n") + [""]:
        stripped = line.strip()
        in_example = bool(stripped) and (in_example or stripped.startswith(">>>"))  # With the output that follows.
        dropped = in_example or _RULE.fullmatch(stripped) or _DIRECTIVE.match(stripped)
        bullet = _BULLET.match(stripped)
        line_indent = len(line) - len(line.lstrip())
        if paragraph and (not stripped or dropped or bullet or line_indent != indent):
            yield _clean(" ".join(paragraph))
            paragraph = []
        if stripped and not dropped:
            # Continuation lines of a bullet are indented to its text.
            indent = line_indent + (bullet.end() if bullet else 0)
            paragraph.append(stripped[bullet.end() :] if bullet else stripped)


def _clean(paragraph: str) -> str:
    return " ".join(_MARKUP.sub("", paragraph).split())


def _is_prose(paragraph: str) -> bool:
    characters = paragraph.replace(" ", "")
    if "::=" in paragraph:  # A grammar rule.
        return False
    if not characters or len(_WORD.findall(paragraph)) < max(_MIN_WORDS, 0.6 * len(paragraph.split())):
        return False
    return sum(map(str.isalpha, characters)) >= _MIN_LETTERS * len(characters)
