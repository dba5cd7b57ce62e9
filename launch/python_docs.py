#!/usr/bin/env python3
"""Writes an English corpus from Python's documentation, and from docstrings of installed packages, without a download.

    python launch/python_docs.py FOLDER python numpy scipy matplotlib

Writes python.txt, numpy.txt, scipy.txt and matplotlib.txt. "python" is the help topics of Python (`pydoc_data`) and the
docstrings of its standard library, as prose, which depend only on the Python version; another name is an installed
package. A module is a document, with a blank line after it; each of its lines is a paragraph. Source files are parsed
with `ast`, so no module is imported or executed.
"""

import argparse
import ast
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PYTHON = "python"
"""The name of Python's own documentation, in place of that of a package."""

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
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # Only these contain definitions; expressions do not.

_RULE = re.compile(r"[^\w\s]{3,}(\s+[^\w\s]{3,})*")  # ====, ----, table borders
_DIRECTIVE = re.compile(r"(\.\. |:[\w ]+:( |$)|@\w+)")  # .. note::, :param x:, @param x
_BULLET = re.compile(r"([-*+•]|\(?\d{1,2}[.)])\s+")
_MARKUP = re.compile(r":[\w:+-]+:`|[`*]+|(?<=\w)_(?=[\s.,;)])")  # :class:`x`, ``x``, *x*, a link's_
_WORD = re.compile(r"[^\W\d_]{2,}|[aAI]\b")


def main() -> None:
    """Writes a text file for each package of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the text files are written")
    parser.add_argument("package", nargs="+", help="'python', or the import name of a package, without dots")
    options = parser.parse_args()
    try:
        sources = {name: _sources(name) for name in options.package}
    except ValueError as error:
        parser.error(str(error))
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, paths in sources.items():
        text = "".join(f"{document}\n\n" for document in documents(name, paths))
        (options.folder / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")


def documents(name: str, paths: list[Path]) -> Iterator[str]:
    """Yields a document for each source file with docstrings, one paragraph a line.

    "python" begins with a document for each help topic. A module's document is its docstring and those of its classes
    and functions, in the order of the source. Examples, underlines, tables, other text that does not look like prose,
    and duplicate paragraphs of a document are dropped, as are source files that this Python cannot parse. The order is
    deterministic: topics by name, modules by path.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics if name == PYTHON else {}
    for topic in sorted(topics):
        if document := _document([topics[topic]]):
            yield document
    for path in paths:
        if document := _document(_docstrings(path)):
            yield document


def _sources(name: str) -> list[Path]:
    """Returns the source files, sorted by path. Raises ValueError for a package without any, or that is missing."""
    if name == PYTHON:
        return _below(Path(sysconfig.get_path("stdlib")))
    # A name with a dot is refused: to find a submodule, `find_spec` imports the package.
    spec = find_spec(name) if name.isidentifier() and name != "__main__" else None
    if spec is None:
        raise ValueError(f"package {name!r} is not installed; expected an import name without dots, such as numpy")
    if spec.submodule_search_locations is None:
        files = [path for path in [Path(spec.origin or "")] if path.suffix == ".py"]
    else:
        files = [path for folder in spec.submodule_search_locations for path in _below(Path(folder))]
    if not files:
        raise ValueError(f"package {name!r} has no Python sources; expected one such as numpy")
    return files


def _below(root: Path) -> list[Path]:
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
    except (SyntaxError, ValueError, RecursionError, OSError):
        return []
    # An escape such as "\ud800" makes a lone surrogate, which UTF-8 cannot encode.
    return [text.encode("utf-8", "replace").decode() for text in _docstrings_of(tree)]


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _DEFINITIONS) and (docstring := ast.get_docstring(node, clean=False)):
        yield docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _BLOCKS):
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


if __name__ == "__main__":
    main()
