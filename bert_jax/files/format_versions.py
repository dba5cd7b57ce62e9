"""Versions of the JSON files that this package writes: one that is newer than known is refused with the way out."""

import os
from collections.abc import Mapping
from typing import Any

from bert_jax.errors import InputError

KEY = "format_version"


def check_version(path: str | os.PathLike[str], content: Mapping[str, Any], newest: int) -> None:
    """Raises InputError if `format_version` of a file is newer than `newest`; a file without it has version 1."""
    if not isinstance(content, Mapping):
        raise InputError(f"{os.fspath(path)}: expected a JSON object, got {type(content).__name__}")
    version = content.get(KEY, 1)
    if type(version) is not int or not 1 <= version <= newest:
        raise InputError(
            f"{os.fspath(path)}: {KEY}={version!r:.40}: expected at most {newest}; install the version of bert_jax "
            "that wrote it"
        )
