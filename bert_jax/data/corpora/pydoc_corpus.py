"""English corpora from Python's documentation and from docstrings of installed packages, without a download.

"pydoc" is Python's help topics (`pydoc_data`) and the docstrings of its standard library, as prose; it depends only on
the Python version. "pydoc:NAME" is the docstrings of the installed package NAME, "pydoc:NAME,NAME" those of several.
Source files are parsed with `ast`, so no module is imported or executed.
"""

import ast
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from bert_jax.data.hashing import key_from
from bert_jax.errors import InputError

PYDOC = "pydoc"
"""The input name of Python's own documentation; that of a package's docstrings is "pydoc:NAME"."""

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


def is_pydoc(name: str) -> bool:
    """Returns True for "pydoc" and for "pydoc:NAME"."""
    return name.partition(":")[0] == PYDOC


def expand(name: str) -> list[str]:
    """Splits "pydoc:NAME,NAME" into a name for each package; "pydoc" is unchanged.

    Raises:
      InputError: a package is not installed, or has no Python sources.
    """
    if name == PYDOC:
        return [name]
    names = [f"{PYDOC}:{package}" for package in name.removeprefix(f"{PYDOC}:").split(",")]
    for each in names:
        _sources(each)
    return names


def documents(name: str = PYDOC) -> Iterator[str]:
    """Yields a document for each module with docstrings, one paragraph a line.

    "pydoc" begins with a document for each help topic. A module's document is its docstring and those of its classes
    and functions, in the order of the source. Examples, underlines, tables, other text that does not look like prose,
    and duplicate paragraphs of a document are dropped, as are source files that this Python cannot parse. The order is
    deterministic: topics by name, modules by path.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics if name == PYDOC else {}
    for topic in sorted(topics):
        if document := _document([topics[topic]]):
            yield document
    for path in _sources(name):
        if document := _document(_docstrings(path)):
            yield document


def source_bytes(name: str = PYDOC) -> int:
    """Returns the bytes that `documents` reads, for progress bars."""
    return sum(path.stat().st_size for path in _sources(name))


def fingerprint(name: str = PYDOC) -> str:
    """Returns a string that changes with Python's version, and with any change to the sources of a package."""
    if name == PYDOC:
        return sys.version
    files = [(path, path.stat()) for path in _sources(name)]
    changes = [f"{path} {status.st_size} {status.st_mtime_ns}" for path, status in files]
    return f"{sys.version} {key_from(*changes):016x}"


def _sources(name: str) -> list[Path]:
    """Returns the source files, sorted by path. Raises InputError as `expand`."""
    if name == PYDOC:
        return _below(Path(sysconfig.get_path("stdlib")))
    package = name.removeprefix(f"{PYDOC}:")
    # A name with a dot is refused: to find a submodule, `find_spec` imports the package.
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None:
        raise InputError(
            f"--input={name}: package {package!r} is not installed; expected an import name without dots, such as "
            f"{PYDOC}:numpy"
        )
    if spec.submodule_search_locations is None:
        origin = Path(spec.origin or "")
        files = [origin] if origin.suffix == ".py" else []
    else:
        files = [path for folder in spec.submodule_search_locations for path in _below(Path(folder))]
    if not files:
        raise InputError(f"--input={name}: package {package!r} has no Python sources; expected one such as numpy")
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
