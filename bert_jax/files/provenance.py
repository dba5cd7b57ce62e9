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

from bert_jax.files import remote
from bert_jax.files.format_versions import read_json, write_json
from bert_jax.version import __version__

FILE = "provenance.json"
FORMAT_VERSION = 1
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "libtpu")
HIDDEN = "***"

_NAME = r"(?:key|(?<!mask_)(?<!keep_)(?<!random_)token|secret|passw(?:or)?d|credentials?|signature|sig)(?:_id)?"
_SECRETS = re.compile(
    r"(://)[^/\s@]+(?=@)"  # user and password of an address
    rf"|([\w.?&;-]*{_NAME}=|--[\w.-]*{_NAME}\s+)[^\s&;]+"  # NAME=value, --NAME value
    r"|\b(?:hf_|gh[pousr]_|github_pat_|sk-|xox[abp]-|AKIA|ya29\.)[\w.-]{12,}",
    re.IGNORECASE,
)
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
    result: dict[str, Any] = redact({name: value for name, value in entry.items() if value is not None})
    return result


def write(folder: epath.Path, entry: Mapping[str, Any]) -> None:
    """Writes `folder/provenance.json` with one entry, atomically."""
    write_json(folder / FILE, {"format_version": FORMAT_VERSION, "runs": [entry]})


def append(folder: epath.Path, entry: Mapping[str, Any]) -> None:
    """Adds an entry to `folder/provenance.json`, atomically. Raises InputError for a file of a newer version."""
    path = folder / FILE
    entries = read_json(path, FORMAT_VERSION)["runs"] if remote.exists(path) else []
    write_json(path, {"format_version": FORMAT_VERSION, "runs": [*entries, entry]})


def utc(seconds: float) -> str:
    """Returns seconds since 1970 as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line(arguments: Sequence[str]) -> str:
    """Returns `sys.argv` as one line for a shell, without secrets."""
    program = Path(arguments[0]).name if arguments else ""
    name = "python -m bert_jax.cli" if program == "cli.py" else program
    result: str = redact(" ".join([name, *map(shlex.quote, arguments[1:])]))
    return result


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


def redact(value: Any) -> Any:
    """Replaces secrets in the texts of a JSON value by "***".

    Secrets are the user and password of an address, the value after a name that ends in key, token, secret, password,
    credentials or signature (NAME=value, --NAME value), and tokens with a known prefix such as `hf_`. The config keys
    `mask_token`, `keep_token` and `random_token` are none.
    """
    if isinstance(value, Mapping):
        return {name: redact(entry) for name, entry in value.items()}
    if isinstance(value, str):
        value = value.encode("utf-8", "backslashreplace").decode()  # a path may have bytes that are not UTF-8
        return _SECRETS.sub(lambda match: f"{match[1] or match[2] or ''}{HIDDEN}", value)
    return [redact(entry) for entry in value] if isinstance(value, list | tuple) else value
