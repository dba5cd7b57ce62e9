"""Stop signals: the first one is noted, the second one ends the process as it usually does."""

import os
import signal

import pytest

from bert_jax.runtime.preemption import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_has_its_usual_effect(number: signal.Signals):
    def usual(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, usual)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), number)
            assert stop.received is number
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
