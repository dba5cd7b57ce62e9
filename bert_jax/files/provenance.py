"""Provenance records: the software, command, inputs and devices that made a folder.

`provenance.json` is in a dataset, a workdir, an export and the workdir of a study:

    {"format_version": 1, "runs": [ENTRY, ...]}

Each run that wrote to the folder appended one entry, so a resumed run has several. A checkpoint has the entry of the
run that wrote it, in the item `provenance`. An entry has these keys; those that do not apply are absent:

time        the start of the run, in UTC: "2026-11-22T23:50:00Z"
command     the command line, without secrets
software    `bert_jax` (version), `commit` and `modified` if bert_jax runs from a clone of its repository, `python`, and
            the version of each installed package of `PACKAGES`
devices     of a run of a model: `platform`, `kind`, `count`, `processes`
inputs      the dataset's or checkpoint's path with its hash or digest, files with size and time; see the writers
start_step  of a training run: the steps done when it started or resumed

Values that look like secrets are replaced by "***", see `redact`. A search reads the digest of the parameters that
its trials started from, and an export that of its checkpoint.
"""

import functools
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax.files import atomic, json_checksums, remote
from bert_jax.files.format_versions import check_version
from bert_jax.version import __version__

log = logging.getLogger(__name__)

FILE = "provenance.json"
DAMAGED_FILE = "provenance.json.damaged"
FORMAT_VERSION = 1
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "libtpu")
HIDDEN = "***"

_SECRET = r"(?:api_?key|access_?key|secret|token|password|passwd|credentials?|signature|sig|key)"
_SECRET_NAME = re.compile(rf"(?:.*[._-])?{_SECRET}(?:_id)?", re.IGNORECASE)
_CONFIG_KEYS = ("mask_token", "keep_token", "random_token")  # shares of objective.*, not secrets
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_QUERY_SECRET = re.compile(rf"([?&;][^=&;\s]*{_SECRET}=)[^&;\s]+", re.IGNORECASE)
_KNOWN_TOKENS = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|xox[abp]-|AKIA|ya29\.)[\w.-]{12,}")
_GIT_SECONDS = 10


def record(inputs: Mapping[str, Any], *, devices: Mapping[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """Returns an entry for the present process. `inputs` and `values` are JSON; None values are dropped."""
    entry = {
        "time": utc(datetime.now(UTC).timestamp()),
        "command": command_line(sys.argv),
        "software": dict(software()),
        "devices": devices,
        "inputs": inputs,
        **values,
    }
    return redact({name: value for name, value in entry.items() if value is not None})


def write(folder: epath.Path, entry: Mapping[str, Any]) -> None:
    """Writes `folder/provenance.json` with one entry, atomically."""
    _write(folder, [entry])


def append(folder: epath.Path, entry: Mapping[str, Any]) -> None:
    """Adds an entry to `folder/provenance.json`, atomically. A damaged file is logged, and kept under another name.

    Raises InputError for a file of a newer version.
    """
    path = folder / FILE
    entries: list[Any] = []
    if remote.exists(path):
        try:
            found = atomic.read_whole(path)
            content = dict(json.loads(found))
            check_version(path, content, FORMAT_VERSION)
            if not json_checksums.is_intact(content):
                raise ValueError("checksum mismatch")
            entries = list(content["runs"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            atomic.write_whole(folder / DAMAGED_FILE, found)
            log.warning("%s: damaged (%s); kept as %s, and written anew without its entries", path, error, DAMAGED_FILE)
    _write(folder, [*entries, entry])


def _write(folder: epath.Path, entries: Sequence[Mapping[str, Any]]) -> None:
    content = json_checksums.with_checksum({"format_version": FORMAT_VERSION, "runs": list(entries)})
    atomic.write_whole(folder / FILE, (json.dumps(content, indent=2) + "\n").encode())


def utc(seconds: float) -> str:
    """Returns seconds since 1970 as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line(arguments: Sequence[str]) -> str:
    """Returns `sys.argv` as one line for a shell, without secrets."""
    program = Path(arguments[0]).name if arguments else ""
    name = "python -m bert_jax.cli" if program == "cli.py" else program
    return " ".join([name, *map(shlex.quote, _redact_words(arguments[1:]))])


@functools.cache
def software() -> Mapping[str, Any]:
    """Returns the versions of bert_jax, Python and `PACKAGES`, and the commit of a clone."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "bert_jax": __version__,
        **git_commit(Path(__file__).parents[2]),
        "python": platform.python_version(),
        **versions,
    }


def git_commit(clone: Path) -> dict[str, Any]:
    """Returns `commit` and `modified` (tracked files differ from it); {} without a clone or without git."""
    if not (clone / ".git").exists():
        return {}

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", os.fspath(clone), *arguments], env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True,
        ).stdout.strip()  # fmt: skip

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


# --- Secrets ---------------------------------------------------------------------------------------------------------


def redact(value: Any) -> Any:
    """Replaces secrets in a JSON value by "***".

    Secrets are the user and password of a URL, values of a URL's query or of a key whose name ends in key, token,
    secret, password, credentials or signature, and tokens with a known prefix such as `hf_`. The config keys
    `mask_token`, `keep_token` and `random_token` are none.
    """
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if isinstance(entry, str) and _is_secret(name) else redact(entry)
            for name, entry in value.items()
        }
    if isinstance(value, str):
        value = value.encode("utf-8", "backslashreplace").decode()  # a path may have bytes that are not UTF-8
        value = _QUERY_SECRET.sub(rf"\g<1>{HIDDEN}", _URL_CREDENTIALS.sub(HIDDEN, value))
        return _KNOWN_TOKENS.sub(HIDDEN, value)
    return [redact(entry) for entry in value] if isinstance(value, list | tuple) else value


def _is_secret(name: str) -> bool:
    last = name.lstrip("-").rpartition(".")[2].replace("-", "_")
    return bool(_SECRET_NAME.fullmatch(last)) and last not in _CONFIG_KEYS


def _redact_words(words: Sequence[str]) -> list[str]:
    """Redacts the words of a command: values after a secret's NAME (`--NAME=`, `NAME=`, `--NAME `), and URLs."""
    result: list[str] = []
    is_value = False  # of the option before
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value and not word.startswith("-"):
            result.append(HIDDEN)
            is_value = False
            continue
        has_secret_name = re.fullmatch(r"-{0,2}[\w.-]+", name) is not None and _is_secret(name)
        result.append(f"{name}={HIDDEN}" if equals and has_secret_name else redact(word))
        is_value = word.startswith("--") and has_secret_name and not equals
    return result
