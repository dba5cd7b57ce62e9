"""A file of compiled programs, which later runs load instead of compiling them.

A ZIP archive: `header.json`, and under each program's digest its executable. The header says for which devices, by
which versions and from which settings a program was compiled. It is compared before anything else is read.

An executable is serialized with `jax.experimental.serialize_executable`, which unpickles it: whoever can write the file
can make its readers run code.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import serialize_executable

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.runtime.compilation_cache import cpu_kind
from bert_jax.version import __version__

log = logging.getLogger(__name__)

FORMAT = 1
HEADER = "header.json"

_COMPILER_OPTIONS = (  # of JAX, which are passed on to XLA
    "jax_optimization_level", "jax_memory_fitting_level", "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort", "jax_disable_most_optimizations",
)  # fmt: skip
_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_")
_SOURCE_LINES = "jax_traceback_in_locations_limit"
_SHOWN = 4
"""Differences that a message names."""


@dataclass(frozen=True)
class Program:
    """A program, lowered and compiled, with the settings that made it: by name, as JSON has them."""

    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    devices: Sequence[Any]
    settings: Mapping[str, Any]


def describe_environment(devices: Sequence[Any]) -> dict[str, Any]:
    """Returns what an executable depends on beside its program: versions, devices in order, flags of the compiler.

    Executables of a CPU also depend on its kind. `devices` may be those of a topology.
    """
    platform = devices[0].platform
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if platform == "tpu":
        versions["libtpu"] = importlib.metadata.version("libtpu")
    elif platform == "gpu":
        versions["platform_version"] = devices[0].client.platform_version
    flags = [flag for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") for flag in os.environ.get(name, "").split()]
    flags += [f"{name}={jax.config.values[name]}" for name in _COMPILER_OPTIONS if jax.config.values.get(name)]
    return {
        **versions,
        "platform": platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": len({device.process_index for device in devices}),
        "device_ids": [device.id for device in devices],
        "flags": sorted(flag for flag in flags if not flag.startswith(_HARMLESS_FLAGS)),
        **({"cpu": cpu_kind()} if platform == "cpu" else {}),
    }


@contextlib.contextmanager
def without_source_lines() -> Iterator[None]:
    """Lowers programs without the lines of their source, so that `digest` is the same wherever bert_jax is installed.

    The text of a program has no such lines, but the encoded kernels in it have, with the paths of their files. It is a
    setting of the process: only one thread may use it at a time.
    """
    before = jax.config.values[_SOURCE_LINES]
    jax.config.update(_SOURCE_LINES, 0)
    try:
        yield
    finally:
        jax.config.update(_SOURCE_LINES, before)


def digest(lowered: jax.stages.Lowered) -> str:
    """Returns a digest of a program: its StableHLO with shardings and donations, and the names of its arguments.

    Lower it in `without_source_lines`.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(lowered.args_info)]
    return hashlib.sha256("\n".join([*names, lowered.as_text()]).encode()).hexdigest()


def write_programs(path: str, programs: Sequence[Program]) -> int:
    """Writes the file atomically; equal programs are written once. Returns its size in bytes."""
    entries, executables = [], {}
    for program in programs:
        name = digest(program.lowered)
        environment = describe_environment(program.devices)
        entries.append({"digest": name, "environment": environment, "settings": dict(program.settings)})
        executables[name], *_ = serialize_executable.serialize(program.compiled)
    header = {"format": FORMAT, "bert_jax": __version__, "programs": entries}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(HEADER, json.dumps(header, indent=1))
        for name, executable in executables.items():
            archive.writestr(name, executable)
    atomic.write_whole(remote.absolute(path), content.getvalue())
    return len(content.getvalue())


def _check_header(header: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for a header of this format that lacks an entry."""
    if header["format"] == FORMAT:
        _ = header["bert_jax"]
        for entry in header["programs"]:
            _ = entry["digest"], dict(entry["environment"]), dict(entry["settings"])


class SavedPrograms:
    """The programs of a file. `key` names it in messages, such as `compiled=FILE`."""

    def __init__(self, key: str, content: bytes):
        self.key = key
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(content))
            self.header: dict[str, Any] = json.loads(self._archive.read(HEADER))
            version = self.header["format"]
            _check_header(self.header)
        except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{key}: expected a file that `bert-jax compile --output` wrote, got another") from error
        if version != FORMAT:
            raise InputError(f"{key}: has format {version}, expected {FORMAT}; run `bert-jax compile --output` again")

    @classmethod
    def open(cls, key: str, path: str) -> "SavedPrograms":
        """Reads the file. Raises InputError if it does not exist or is not such a file."""
        file = remote.absolute(path)
        try:
            return cls(key, atomic.read_whole(file))
        except FileNotFoundError as error:
            raise InputError(f"{key}: file not found; write it with `bert-jax compile --output`") from error
        except IsADirectoryError as error:
            raise InputError(f"{key}: is a folder; expected a file of `bert-jax compile --output`") from error

    def load(
        self, lowered: jax.stages.Lowered, devices: Sequence[Any], settings: Mapping[str, Any]
    ) -> tuple[jax.stages.Compiled | None, str]:
        """Loads the executable of a program. Returns None, and the reason, if the file has none that fits.

        Args:
          lowered: the program.
          devices: those of its mesh, in order.
          settings: see `Program`; they only explain why no program fits.
        """
        environment, name = describe_environment(devices), digest(lowered)
        for entry in self.header["programs"]:
            if entry["digest"] == name and entry["environment"] == environment:
                try:
                    return self._load(name, lowered, devices), ""
                except Exception as error:  # of pickle, XLA or the device's driver
                    first = f"{error}".strip().split("\n")[0]
                    return None, f"its executable cannot be loaded ({type(error).__name__}: {first})"
        return None, self._explain(environment, settings)

    def _load(self, name: str, lowered: jax.stages.Lowered, devices: Sequence[Any]) -> jax.stages.Compiled:
        return serialize_executable.deserialize_and_load(
            self._archive.read(name), lowered.in_tree, lowered.out_tree, backend=devices[0].client,
            execution_devices=devices,
        )  # fmt: skip

    def _explain(self, environment: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Names the differences from the most similar program."""
        here = {**environment, **json.loads(json.dumps(dict(settings)))}

        def differences(entry: Mapping[str, Any]) -> list[str]:
            there = {**entry["environment"], **entry["settings"]}
            return [
                f"{name} {there.get(name)!r:.80}, here {here.get(name)!r:.80}" for name in {**there, **here}
                if there.get(name) != here.get(name)
            ]  # fmt: skip

        found = min(map(differences, self.header["programs"]), key=len, default=["no program"])
        if not found:
            return (
                f"the code of the step or a setting of JAX (JAX_...) differs: it was compiled by bert_jax "
                f"{self.header['bert_jax']}, here is {__version__}"
            )
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"it was compiled with {'; '.join(found[:_SHOWN])}{more}"
