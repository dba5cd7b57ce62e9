"""Lists local files below folders and by glob patterns, and finds similar names."""

import difflib
import glob
import itertools
import os
import re
from pathlib import Path


def similar_name(path: str | os.PathLike[str]) -> str:
    """Returns " (did you mean NAME?)" with the most similar path that exists; "" if none, or if `path` is remote.

    Searches the folder in which the path stops to exist.
    """
    if "://" in os.fspath(path):
        return ""
    missing = Path(path)
    while not missing.parent.exists():
        missing = missing.parent
    try:
        names = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(missing.name, names, 1) if not missing.exists() else []
    return f" (did you mean {missing.parent / close[0]}?)" if close else ""


def files_below(folder: str) -> list[str]:
    """Returns every file below a folder, sorted; links to folders are followed, and each real folder is read once.

    Names that begin with a dot are skipped, as in shell patterns.
    """
    files: list[str] = []
    seen: set[str] = set()
    for path, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(path)) in seen:
            folders.clear()
            continue
        seen.add(real)
        # Real folders come before links, so that a folder keeps its own name.
        folders[:] = sorted(
            (name for name in folders if not name.startswith(".")),
            key=lambda name: (os.path.islink(os.path.join(path, name)), name),
        )
        files += [os.path.join(path, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if os.path.isfile(file))


def matches(pattern: str) -> list[str]:
    """Returns the files that a glob pattern matches, sorted, with all files below matching folders.

    `**` matches any number of folders, each real one once. `glob` follows a link to a parent folder 40 times.
    """
    if "**" not in Path(pattern).parts:
        found = glob.glob(pattern)
        return sorted({file for match in found for file in (files_below(match) if os.path.isdir(match) else [match])})
    from fsspec.utils import glob_translate  # not at the top: `bert-jax --help` does not wait for it

    top = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    known = re.compile(glob_translate(os.path.normpath(pattern)))
    files = [Path(file) for file in files_below(str(top))]
    return [str(file) for file in files if any(known.match(str(path)) for path in (file, *file.parents))]
