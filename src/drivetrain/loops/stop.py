"""End a fit on a signal or at a time limit, so that all ranks stop after the same batch.

[Note: the batch after which all ranks stop]
If one rank stopped alone, the other ranks would wait in a collective. Each rank therefore has a thread that regularly
looks in the job's store for a request to end. If there is a request, the thread sets ``run.stop``, which the loop reads
at the end of each batch. The thread then writes a number into the store: the number of the batch after the running
batch. All ranks stop after the batch with the highest number of all ranks. Each rank waits at the end of the batch
whose number the rank has written, until the highest number is known. Therefore no rank can have passed the batch with
the highest number. No rank waits forever, because each rank's thread writes the number even while the rank is in a
collective.

Training and validation batches are counted together. All ranks run equally many batches, so a number identifies the
same batch on each rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.data.sampled_passes import workers_outlive_sigterm
from drivetrain.errors import SIGTERMException
from drivetrain.launchers import stacks
from drivetrain.launchers.signals import handled
from drivetrain.loops.progress import phase_name
from drivetrain.loops.run import Run
from drivetrain.strategies import waiting

TIME_LIMIT = "the time limit"
REQUEUE = "the cluster's signal"
_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_POLL_S = 0.25  # seconds between two checks of the store
_ANSWERS_EACH = 4  # at every 4th check, answer the ranks that ask how many batches this rank has begun
_LOOK_S = 1.0  # seconds between two checks for ended ranks on this machine
_PAUSE_S = 0.01  # seconds between two checks for the numbers of the other ranks
_NEVER = sys.maxsize  # a number above all batches; a rank that has left the fit writes this number

_fits = 0  # the number of this process's distributed fits, which is part of a fit's keys in the job's store
_main_pipe: list[int] = []  # the pipe to which Python writes the signals of a running fit
_raises_in: list[int] = []  # the id of the process in which SIGTERM raises an exception
_ended_in: list[int] = []  # the id of a process whose run is ending because of a SIGTERM


class Note:
    """The line that a fit prints to the terminal after Ctrl-C.

    Attributes:
        before, after: bytes that are written before and after the line. A progress bar sets these bytes, so that the
            line appears in place of the bar.
        is_written: whether Ctrl-C was pressed in the running fit.
    """

    before: bytes = b"\n"
    after: bytes = b""
    is_written: bool = False

    def stand_above(self, lines: int = 0) -> None:
        """Write the line above a progress bar of ``lines`` lines; 0: there is no bar. The cursor is in the bar's last
        line.
        """
        self.before = b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (lines - 1) if lines else b"\n"
        self.after = b"\n" * (lines - 1)  # drawing the bar moves the cursor up again


note = Note()


class Stop:
    """Ends a fit on request, after a batch on which all ranks agree.

    Args:
        run: the fit.
        save: saves the checkpoint from which the next run resumes. All ranks call this function after the same batch.
        keep_newest: marks the checkpoint of ``save`` as the newest. The fit calls this function if callbacks may have
            saved checkpoints after ``save``.
        timeout_s: the seconds for which a rank waits for the other ranks' answers. After that, the rank ends without
            saving.

    Attributes:
        agreed: whether all ranks are at the end of the agreed batch, so that they can use collectives.
        answers: functions by reason. If the ranks have agreed on a batch for one of these reasons, they call its
            function after the batch, instead of saving and ending. Training continues unless the function raises
            SystemExit.
    """

    def __init__(
        self, run: Run, save: Callable[[str], None], timeout_s: float, keep_newest: Callable[[], None] | None = None
    ) -> None:
        self.agreed = False
        self._run, self._save, self._keep_newest, self._timeout_s = run, save, keep_newest, timeout_s
        strategy = run.engine.strategy
        self._rank, self._size = strategy.global_rank, strategy.world.size
        self._reason = ""  # why the ranks agree on a batch, for example "SIGTERM"
        self._wanted = ""  # why this rank has asked the fit to end
        self._next = ""  # why this rank will ask again, after the present request
        self.answers: dict[str, Callable[[], None]] = {}
        self._may_reach = self._last = 0  # batch numbers: this rank's, and the highest of all ranks
        self._written, self._answered, self._acted = threading.Event(), threading.Event(), threading.Event()
        self._time_over = self._saved = self._over = False
        self._interrupts = self._fit = self._round = 0
        self._store: Any = None
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context around the loop, in which the fit accepts requests to end.

        Raises:
            KeyboardInterrupt, SIGTERMException: a signal asked the fit to end, but the loop has ended before an agreed
                batch.
        """
        if self._size > 1:
            # a second connection, because a request that waits would block the process's other requests
            with contextlib.suppress(RuntimeError, AttributeError):  # there is no store, or the store cannot be cloned
                self._store = waiting.store_of_job().clone()
            # without a store, the ranks cannot agree, so signals end this rank immediately
            if self._store is None:
                yield
                return
            self._start()
        with self._handlers():
            try:
                self._run.stopping.stopper = self
                yield
            finally:
                self._run.stopping.stopper = self._run.stop = None
                self._leave()
        for reason in (self._reason, self._wanted, self._next):
            if reason in _SIGNALS.values():
                if self._size == 1:  # several ranks could no longer agree on a batch
                    self._save(reason)
                raise _exception(reason)
        if not self._time_over:
            return
        if not self._saved:
            self._save(TIME_LIMIT)
        elif self._keep_newest is not None:
            self._keep_newest()

    def ask(self, reason: str) -> None:
        """Request the end of the fit on all ranks. Any thread or signal handler of any rank can call this method."""
        self._want(reason)
        if self._size == 1:
            self._agree_alone()
        elif self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")  # wakes the thread

    def _want(self, reason: str) -> None:
        if self._wanted in ("", TIME_LIMIT):
            self._wanted = reason
        elif reason != self._wanted:
            self._next = reason

    def _agree_alone(self) -> None:
        self._reason = self._wanted
        self._written.set()
        self._answered.set()
        self._run.stop = self

    def at_batch_end(self) -> None:
        """End the fit if this is the agreed batch. Called after each batch and its hooks while :attr:`Run.stop` is set.

        Raises:
            KeyboardInterrupt, SIGTERMException: this is the agreed batch, or the other ranks have not answered.
        """
        number = self._run.progress.slot[1]
        self._written.wait()
        if number < self._may_reach:
            return
        if missing := self._wait_for_answers():
            rank_zero_warn(
                f"Asked to end by {self._reason}, but {missing}, so this fit ends without saving a checkpoint."
            )
            raise _exception(self._reason)
        if number < self._last:
            return
        self._run.stop = None
        if (answer := self.answers.get(self._reason)) is not None:
            try:
                answer()
            except SystemExit:
                self.agreed = self._run.stopping.ends_together = True
                raise
            self._end_round()
            return
        if self._reason != TIME_LIMIT:
            self.agreed = self._run.stopping.ends_together = True
            self._save(self._reason)
            raise _exception(self._reason)
        self._time_over = True
        if not (self._saved or self._run.stop_is_delayed()):
            # save now: the last validation and the end hooks draw random numbers and change states
            self._saved = True
            self._save(TIME_LIMIT)
        self._run.stopping.agreed = True
        self._run.progress.ask_to_stop()
        self._end_round()

    def _wait_for_answers(self) -> str:
        """Wait until this rank knows the agreed batch, and return "". If this is impossible, return the reason."""
        deadline = time.monotonic() + self._timeout_s
        while not self._answered.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return f"the other ranks have not answered within {self._timeout_s:g} s"
            if self._size > 1 and (dead := stacks.dead_ranks()) and not self._answered.is_set():
                return f"rank {dead[0]} has ended"
        return ""

    def _end_round(self) -> None:
        """Prepare for the next request; called if training continues."""
        self._written.clear()
        self._answered.clear()
        self._wanted = self._next if self._wanted == self._reason else self._wanted
        self._reason, self._next, self._may_reach = "", "", 0
        self._round += 1
        self._acted.set()
        if self._size == 1 and self._wanted:
            self._agree_alone()

    # ---- signals -------------------------------------------------------------------------------------------------

    @contextmanager
    def _handlers(self) -> Iterator[None]:
        """Context in which SIGTERM and Ctrl-C ask the fit to end. Outside the main thread, the context does nothing,
        because Python handles signals in the main thread.

        A signal that the user ignores stays ignored. A user's handler for Ctrl-C is kept. On SIGTERM, the context calls
        the user's handler, then asks the fit to end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        note.is_written = False
        for number in map(int, _SIGNALS):
            known = signal.getsignal(number)
            default = signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
            if known is default or (number == signal.SIGTERM and callable(known)):
                self._before[number] = known
        with handled(dict.fromkeys(self._before, self._note)):
            try:
                workers_outlive_sigterm(True)
                with self._signals_in_pipe():
                    yield
            finally:
                workers_outlive_sigterm(False)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A forked process, such as a loader's worker, inherits this handler. The forked process ignores Ctrl-C and ends
        # on SIGTERM.
        if os.getpid() != self._process:
            if number == signal.SIGTERM:
                _end_as_by_default()
            return
        handler = self._before.get(number)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            if self._rank == 0:  # not with sys.stderr, which may be in use
                text = b"Ctrl-C: the fit ends after the batch that is running. Press it again to end at once.\n"
                note.is_written = True
                with contextlib.suppress(OSError):
                    os.write(2, note.before + text + note.after)
        elif callable(handler) and handler is not _raise_sigterm:
            handler(number, frame)
        self.ask(_SIGNALS[signal.Signals(number)])

    @contextmanager
    def _signals_in_pipe(self) -> Iterator[None]:
        """Context in which Python writes the numbers of signals into a pipe. The thread reads the pipe, even while the
        main thread waits in a collective.
        """
        self._process = os.getpid()
        if self._pipe is None:
            yield
            return
        _, writes = self._pipe
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if not _main_pipe:
            os.register_at_fork(after_in_child=_forget_pipe)
        _main_pipe[:] = [writes]
        try:
            yield
        finally:
            _main_pipe[:] = [-1]
            signal.set_wakeup_fd(before)

    # ---- several ranks -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        global _fits
        _fits += 1
        self._fit = _fits
        if os.name == "posix":  # on Windows, a thread cannot wait for a pipe
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
        waiting.show_place(self._place)
        self._thread = threading.Thread(target=self._watch, name="drivetrain stop", daemon=True)
        self._thread.start()

    def _key(self, name: object) -> str:
        return f"drivetrain/stop/{self._fit}/{self._round}/{name}"

    def _place(self) -> tuple[int, str]:
        progress = self._run.progress
        name = phase_name(progress.phase)
        batches = progress.slot[1]
        return batches, f"in the phase {name!r} after {batches} batches had begun"

    def _watch(self) -> None:
        """The thread's loop: look for requests to end the fit, until the fit is over."""
        answers = waiting.Answers(self._store, self._rank)
        try:
            for turn in itertools.count():
                if self._over:
                    break
                self._hear()
                if turn % _ANSWERS_EACH == 0:
                    answers.give()
                key = self._key("asked")
                if self._wanted:
                    self._reason = self._store.compare_set(key, "", self._wanted).decode()
                elif self._store.check([key]):
                    self._reason = self._store.get(key).decode()
                if self._reason:
                    self._agree()
                    while not self._over and not self._acted.wait(_POLL_S):
                        pass
                    self._acted.clear()
        except RuntimeError:  # the process with the store has ended
            self._last = _NEVER
        finally:
            self._written.set()
            self._answered.set()

    def _hear(self) -> None:
        """Wait a quarter of a second for signals."""
        if self._pipe is None:
            time.sleep(_POLL_S)
            return
        if not select.select([self._pipe[0]], [], [], 0 if self._wanted else _POLL_S)[0]:
            return
        for number in os.read(self._pipe[0], 64):
            if number in self._before:
                self._want(_SIGNALS[signal.Signals(number)])

    def _agree(self) -> None:
        """Agree with the other ranks on a batch: see [Note: the batch after which all ranks stop]."""
        self._run.stop = self  # set first, so that the loop begins at most one batch after the number is read
        self._may_reach = self._run.progress.slot[1] + 1
        self._written.set()
        self._write_number(self._may_reach)
        while not self._over and not self._store.check([self._key("last")]):
            time.sleep(_PAUSE_S)
        if not self._over:
            self._last = int(self._store.get(self._key("last")))
        self._answered.set()

    def _write_number(self, number: int) -> None:
        """If this rank's number is higher than the number in the store, write this rank's number. The last rank
        publishes the highest number.
        """
        highest = self._store.compare_set(self._key("highest"), "", str(number)).decode()
        while int(highest) < number:
            highest = self._store.compare_set(self._key("highest"), highest, str(number)).decode()
        if self._store.add(self._key("count"), 1) == self._size:
            self._store.set(self._key("last"), self._store.get(self._key("highest")))

    def _leave(self) -> None:
        """End the thread. If this rank has written no batch number into the store, write one, so that other ranks do
        not wait for this rank. Called after the loop.
        """
        if self._thread is None:
            return
        self._over = True
        waiting.show_place(None)
        self._acted.set()
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe[1], b"\0")  # wakes the thread
        self._thread.join()
        for end in self._pipe or ():
            os.close(end)
        with contextlib.suppress(RuntimeError):  # the store may no longer exist
            if not self._may_reach:
                self._write_number(_NEVER)


def _exception(reason: str) -> BaseException:
    if reason == _SIGNALS[signal.SIGINT]:
        return KeyboardInterrupt()
    _ended_in[:] = [os.getpid()]
    return SIGTERMException()


def _forget_pipe() -> None:
    if _main_pipe != [-1]:
        _main_pipe[:] = [-1]
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


def _raise_sigterm(number: int, frame: FrameType | None) -> None:
    if _raises_in != [os.getpid()]:
        _end_as_by_default()  # a forked process
    if _ended_in != [os.getpid()]:  # a second SIGTERM does not interrupt on_exception
        raise SIGTERMException


def _end_as_by_default() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def sigterm_raises(is_rank: bool) -> Iterator[None]:
    """Context in which SIGTERM raises an exception, as Ctrl-C does, so that the run can clean up.

    If the user has set a handler, the context does nothing. The process that launches the ranks (``is_rank=False``) has
    its own handler, so the context does nothing in this process.
    """
    main = threading.current_thread() is threading.main_thread()
    if not is_rank or not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    _raises_in[:], _ended_in[:] = [os.getpid()], []
    signal.signal(signal.SIGTERM, _raise_sigterm)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _raise_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
