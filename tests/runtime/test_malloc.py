"""A process that computes on a CPU keeps the memory that it frees."""

import subprocess
import sys

import pytest
from support import helpers

PROGRAM = """
import resource, sys
from bert_jax.runtime.interpreter import tune_malloc

if sys.argv[1] == "keep":
    tune_malloc()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (int(sys.argv[2]) << 20)  # freed at once
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
@pytest.mark.parametrize("megabytes", [64, pytest.param(2200, marks=pytest.mark.long)])
def test_reallocation_costs_no_page_faults(megabytes: int):
    def faults(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how, str(megabytes)]
        environment = helpers.child_environment()
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert faults("leave") > 1000  # of 16,384 pages, where they are 4 KB
    assert faults("keep") < 100
