"""`bert-jax check`: on one device, on several, in two processes; and parts that fail."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import helpers, several
from support.devices import one_device  # noqa: F401

from bert_jax import cli, device_check
from bert_jax.device_check import FAILED, OK, PARTS, SKIPPED, check_devices
from bert_jax.errors import InputError

NOT_ON_CPU = {"attention": SKIPPED}


def parts(output: str) -> dict[str, dict[str, Any]]:
    content = json.loads(output)
    found = {part["name"]: part for part in content["parts"]}
    assert content["ok"] == all(part["status"] != FAILED for part in found.values())
    return found


def test_stopped_run_resumes_and_nothing_is_left(tmp_path: Path):
    words = ("check", "--only", "devices,resume,export", "--json", "--workdir", tmp_path)
    done = helpers.run_cli(*words, XLA_FLAGS="")  # optimized steps: there are many
    assert done.returncode == 0, done.stderr
    found = parts(done.stdout)
    assert {name: part["status"] for name, part in found.items()} == dict.fromkeys(("devices", "resume", "export"), OK)
    assert found["devices"]["values"]["count"] == 1
    assert found["resume"]["values"]["ended_by"] == "SIGKILL"
    assert 0 < found["resume"]["values"]["start_step"] <= 15
    assert found["resume"]["values"]["equal_arrays"] > 20
    assert not list(tmp_path.iterdir())


def test_unknown_part_is_refused(capsys: pytest.CaptureFixture):
    assert cli.main(["check", "--only", "devices,disk"]) == 2
    assert "--only=disk" in capsys.readouterr().err


def test_unwritable_workdir_fails_and_later_parts_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "file").touch()
    words = ["check", "--only", "train,storage,attention", "--workdir", str(tmp_path / "file")]
    assert cli.main(words) == 1
    output = capsys.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    assert [line[:2] for line in lines] == [["FAILED", "train"], ["skipped", "attention"], ["FAILED", "storage"]]
    assert str(tmp_path / "file") in output.out
    assert "train, storage" in output.err


@pytest.mark.long
@pytest.mark.usefixtures("one_device")
def test_a_resumed_run_that_differs_fails(monkeypatch: pytest.MonkeyPatch):
    rows = device_check._reproducible_rows

    def change_last_loss(workdir):
        found = rows(workdir)
        if workdir.name == "resumed":
            found[-1] |= {"mlm_loss": 0.0}
        return found

    monkeypatch.setattr(device_check, "STEPS", 18)
    monkeypatch.setattr(device_check, "_reproducible_rows", change_last_loss)
    found = {part.name: part for part in check_devices(only=["resume", "train"])}
    assert [*found] == ["train", "resume"]
    assert found["train"].status == OK
    assert found["resume"].status == FAILED
    assert "'mlm_loss': 0.0" in found["resume"].message


def test_difference_above_tolerance_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        device_check._Check,
        "_metrics",
        lambda _, devices=None, **overrides: np.ones((3, 2)) + (0.001 if devices else 0.0),
    )
    found = {part.name: part for part in check_devices(only=["cpu", "mesh"])}
    assert found["cpu"].status == FAILED
    assert "1.0e-03" in found["cpu"].message
    assert found["mesh"].status == OK


def test_a_signal_ends_it_and_leaves_no_folder(tmp_path: Path):
    command = helpers.command("check", "--workdir", tmp_path, "--only", "storage")
    process = helpers.child_processes.start(command, env=helpers.child_environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/storage")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert not list(tmp_path.iterdir())


def test_empty_workdir_is_refused():
    with pytest.raises(InputError, match="--workdir"):
        check_devices(workdir="")


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 8])
def test_every_part(devices: int):
    done = helpers.run_cli("check", "--json", devices=devices, timeout=900)
    assert done.returncode == 0, done.stderr
    found = parts(done.stdout)
    mesh = {} if devices > 1 else {"mesh": SKIPPED}
    assert {name: part["status"] for name, part in found.items()} == dict.fromkeys(PARTS, OK) | NOT_ON_CPU | mesh
    if devices > 1:
        assert set(found["mesh"]["values"]["differences"]) == {"fsdp=2", "fsdp=8", "tensor=2", "tensor=8"}
    assert found["storage"]["values"]["bytes"] > 256 << 20


@pytest.mark.long
def test_two_processes(tmp_path: Path):
    command = helpers.command("check", "--json", "--workdir", tmp_path, "--only", "devices,train,resume,export,mesh")
    several.finish(several.start_commands([command] * 2))
    assert not list(tmp_path.iterdir())


def test_two_processes_need_a_workdir():
    for stderr in several.finish(several.start_commands([helpers.command("check")] * 2), expect=2):
        assert "--workdir" in stderr
