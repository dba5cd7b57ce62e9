"""`bert-jax check`: on one device, on several, in two processes; and parts that fail."""

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import child_processes, helpers, several
from support.devices import one_device  # noqa: F401

from bert_jax import cli, device_check
from bert_jax.device_check import check_devices
from bert_jax.errors import InputError

PARTS = ("devices", "train", "resume", "agree")


def test_every_part_passes_and_nothing_is_left(tmp_path: Path):
    done = helpers.run_cli("check", "--json", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert tuple(found) == PARTS
    assert "count 1" in found["devices"]
    assert not list(tmp_path.iterdir())


def test_unwritable_workdir_fails_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "file").touch()
    assert cli.main(["check", "--workdir", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err.splitlines()[-1]


def agree(monkeypatch: pytest.MonkeyPatch, changed: str) -> str:
    """Runs `agree` on eight devices whose losses differ by 0.001 in one of the comparisons."""

    def first_losses(config, overrides, devices=None):
        name = "cpu" if devices else next(iter(overrides), "")
        return np.ones(3) + (0.001 if name == changed else 0.0)

    monkeypatch.setattr(device_check, "_first_losses", first_losses)
    return device_check.agree(None, None)


def test_difference_above_tolerance_fails(monkeypatch: pytest.MonkeyPatch):
    assert "cpu 0.0e+00, mesh.fsdp=8 0.0e+00, mesh.tensor=8 0.0e+00" in agree(monkeypatch, "nothing")
    for name in ("cpu", "mesh.fsdp", "mesh.tensor"):
        with pytest.raises(device_check.BertJaxError, match=rf"{name}.*1\.0e-03"):
            agree(monkeypatch, name)


@pytest.mark.long
def test_a_signal_ends_it_and_leaves_no_folder(tmp_path: Path):
    command = helpers.command("check", "--workdir", tmp_path)
    process = child_processes.start(command, env=helpers.child_environment(), stderr=subprocess.PIPE, text=True)
    child_processes.wait_until(lambda: list(tmp_path.glob("*/run/config.json")), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (75, 130), stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_two_processes(tmp_path: Path):
    several.finish(several.start_commands([helpers.command("check", "--json", "--workdir", tmp_path)] * 2))
    assert not list(tmp_path.iterdir())


def test_two_processes_need_a_workdir(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_check, "joined", lambda: (0, 2))
    with pytest.raises(InputError, match="workdir: required"):
        check_devices()
