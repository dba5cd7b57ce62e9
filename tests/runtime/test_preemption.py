"""Stop signals: the first one is noted, a second SIGTERM or SIGINT ends the process as it usually does."""

import os
import signal
from contextlib import nullcontext

import pytest

from bert_jax.runtime.interpreter import SIGNALS, StopSignal


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_sigterm_or_sigint_has_its_usual_effect(first: signal.Signals, second: signal.Signals):
    """SIGHUP has none: systemd sends it right after SIGTERM when a session ends, and the state is being saved."""

    def usual(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, usual) for number in SIGNALS}
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), first)
            ends = second in (signal.SIGTERM, signal.SIGINT)
            with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
                os.kill(os.getpid(), second)
            assert stop.received is first
        assert [signal.getsignal(number) for number in SIGNALS] == [usual] * len(SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
