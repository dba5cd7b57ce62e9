"""Log that progress bars hide, and number of cores that a process may use."""

import logging
import os
from contextlib import suppress

import pytest

from bert_jax.progress import available_cores, quiet


@pytest.mark.parametrize(("disabled", "within"), [(logging.NOTSET, logging.WARNING), (logging.ERROR, logging.ERROR)])
def test_the_callers_setting_of_the_log_stays(disabled: int, within: int):
    before = logging.root.manager.disable
    logging.disable(disabled)
    try:
        with suppress(KeyError), quiet():
            assert logging.root.manager.disable == within
            raise KeyError
        assert logging.root.manager.disable == disabled
    finally:
        logging.disable(before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_cores_are_those_that_the_process_may_use():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
