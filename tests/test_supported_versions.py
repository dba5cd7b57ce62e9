"""The ranges of other packages' versions: held at import, by pip, and by the versions that the tests ran with."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import helpers

from bert_jax.supported_versions import CHECKED_AT_IMPORT, REQUIREMENTS

REPOSITORY = helpers.REPOSITORY
RANGES = {requirement.name: requirement.specifier for requirement in map(Requirement, REQUIREMENTS)}


def import_beside(
    folder: Path, name: str, version: str, program: str = "import bert_jax"
) -> subprocess.CompletedProcess:
    """Runs `program` where the first package `name` on the path says that it is of `version`."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_import_refuses_a_version_below_the_range(tmp_path: Path):
    result = import_beside(tmp_path, "jax", "0.9.2")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: jax 0.9.2 ")
    assert last.endswith("pip install 'jax>=0.10,<0.13'")


def test_import_warns_once_above_the_range(tmp_path: Path):
    result = import_beside(tmp_path, "orbax-checkpoint", "0.13.0.dev1", "import bert_jax; import bert_jax.errors")
    assert result.returncode == 0
    [line] = [line for line in result.stderr.splitlines() if "orbax-checkpoint" in line]
    assert "<string>:1: UserWarning: orbax-checkpoint 0.13.0.dev1 " in line
    assert line.endswith("pip install 'orbax-checkpoint>=0.11.30,<0.13'")


def test_import_is_silent_and_does_not_wait_for_jax(tmp_path: Path):
    program = "import sys, bert_jax; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    result = import_beside(tmp_path, "jax", "0.10.0", program)
    assert (result.returncode, result.stderr) == (0, "")


def test_setup_has_the_same_ranges(monkeypatch: pytest.MonkeyPatch):
    arguments = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: arguments.update(given))
    runpy.run_path(str(REPOSITORY / "setup.py"))
    assert arguments["install_requires"] == list(REQUIREMENTS)
    assert set(CHECKED_AT_IMPORT) <= set(RANGES)


@pytest.mark.parametrize("name", ["py311", "py313", "lowest"])
def test_what_the_tests_ran_with_is_in_range(name: str):
    lines = (REPOSITORY / "constraints" / f"{name}.txt").read_text().splitlines()
    pinned = {line.name.replace("_", "-"): line.specifier for line in map(Requirement, lines)}
    for package, allowed in RANGES.items():
        [pin] = pinned[package.replace("_", "-")]
        assert pin.operator == "=="
        assert pin.version in allowed, package
        if name == "lowest" and allowed:
            [least] = [bound.version for bound in allowed if bound.operator == ">="]
            assert Requirement(f"{package}=={least}").specifier.contains(pin.version), package
