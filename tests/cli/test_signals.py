import signal

import pytest

from recurl.cli.signals import StopOnSignal


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_first_signal_is_noted_and_handlers_come_back(number, code):
    before = signal.signal(number, signal.SIG_DFL)  # ignored in background jobs and under nohup
    try:
        with StopOnSignal() as stop:
            assert (stop.requested(), stop.exit_code) == (False, 0)
            signal.raise_signal(number)
            assert (stop.requested(), stop.exit_code) == (True, code)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_second_ctrl_c_interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    try:
        with StopOnSignal():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_hang_up_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopOnSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested()
    finally:
        signal.signal(signal.SIGHUP, before)
