"""Lists local files below folders and by glob patterns; symbolic links are followed, and cycles are detected."""

import difflib
import glob
import os
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


def files_below(folder: Path) -> list[str]:
    """Returns every file below a folder, sorted; links to folders are followed, and each real folder is read once.

    Names that begin with a dot are skipped, as in shell patterns.
    """
    files: list[str] = []
    for found in _folders(folder):
        files += [str(entry) for entry in _shown(found) if entry.is_file()]
    return sorted(files)


def matches(pattern: str) -> list[str]:
    """Returns the files that a glob pattern matches, sorted, with all files below matching folders.

    `**` matches any number of folders and reads each real folder once. `glob` follows a link to a parent folder 40
    times, and two of them endlessly.
    """
    found: set[str] = set()
    for match in _expanded(pattern):
        if match.is_dir():
            found.update(files_below(match))
        else:
            found.add(str(match))
    return sorted(found)


def _expanded(pattern: str) -> list[Path]:
    parts = Path(pattern).parts
    if "**" not in parts:
        return [Path(match) for match in glob.glob(pattern)]
    at = parts.index("**")
    folders: list[Path] = []
    for top in _expanded(str(Path(*parts[:at]))) if at else [Path()]:
        folders += _folders(top) if top.is_dir() else []
    if not parts[at + 1 :]:
        return folders
    return [match for folder in folders for match in _expanded(str(Path(glob.escape(str(folder)), *parts[at + 1 :])))]


def _folders(top: Path) -> list[Path]:
    """Returns a folder and all folders below it, each real folder once."""
    folders: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.append(folder)
        below = [entry for entry in _shown(folder) if entry.is_dir()]
        # Real folders come before links, so that a folder keeps its own name.
        waiting += sorted(below, key=lambda entry: (entry.is_symlink(), entry.name), reverse=True)
    return folders


def _shown(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
