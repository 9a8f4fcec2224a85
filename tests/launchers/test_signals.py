"""What a launching process does with signals."""

from __future__ import annotations

import math
import signal
import time
from typing import Any

import pytest

from drivetrain import Trainer
from drivetrain.launchers.signals import forwarding, without_interrupts


@pytest.mark.parametrize("seconds", [5.0, 600.0, math.inf])
def test_the_ranks_have_stop_timeout_s_from_the_first_signal_on(seconds: float) -> None:
    passed_on: list[int] = []
    with forwarding(passed_on.append, seconds) as sent:
        assert sent.deadline == math.inf  # none so far
        before = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        assert before + seconds <= sent.deadline <= time.monotonic() + seconds
        assert sent.number == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)  # a second one: they end at once
        assert sent.deadline < time.monotonic() + 11
        deadline = sent.deadline
        signal.raise_signal(signal.SIGINT)
        assert sent.deadline == deadline  # which no signal puts off
    assert passed_on == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
    assert sent.number == signal.SIGTERM


def test_other_signals_set_no_deadline() -> None:
    passed_on: list[int] = []
    with forwarding(passed_on.append, 600) as sent:
        signal.raise_signal(signal.SIGUSR1)
    assert (passed_on, sent.number, sent.deadline) == ([signal.SIGUSR1], None, math.inf)


def test_a_handler_of_the_users_for_sigterm_is_called_before_the_ranks_are_asked_to_end() -> None:
    calls: list[object] = []

    def own(number: int, frame: object) -> None:
        calls.append("the user's")

    known = signal.signal(signal.SIGTERM, own)
    try:
        with forwarding(calls.append, 600) as sent:
            signal.raise_signal(signal.SIGTERM)
        assert calls == ["the user's", signal.SIGTERM]
        assert (sent.number, sent.deadline < math.inf) == (signal.SIGTERM, True)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, known)


@pytest.mark.parametrize(("name", "handler"), [("SIGINT", print), ("SIGUSR1", print), ("SIGTERM", signal.SIG_IGN)])
def test_other_handlers_and_signals_that_are_ignored_stay(name: str, handler: Any) -> None:
    number = signal.Signals[name]
    known = signal.signal(number, handler)
    try:
        with forwarding(lambda each: None, 600):
            assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, known)


def test_ctrl_c_waits_until_the_block_has_ended() -> None:
    known, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), without_interrupts():  # noqa: PT012  # raised where the block ends
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")
    assert done == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is known
    with without_interrupts():
        pass  # nothing of the first one is left


@pytest.mark.parametrize(("handler", "calls"), [("own", ["rest", "own"]), (signal.SIG_IGN, ["rest"])])
def test_ctrl_c_that_waits_goes_to_the_users_handler(handler: Any, calls: list[str]) -> None:
    found: list[str] = []
    known = signal.signal(signal.SIGINT, (lambda *_: found.append("own")) if handler == "own" else handler)
    try:
        with without_interrupts():
            signal.raise_signal(signal.SIGINT)
            found.append("rest")
        assert found == calls
    finally:
        signal.signal(signal.SIGINT, known)


def test_the_launcher_of_a_trainer_has_its_limit() -> None:
    quiet = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    assert Trainer(strategy="ddp_spawn", **quiet).engine.launcher.stop_timeout_s == 600
    assert Trainer(strategy="ddp_spawn", stop_timeout_s=60, **quiet).engine.launcher.stop_timeout_s == 60
