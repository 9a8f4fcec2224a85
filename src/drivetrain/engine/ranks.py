"""The part of an Engine that starts a job's processes, communicates between them, and reports uncaught exceptions."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from drivetrain.base.introspect import reads
from drivetrain.base.lazy import on_first_use
from drivetrain.base.tree import map_leaves
from drivetrain.errors import WrongTypeError, described
from drivetrain.launchers import external
from drivetrain.launchers.launcher import Launcher, LaunchError
from drivetrain.launchers.tracebacks import cut_tracebacks
from drivetrain.plan import Plan
from drivetrain.strategies import waiting
from drivetrain.strategies.collectives import as_tensor, operation_of
from drivetrain.strategies.strategy import Strategy

with on_first_use:
    from drivetrain.engine import watching
    from drivetrain.launchers import board
    from drivetrain.strategies import failing

R = TypeVar("R")


class RankFacts:
    """Properties that read the ranks and sizes of the job from ``strategy``, for the Engine and the Trainer."""

    strategy: Strategy

    global_rank: int = reads("strategy.global_rank", "Index of this process in the job.")
    local_rank: int = reads("strategy.local_rank", "Index of this process on its machine.")
    node_rank: int = reads("strategy.node_rank", "Index of this machine in the job.")
    world_size: int = reads("strategy.world_size", "Number of processes in the job.")
    is_global_zero: bool = reads("strategy.is_global_zero", "Whether this process is global rank 0.")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on global rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)


class Ranks(RankFacts):
    """The part of an Engine that starts processes and communicates between them.

    Attributes:
        plan: the resolved plan, with the number of processes and the start method.
        strategy: provides the ranks and the collectives.
        launcher: the object that starts the processes, unless another program has already started them.
        stall_timeout_s: after this many seconds in one collective, a report names the processes that have not joined
            it; ``None``: no report. Set this attribute before :meth:`launch`. With one process, the attribute has no
            effect.
    """

    plan: Plan
    launcher: Launcher
    stall_timeout_s: float | None = 300.0
    _launched: bool = False
    _check_collectives: bool | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.run = _launching(cls.__dict__["run"])  # type: ignore[method-assign]

    # ---- start ---------------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., R] | None = None, *args: Any, **kwargs: Any) -> R | None:
        """Start the processes of this engine. In each process, make the engine's device the current device.

        Args:
            function: a function that each process calls with this engine and ``args``. ``None``: the program continues
                after this call in every process. A launcher such as ``spawn`` cannot do this, and needs ``function``.

        Returns:
            The result of ``function``. If this call has started processes, the result is a copy of rank 0's result.

        Raises:
            ConfigurationError: ``function`` is missing, or does not accept the engine.
            LaunchError: a process failed.
        """
        if function is not None and (not callable(function) or not inspect.signature(function).parameters):
            raise WrongTypeError(
                f"Engine.launch({described(function)}): it is called with the engine as its first argument. "
                "Write def main(engine): ..., and engine.launch(main)."
            )
        if function is not None:
            return self.start(_begun, self, function, args, kwargs)
        if self.launcher.reruns_program:
            # this call runs the program again in each process, and does not return
            self.launcher.launch(type(self).launch)
        if not self.launcher.is_external:
            raise WrongTypeError(
                f"Engine.launch() would start {self.plan.num_processes} processes by {self.plan.start_method!r}, and "
                "they need something to run. Write def main(engine): ..., and engine.launch(main)."
            )
        self._begin()
        self._start_checks()  # the program may call launch() again, for another run
        return None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program. A subclass defines this method. Calling it first starts the processes."""
        raise NotImplementedError(f"{type(self).__name__} has no method run. Define one, or use Engine.launch(main).")

    def start(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call ``function`` on every rank of the job. With some launchers, this process is not a rank itself."""
        if self.launcher.is_external:
            return function(*args, **kwargs)
        try:
            result: R = self.launcher.launch(_as_rank, self, function, args, kwargs)
        except LaunchError:
            cut_tracebacks()
            raise
        finally:
            self.strategy.leave_process_group()
        return result

    def _begin(self) -> None:
        if not self._launched:
            if not self.launcher.is_external:
                self.launch()
            self._launched = True
            self.strategy.setup_environment()
            self._start_checks()
            if self.world_size > 1:
                elsewhere = self.plan.environment.creates_processes_externally
                watching.begin(self.strategy, elsewhere, os.getcwd, self.stall_timeout_s)
                _report_uncaught()

    def _start_checks(self) -> None:
        if (checks := self.strategy.world.checks) is not None:
            checks.start_run(self._check_collectives)

    # ---- between processes ---------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""
        self.strategy.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s ``obj`` on every rank."""
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather the tensors and numbers of all ranks, stacked to the shape ``(world_size, ...)``.

        With one process, there is no new dimension. A tensor is returned unchanged, and a number as a scalar tensor.

        Args:
            data: a tensor, a number, or a tree of them; a number becomes a tensor on the device. Other leaves are
                returned unchanged.
            group: the participating processes; ``None``: all.
            sync_grads: whether a backward pass sends each slice's gradient to the rank from which the slice came.
        """
        return gathered(self.strategy, data, group, sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce each tensor and each number in ``data`` over the ranks.

        With one process, a tensor is returned unchanged, and a number is returned as a tensor.

        Args:
            data: a tensor, a number, or a tree of them; it is not changed. A number becomes a tensor on the device.
                Other leaves are returned unchanged.
            group: the participating processes; ``None``: all.
            reduce_op: "mean", "sum", "min", "max", "product", or a ``ReduceOp``.

        Raises:
            UnknownNameError: the operation is unknown.
        """
        operation_of(reduce_op)  # checks the name, even if ``data`` contains nothing to reduce
        strategy = self.strategy

        def reduced(leaf: Any) -> Any:
            leaf = as_tensor(leaf, strategy.root_device, reduce_op)
            return strategy.reduce(leaf, group, reduce_op) if isinstance(leaf, Tensor) else leaf

        return map_leaves(reduced, data)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Context whose body rank 0 runs before the other ranks.

        Args:
            local: whether local rank 0 of each machine runs first, for files that the machines do not share.
        """
        first = (self.local_rank if local else self.global_rank) == 0
        if not first:
            self.barrier()
        try:
            yield
        finally:  # also after an exception, because the other ranks wait
            if first:
                self.barrier()
            self.barrier()  # wait until all ranks have left the block


def gathered(strategy: Strategy, data: Any, group: Any, sync_grads: bool) -> Any:
    """Gather each tensor and number of the tree ``data`` over the ranks; see :meth:`Ranks.all_gather`."""

    def gather(leaf: Any) -> Any:
        leaf = as_tensor(leaf, strategy.root_device)
        return strategy.all_gather(leaf, group, sync_grads) if isinstance(leaf, Tensor) else leaf

    return map_leaves(gather, data)


def _as_rank(engine: Ranks, function: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    """Run ``function`` in a process that a launcher has started; ``engine`` is a copy that was sent to this process."""
    engine.launcher = external.ExternalLauncher()  # this process starts no further processes
    engine.strategy.set_ranks(engine.plan.environment, engine.plan.num_nodes)
    result = function(*args, **kwargs)
    engine.strategy.leave_process_group()
    return result


def _begun(engine: Ranks, function: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    engine._begin()
    if engine.world_size == 1:
        return function(engine, *args, **kwargs)

    with _reporting():
        return function(engine, *args, **kwargs)


def _launching(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a subclass's ``run``, so that a call starts the processes if they were not started before."""

    @functools.wraps(run)
    def launched(self: Ranks, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs) if self._launched else self.launch(launched, *args, **kwargs)

    return launched


# ---- uncaught exceptions --------------------------------------------------------------------------------------------


def _report_uncaught() -> None:
    """Install a hook for exceptions that end this process. The hook reports an exception to the other ranks and in the
    job's report.

    For runs of the Trainer, ``trainer/shown.py`` reports such exceptions.
    """
    if (sheet := board.own_sheet()) is not None:
        sheet.words[board.ENGINE] = 1
        # with another value than 0, the watching process would report the end of this process as a failure
        atexit.register(sheet.words.__setitem__, board.STALL, 0)
    cut_tracebacks(_tell)


@contextmanager
def _reporting() -> Iterator[None]:
    """Context in which every rank runs a function. An exception of the function is reported to the other ranks and in
    the job's report.
    """
    waiting.begin_run()
    if (sheet := board.own_sheet()) is not None:
        sheet.forget_failure()
    try:
        yield
    except BaseException as error:
        _tell(error)
        raise


def _tell(error: BaseException) -> None:
    failing.report(error, board.own_sheet(), lambda failed: failing.summary(failed, "in a program on the Engine"))
