"""Digests of an exported folder, in its provenance record: an import names the files that have changed since.

Weights of `transformers` have no checksum of their own. A folder may be trained further and saved again by other
software, so that a difference is a warning.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.interop.weight_files import read_json

log = logging.getLogger(__name__)


def file_digests(folder: Path, skipped: tuple[str, ...]) -> dict[str, str]:
    """Returns the SHA-256 of each file of a local folder, by its name, without those `skipped`."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.name not in skipped}


def warn_of_changes(folder: epath.Path) -> None:
    """Logs a warning with the files that differ from the folder's record; does nothing for remote or other folders."""
    record = folder / provenance.FILE
    if remote.is_remote(folder) or not record.exists():
        return
    try:
        entry: Any = read_json(record)["runs"][-1]
        expected = dict(entry["files"])
    except (InputError, KeyError, IndexError, TypeError, ValueError) as error:
        log.info("%s has no digests of the files beside it (%s); they are not verified", record, error)
        return
    if changed := _changed(Path(folder), expected):
        log.warning(
            "%s: %s changed since bert-jax exported the folder; if nothing has written to it since, it is damaged: "
            "export it again",
            folder, ", ".join(changed),
        )  # fmt: skip


def _changed(folder: Path, expected: Mapping[str, Any]) -> list[str]:
    return [name for name in expected if (folder / name).is_file() and _digest(folder / name) != expected[name]]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
