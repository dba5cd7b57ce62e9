"""Named sets of compiler flags: libtpu knows each flag, and an unknown set is refused."""

import re
import subprocess
import sys

import pytest
from support.helpers import REPOSITORY

SCRIPT = REPOSITORY / "launch" / "xla_flags.sh"
SETS = ("async_all_gather", "async_all_reduce", "data_parallel", "sparse_core")


def printed(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)


def test_the_script_names_its_sets():
    for arguments in ((), ("async",), ("flags",), ("data_parallel", "async_all_gather")):
        done = printed(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.findall(r"\w+_\w+(?=[|\n])", done.stderr) == list(SETS)


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_one_line_of_flags(name: str):
    done = printed(name)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert all(re.fullmatch(r"--xla_\w+=(true|false|\d+)", flag) for flag in done.stdout.split())
    assert subprocess.check_output(["sh", SCRIPT, name], text=True) == done.stdout


OPEN = """
import os, sys
os.environ["LIBTPU_INIT_ARGS"] = sys.argv[1]
from bert_jax.ahead_of_time.compiled_step import open_target
open_target("v5e:2x2")
"""


@pytest.mark.long
def test_libtpu_knows_every_flag():
    pytest.importorskip("libtpu", reason="needs the tpu-aot extra")
    flags = " ".join(printed(name).stdout.strip() for name in SETS)
    for arguments, is_known in ((flags, True), (f"{flags} --xla_tpu_no_such_flag=true", False)):
        done = subprocess.run([sys.executable, "-c", OPEN, arguments], capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == is_known, done.stderr[-500:]
