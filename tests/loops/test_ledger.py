from __future__ import annotations

import errno
import json
import os
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from drivetrain.loops import ledger
from drivetrain.loops.goodput import PARTS, account, read
from drivetrain.loops.ledger import Ledger, TimedSlot, since_process_start_s
from drivetrain.loops.progress import Phase, Progress


class SetClock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def progress(clock: SetClock) -> Progress:
    """Of a run whose process has started seven seconds ago, measured."""
    found = Progress()
    found.show_in(TimedSlot(found.slot, 7.0, clock))
    return found


def spent(progress: Progress, clock: SetClock, *phases: tuple[Phase, float]) -> dict[str, float]:
    for phase, seconds in phases:
        progress.enter(phase)
        clock.now += seconds
    slot: Any = progress.slot
    elapsed_s, parts = slot.times()
    assert sum(parts.values()) == elapsed_s
    return {name: value for name, value in parts.items() if value}


def test_each_second_counts_as_the_part_of_the_phase_in_which_it_passed(progress: Progress, clock: SetClock) -> None:
    assert spent(
        progress, clock, (Phase.SET_UP, 2), (Phase.SANITY_BATCH, 1), (Phase.TRAIN_START, 1), (Phase.EPOCH_START, 1),
        (Phase.FETCH, 16), (Phase.BATCH_START, 1), (Phase.FORWARD, 1), (Phase.BACKWARD, 1), (Phase.OPTIMIZER_STEP, 1),
        (Phase.BATCH_END, 1), (Phase.LOG_FLUSH, 1), (Phase.VALIDATION_DUE, 100), (Phase.VALIDATION_START, 100),
        (Phase.VALIDATION_FETCH, 100), (Phase.VALIDATION_BATCH, 100), (Phase.VALIDATION_END, 100), (Phase.VALIDATED, 1),
        (Phase.EPOCH_END, 1), (Phase.BETWEEN_EPOCHS, 1), (Phase.TRAIN_END, 1),
    ) == {"start": 13.0, "data": 16.0, "validation": 500.0, "step": 9.0}  # fmt: skip


def test_a_run_that_resumes_behind_the_last_batch_has_no_step(progress: Progress, clock: SetClock) -> None:
    resumed = ((Phase.TRAIN_START, 1), (Phase.BATCH_END, 2), (Phase.VALIDATION_DUE, 100), (Phase.VALIDATED, 3))
    ended = ((Phase.FETCH, 0), (Phase.EPOCH_END, 4), (Phase.BETWEEN_EPOCHS, 5))
    assert spent(progress, clock, *resumed, *ended) == {"start": 22.0, "validation": 100.0}
    assert spent(progress, clock, (Phase.BATCH_START, 1), *ended)["step"] == 10.0  # the next epoch trains


def test_every_phase_has_a_part() -> None:
    assert all(ledger._PART_OF[phase] in range(len(PARTS)) for phase in Phase)


def test_a_save_counts_as_one_in_every_phase_and_once_when_it_contains_another(
    progress: Progress, clock: SetClock
) -> None:
    saves: list[int] = []
    slot: Any = progress.slot
    slot.saved = lambda: saves.append(1)
    progress.enter(Phase.BATCH_END)
    with progress.storing():
        clock.now += 3
        with progress.storing():
            clock.now += 4
        clock.now += 5
    assert spent(progress, clock, (Phase.FETCH, 2)) == {"start": 7.0, "save": 12.0, "data": 2.0}
    assert len(saves) == 1


def test_other_memory_is_written_as_without_it(clock: SetClock) -> None:
    memory = array("q", [0] * 16)
    slot = TimedSlot(memory, clock=clock)
    slot[0], slot[1] = Phase.FETCH, slot[1] + 2
    slot[9] = 5
    assert memory.tolist() == [Phase.FETCH, 2, 0, 0, 0, 0, 0, 0, 0, 5, *[0] * 6]
    assert (len(slot), slot[:2].tolist()) == (16, [Phase.FETCH, 2])


def test_records_come_at_events_and_by_themselves(
    tmp_path: Path, progress: Progress, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_EVERY_S", (0.001, 0.001))
    slot: Any = progress.slot
    path = tmp_path / "new" / "ledger.jsonl"
    own = Ledger(str(path), slot, lambda: progress.global_step)
    own.begin_training(resumed=False)
    progress.enter(Phase.BATCH_START)
    while not any(each["event"] == "beat" for each in read(path)[0]):
        time.sleep(0.001)
    clock.now += 5
    progress.count_steps(3)
    with progress.storing():
        clock.now += 2
    report = own.report()
    assert own.close("finished") is None  # the file has it
    own_thread_ended = not own._thread.is_alive()

    records, unread = read(path)
    events = [each["event"] for each in records if each["event"] != "beat"]
    assert (events, unread, own_thread_ended) == (["begin", "train", "save", "end"], 0, True)
    assert [each["step"] for each in records][-1] == 3
    assert records[-1]["parts"] == {"step": 5.0, "data": 0.0, "validation": 0.0, "save": 2.0, "start": 7.0}
    assert records[-1]["elapsed"] == 14.0
    assert all(abs(each["time"] - time.time()) < 100 and each["pid"] == os.getpid() for each in records)
    assert report is not None
    assert (report.goodput, report.saves, report.save_s) == (5 / 14, 1, 2.0)
    assert account(records).seconds == report.seconds


def test_a_line_that_was_cut_does_not_damage_the_next_run(tmp_path: Path, progress: Progress) -> None:
    path, slot = tmp_path / "ledger.jsonl", progress.slot
    Ledger(str(path), slot, lambda: 0).close("stopped")  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:-9])
    Ledger(str(path), slot, lambda: 0).close("stopped")  # type: ignore[arg-type]
    records, unread = read(path)
    assert ([each["event"] for each in records], unread) == (["begin", "begin", "end"], 1)


def test_a_full_disk_is_one_warning_and_the_run_is_measured_on(
    tmp_path: Path, progress: Progress, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(UserWarning, match="could not be written: no space left"):
        own = Ledger(str(tmp_path / "ledger.jsonl"), progress.slot, lambda: 0)  # type: ignore[arg-type]
    own.begin_training(resumed=False)  # a second warning would be an error
    progress.enter(Phase.BATCH_START)
    clock.now += 7
    report = own.report()
    closed = own.close("exception")
    assert report is not None
    assert closed is not None
    assert report.goodput == closed.goodput == 0.5
    assert (report.open, report.failures, closed.open, closed.failures) == (True, 0, False, 1)


def test_a_part_of_a_record_is_a_warning_too(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, content[:20]))
    with pytest.warns(UserWarning, match="only a part of a record"):
        Ledger(str(tmp_path / "ledger.jsonl"), progress.slot, lambda: 0).close("stopped")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, progress: Progress) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"could not be written: .*(ENOTDIR|EEXIST)") as warned:
        Ledger(str(tmp_path / "file" / "ledger.jsonl"), progress.slot, lambda: 0).close("stopped")  # type: ignore[arg-type]
    assert len(warned) == 1


def test_a_record_is_one_line_of_json(tmp_path: Path, progress: Progress) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(str(path), progress.slot, lambda: 0).close("stopped")  # type: ignore[arg-type]
    first, *lines = path.read_bytes().split(b"\n")
    assert first == b""
    assert [json.loads(line)["event"] for line in lines] == ["begin", "end"]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only Linux tells when a process has started")
def test_the_start_of_a_process_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_measured_by", -1)
    age_s = since_process_start_s()
    assert time.process_time() / 1000 < age_s < time.monotonic() + 1e6
    assert since_process_start_s() == 0.0
