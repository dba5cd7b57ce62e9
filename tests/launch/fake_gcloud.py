#!/usr/bin/env python3
"""`gcloud` for tests of launch/tpu_pod.sh: keeps queued resources in $FAKE_CLOUD, where each host is a home folder.

What is sent over ssh really runs, with that home. Files there say how the cloud behaves:

state          the queued resource's state; there is none before `create` and after `delete`
states         lines: what `describe` answers after a `create`, one a call, before ACTIVE (or before the last of them)
node_state     the nodes' state, if not READY
calls          every call, as JSON
broken_gcloud  if it is there, every call fails
buckets/NAME   a bucket, a folder; one that is not to be written to holds `.read_only`
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

cloud = Path(os.environ["FAKE_CLOUD"])
words = [word for word in sys.argv[1:] if not word.startswith("--")]
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
with (cloud / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\n")
if (cloud / "broken_gcloud").exists():
    sys.exit("ERROR: (gcloud) There was a problem refreshing your current auth tokens")


def answer(text: str) -> None:
    print(text)
    sys.exit(0)


def storage(verb: str, *places: str) -> None:
    """As `gcloud storage`: ls lists what begins so, cp writes what is on stdin, rm deletes."""
    bucket, _, name = places[-1].removeprefix("gs://").partition("/")
    folder = cloud / "buckets" / bucket
    path = folder / name
    if not folder.is_dir():
        sys.exit(f"ERROR: (gcloud.storage.{verb}) gs://{bucket} not found: 404.")
    match verb:
        case "ls" if not path.exists():
            sys.exit("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.")
        case "cp" if (folder / ".read_only").exists():
            sys.exit("ERROR: (gcloud.storage.cp) does not have storage.objects.create access")
        case "cp":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sys.stdin.buffer.read())
        case "rm":
            path.unlink()
    sys.exit(0)


def is_held(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def not_found() -> None:
    print(f"ERROR: (gcloud.compute.tpus.{kind}.{verb}) NOT_FOUND: Resource '{name}' was not found", file=sys.stderr)
    sys.exit(1)


if words[0] == "storage":
    storage(*words[1:])
assert words[:2] == ["compute", "tpus"], words
kind, verb, name = words[2:]
state, states = cloud / "state", cloud / "states"
match kind, verb:
    case "queued-resources", "create":
        assert not state.exists(), "is there already"
        state.write_text("ACTIVE")
        for host in range(int(options.get("node-count") or 1) * 2):
            (cloud / f"host{host}").mkdir()
    case "queued-resources", "delete":
        assert "force" in options
        if not state.exists():
            not_found()
        state.unlink()
        (cloud / "node_state").unlink(missing_ok=True)
        for home in cloud.glob("host*"):
            for lock in home.glob("bert_jax_runs/*/lock"):
                if is_held(lock):  # then the process whose number is there is the run's
                    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                        os.killpg(os.getpgid(int((lock.parent / "pid").read_text())), signal.SIGKILL)
            shutil.rmtree(home)
    case "queued-resources", "describe":
        if not state.exists():
            not_found()
        first, _, rest = states.read_text().partition("\n") if states.exists() else ("", "", "")
        if first:
            states.write_text(rest)
            answer(first)
        answer(state.read_text())
    case "tpu-vm", "describe":
        node_state = cloud / "node_state"
        answer(node_state.read_text() if node_state.exists() else "READY")
    case "queued-resources", "ssh":
        homes = sorted(cloud.glob("host*"))
        if options["worker"] == "0":
            homes = homes[:1]
        failed = [
            subprocess.run(
                ["bash", "-c", options["command"]], cwd=home, env={**os.environ, "HOME": str(home)}, check=False
            ).returncode
            for home in homes
        ]
        sys.exit(any(failed))
    case _:
        sys.exit(f"unknown: {words}")
