"""Temporary files of processes that were killed during an atomic write, and who deletes them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import child_processes

from bert_jax.files import atomic

UNFINISHED = """
import signal, sys
from bert_jax.files.atomic import whole_file
with whole_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("written", flush=True)
    signal.pause()
"""


@pytest.fixture
def unfinished(tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    """Two processes that write `lines.jsonl` and never finish."""
    command = [sys.executable, "-c", UNFINISHED, str(tmp_path / "lines.jsonl")]
    processes = [child_processes.start(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_the_next_write_deletes_what_a_killed_one_left_and_nothing_else(unfinished, tmp_path: Path):
    before = {path.name for path in tmp_path.iterdir()}
    assert len(before) == 2
    unfinished[0].kill()
    unfinished[0].wait()
    others = ("lines.jsonl.partial", "lines.jsonl.0123abcd.part", "other.jsonl.0123abcd.partial")
    for name in others:
        (tmp_path / name).write_text("somebody else's")
    (tmp_path / "lines.jsonl.01234567.partial").mkdir()
    atomic.write_whole(tmp_path / "lines.jsonl", b"whole")
    left = {path.name for path in tmp_path.iterdir()} - {*others, "lines.jsonl", "lines.jsonl.01234567.partial"}
    assert len(left) == 1, "that of the process that still writes"
    assert left < before
    assert all((tmp_path / name).exists() for name in (*others, "lines.jsonl.01234567.partial"))
    assert (tmp_path / "lines.jsonl").read_bytes() == b"whole"


def test_a_write_without_leftovers_leaves_the_file_alone(tmp_path: Path):
    for content in (b"one", b"two"):
        atomic.write_whole(tmp_path / "file", content)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_bytes() == content
