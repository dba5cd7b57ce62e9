"""JSON files that this package writes: each has a `format_version`, and a newer one is refused with the way out."""

import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic


def check_version(path: str | os.PathLike[str], content: Mapping[str, Any], newest: int) -> None:
    """Raises InputError if `format_version` of a file is newer than `newest`; a file without it has version 1."""
    if not isinstance(content, Mapping):
        raise InputError(f"{os.fspath(path)}: expected a JSON object, got {type(content).__name__}")
    version = content.get("format_version", 1)
    if type(version) is not int or not 1 <= version <= newest:
        name = f"{os.fspath(path)}: format_version={version!r:.40}"
        raise InputError(f"{name}: expected at most {newest}; install the version of bert_jax that wrote it")


def read_json(path: epath.Path, newest: int = 1) -> dict[str, Any]:
    """Reads a JSON object. Raises InputError for one that is damaged or of a newer version."""
    try:
        content: dict[str, Any] = json.loads(atomic.read_whole(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged: no JSON ({error!s:.200}); write it again") from error
    check_version(path, content, newest)
    return content


def write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object atomically."""
    atomic.write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
