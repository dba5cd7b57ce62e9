"""Provenance records: their keys, the commit of a clone, and entries of resumed runs."""

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from etils import epath

import bert_jax
from bert_jax.errors import InputError
from bert_jax.files import provenance


def test_an_entry_has_time_software_and_inputs():
    entry = provenance.record({"datasets": [{"path": "data", "hash": "0a"}]}, start_step=3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["time"])
    assert entry["software"]["bert_jax"] == bert_jax.__version__
    assert {name: entry["software"][name] for name in ("jax", "jaxlib", "flax", "optax", "numpy")} == {
        name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")
    }
    assert entry["inputs"] == {"datasets": [{"path": "data", "hash": "0a"}]}
    assert entry["start_step"] == 3
    assert "devices" not in entry


def test_commit_of_a_clone_and_whether_it_is_modified(tmp_path: Path):
    assert provenance.git_commit(tmp_path) == {}
    (tmp_path / "a.py").write_text("1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for arguments in (["init", "-q"], ["add", "a.py"], ["commit", "-qm", "First"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "output").write_text("untracked files do not count\n")
    clean = provenance.git_commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    (tmp_path / "a.py").write_text("2\n")
    assert provenance.git_commit(tmp_path) == {"commit": f"{clean['commit']}-dirty"}
    (tmp_path / "package").mkdir()  # installed in an environment that lies in the clone of something else
    assert provenance.git_commit(tmp_path / "package") == {}


def test_a_resumed_run_appends_an_entry(tmp_path: Path):
    folder = epath.Path(tmp_path)
    for number in range(2):
        provenance.append(folder, {"start_step": number})
    content = json.loads((tmp_path / provenance.FILE).read_text())
    assert content == {"format_version": 1, "runs": [{"start_step": 0}, {"start_step": 1}]}
    (tmp_path / provenance.FILE).write_text("{")
    with pytest.raises(InputError, match=provenance.FILE):
        provenance.append(folder, {"start_step": 2})
