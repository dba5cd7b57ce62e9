"""Stop signals: the first one is noted, the second one ends the process as it usually does."""

import os
import signal

import pytest

from bert_jax.runtime.interpreter import SIGNALS, StopSignal


@pytest.mark.parametrize("number", SIGNALS)
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


def test_an_ignored_hangup_stays_ignored():
    """Simulates nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
