"""Provenance records: the software, inputs and devices that made a folder.

`provenance.json` is in a dataset, a workdir of a run and an export:

    {"format_version": 1, "runs": [ENTRY, ...]}

Each run that wrote to the folder appended one entry, so a resumed run has several. A checkpoint has the entry of the
run that wrote it, in the item `provenance`. An entry has these keys; those that do not apply are absent:

time        the start of the run, in UTC: "2026-11-22T23:50:00Z"
software    `bert_jax` (version), `commit` if bert_jax runs from a clone of its repository, `python`, and the version of
            each installed package of `PACKAGES`
devices     of a run of a model: `platform`, `kind`, `count`, `processes`
inputs      the dataset's or checkpoint's path with its hash or digest, files with size; see the writers
start_step  of a training run: the steps done when it started or resumed

A search reads the digest of the parameters that its trials started from. The command line is not recorded: it may have
secrets, and the settings are in the config of a run and in the record of a dataset.
"""

import functools
import platform
import shlex
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax.files import remote
from bert_jax.files.atomic import read_json, write_json
from bert_jax.version import __version__

FILE = "provenance.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "libtpu")


def record(inputs: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Returns an entry for the present process. `inputs` and `values` are JSON; None values are dropped."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    known = {name: value for name, value in values.items() if value is not None}
    return {"time": started, "software": software(), **known, "inputs": inputs}


def append(folder: epath.Path, entry: Mapping[str, Any]) -> None:
    """Adds an entry to `folder/provenance.json`, atomically. Raises InputError for a file of a newer version."""
    path = folder / FILE
    entries = read_json(path)["runs"] if remote.exists(path) else []
    write_json(path, {"format_version": 1, "runs": [*entries, entry]})


@functools.cache
def software() -> Mapping[str, str]:
    """Returns the versions of bert_jax, Python and `PACKAGES`, and the commit of a clone."""
    found = {name: [*metadata.distributions(name=name)] for name in PACKAGES}
    versions = {name: installed[0].version for name, installed in found.items() if installed}
    own = {"bert_jax": __version__, **git_commit(Path(__file__).parents[2])}
    return {**own, "python": platform.python_version(), **versions}


def git_commit(clone: Path) -> dict[str, str]:
    """Returns `commit`, with "-dirty" if tracked files differ from it; {} without a clone or without git."""
    command = shlex.split("git --no-optional-locks --git-dir=.git describe --always --exclude=* --abbrev=40 --dirty")
    try:
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": done.stdout.strip()}
