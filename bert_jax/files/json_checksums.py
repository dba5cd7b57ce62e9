"""Checksums inside of JSON files and lines: a reader notices a changed bit of an object that carries its own checksum.

Files of earlier versions, and those that were written by hand, have none, and are read as they are.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from bert_jax.errors import InputError

KEY = "checksum"
"""The key of an object's checksum: 16 hex digits, of all other keys."""


def checksum(content: Mapping[str, Any]) -> str:
    """Returns the checksum of a JSON object: BLAKE2b of 8 bytes, independent of the order of keys."""
    plain = json.loads(json.dumps({name: value for name, value in content.items() if name != KEY}))
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with its checksum, as the last key."""
    return {**content, KEY: checksum(content)}


def is_intact(content: Mapping[str, Any]) -> bool:
    """Returns whether an object equals its checksum, or has none."""
    return KEY not in content or content[KEY] == checksum(content)


def checked(path: str | os.PathLike[str], content: Mapping[str, Any], advice: str) -> dict[str, Any]:
    """Returns an object without its checksum. InputError, with the file and `advice`, if it was changed."""
    if not is_intact(content):
        raise InputError(f"{os.fspath(path)}: damaged (checksum mismatch); {advice}")
    return {name: value for name, value in content.items() if name != KEY}
