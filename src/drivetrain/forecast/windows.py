"""Run two windows of a program's fit on fake tensors, as one rank of the planned job. A window is the batches of one
optimizer step.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import site
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drivetrain.base.introspect import overrides
from drivetrain.base.tree import batch_sizes, map_leaves
from drivetrain.callback import Callback
from drivetrain.data.combined import CombinedLoader, arranged
from drivetrain.forecast import blocks, torch_tools
from drivetrain.forecast.ledger import Lines, Recorder, _tensors, finished
from drivetrain.forecast.memory import Measured, measured
from drivetrain.forecast.operations import (
    BATCH,
    BUFFERS,
    EXCHANGED,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Ledger,
    Recorded,
)
from drivetrain.forecast.rank_classes import rank_classes
from drivetrain.forecast.stages import PIPELINE
from drivetrain.forecast.standins import ARRIVED, Job, wrap_again
from drivetrain.forecast.values import Values
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.run import ENDLESS
from drivetrain.strategies.sharded_state import local_shard
from drivetrain.strategies.step import Step
from drivetrain.trials.child import leave_no_trace

WINDOWS = 2
"""The number of windows. Only the second window is reported. In the first window, the optimizer creates its state, and
torch's sharding propagation creates tensors of global size.
"""
MOST_BATCHES = 2
"""A window has at most this many batches in a plan. A further batch would need as much memory as the last of these
batches.
"""


class _EndedError(BaseException):
    """Ends the fit after the last window. This class is no subclass of Exception, so that ``except Exception`` in the
    program does not catch the class.
    """


@dataclasses.dataclass(frozen=True)
class Case:
    """A variant of the program that is measured.

    Attributes:
        lengths: the number of blocks that each list of repeated blocks keeps. With ``None``, the lists keep all blocks.
        divides: the micro-batch is divided by this number, and the number of batches in a window is multiplied by this
            number.
        samples: the number of samples in a micro-batch, by default the program's number. The number of batches in a
            window does not change.
        recomputes: whether blocks recompute their activations in the backward pass.
        foreach: whether optimizers update all parameters in one call, which is torch's default on accelerators.
    """

    lengths: tuple[int, ...] | None = None
    divides: int = 1
    samples: int | None = None
    recomputes: bool = False
    foreach: bool = True


class OneBatch:
    """A loader that yields the same batch ``length`` times.

    Args:
        batch: the batch.
        length: the number of repetitions.
    """

    def __init__(self, batch: Any, length: int) -> None:
        self._batch, self._length = batch, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self._batch, self._length)


def first_batch(made: Any) -> Any:
    """Return the first batch of a loader, or the first batches of loaders in a list or a dictionary."""
    loader = made if isinstance(made, CombinedLoader) else arranged(made, "train_dataloader gave")
    if isinstance(loader, (list, tuple, Mapping)):
        loader = CombinedLoader(loader, "max_size_cycle")
    first = next(iter(loader))
    return first[0] if isinstance(loader, CombinedLoader) else first


class Watch(Callback):
    """Follows the phases of the windows, and ends the fit after the last window."""

    position = "last"

    def __init__(self, own: Any) -> None:
        self._own = own

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Record the beginning of a batch. The first batch of a window also begins the window."""
        self._own.begins_batch(batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the fit after the last window."""
        self._own.ends_batch(batch_idx)


class WatchBackward(Watch):
    """Also follows the backward pass, if the strategy calls the hooks of the backward pass."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Record that the backward pass begins."""
        self._own.note("before backward")
        self._own.recorder.phase = "backward"

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Record that the backward pass has ended."""
        self._own.note("after backward")
        self._own.recorder.phase = "clip"


class Windows:
    """Runs the windows of one case.

    Args:
        job: the planned job.
        case: the variant of the program.
        mode: the fake mode.
        program: the path of the program.
        values: the values that the program reads from tensors. While the values are recorded, tensors are real.
        batch: a batch with the shapes of the program's batches. The default is the first batch of the program's loader.
    """

    def __init__(
        self, job: Job, case: Case, mode: Any, program: str, values: Values, batch: Any = None
    ) -> None:  # fmt: skip
        self.job, self.case, self.mode, self.batch = job, case, mode, batch
        self.values, self.ledger = values, Ledger()
        self.recorder = Recorder(self.ledger, Lines(program_files(program)), values)
        # so that tensors from before the first batch do not count as activations
        self.recorder.phase = "optimizer"
        self._optimizers: list[Any] = []
        self._arrivals: list[Any] = []
        self._live: dict[str, int] = {}
        self._stack, self._first = ExitStack(), (0, 0)
        self._window = 0
        self.blocks: dict[str, nn.Module] = {}
        self.lists: tuple[tuple[str, int], ...] = ()
        self.batch_size = 0

    def run(self, trainer: Any, job: Any) -> Measured:
        """Run the windows of ``job`` on ``trainer``, and return the measurement."""
        self._quiet(trainer, job.model)
        limits = trainer.limits
        self._window = min(limits.accumulate * self.case.divides, MOST_BATCHES)
        self.batches = limits.accumulate * self.case.divides
        limits.accumulate = self._window
        loaders, strategy = cast("Any", Loaders), trainer.strategy
        unshared, set_up = loaders.unshared, strategy.setup

        def one_batch(owner: Any, stage: str) -> Any:
            batch = self.batch
            with torch_tools.real():
                if batch is None or stage != "fit":
                    found = unshared(owner, stage)
                    if stage != "fit":
                        return found
                    batch = first_batch(found)
            self.batch_size = next(batch_sizes(batch), 0)
            return OneBatch(self._fake(batch), self._window * WINDOWS + 1)

        def with_modes(trainer: Any) -> None:
            self._prepare(trainer, set_up)

        loaders.unshared, strategy.setup = one_batch, with_modes
        with suppress(_EndedError), self._stack:
            trainer.run_job(job)
        return self.result

    result: Any = None

    def _quiet(self, trainer: Any, model: Any) -> None:
        """Switch off all output to files and the terminal, all limits of the fit, and validation."""
        self._is_compiled = bool(trainer.settings.compile)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="drivetrain-plan-"))
        leave_no_trace(
            trainer, model, folder, cuda_graphs=False, compile=None, detect_anomaly=False, replay_every=None,
            replica_check_every=None, plan_check=None,
        )  # fmt: skip
        watch = Watch if _owns_step(trainer.strategy) else WatchBackward
        trainer._callbacks, trainer._set_ckpt_path = [*trainer._callbacks, watch(self)], None
        limits = trainer.limits
        limits.sanity_batches = limits.val_batches = 0
        limits.max_epochs, limits.max_steps, limits.train_batches = 1, ENDLESS, 1.0
        trainer.save_checkpoint = lambda *args, **options: None

    def _prepare(self, trainer: Any, set_up: Callable[[Any], None]) -> None:
        """Set up the model on fake tensors, and start the recording."""
        module = trainer.lightning_module
        # a pipeline needs all blocks, which it divides into stages
        self.lists = blocks.shorten(module, None if _owns_step(trainer.strategy) else self.case.lengths)
        self.blocks = blocks.paths(module)
        if self.case.recomputes:
            blocks.recompute(self.blocks.values())
        self._stack.enter_context(self.mode)
        self._stack.enter_context(torch_tools.resizes_seen(self.recorder.resized))
        self._stack.enter_context(torch_tools.arrays_seen(self.recorder.array))
        self._stack.enter_context(self.recorder)
        self.recorder.mark((*module.parameters(), *module.buffers()), OTHER)
        set_up(trainer)
        self._classes = rank_classes(module, self.job.devices, PIPELINE.owners, PIPELINE.size)
        self.recorder.watch(module, self.blocks)
        self.module, self.trainer = module, trainer
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            for each in module.parameters():
                if each.requires_grad:
                    self._arrivals.append(each.register_post_accumulate_grad_hook(self._arrived))
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        self._handles = [before(self._before_step), after(self._after_step)]

    def _fake(self, batch: Any) -> Any:
        def fake(tensor: Any) -> Any:
            parts = self.case.divides
            if not isinstance(tensor, Tensor) or self.values.records:
                return tensor
            if tensor.ndim and (parts > 1 or self.case.samples):
                tensor = tensor[: self.case.samples or max(1, tensor.shape[0] // parts)].contiguous()
            return torch_tools.alike(self.mode, tensor)

        return map_leaves(fake, batch)

    # ---- the windows ---------------------------------------------------------------------------------------------

    def begins_batch(self, batch: Any, batch_idx: int) -> None:
        """Record the beginning of a batch. At the beginning of a window, record the window's first step and the live
        bytes by kind.
        """
        own = self.recorder
        self.ledger.set_up = self.ledger.set_up or len(self.ledger.events)
        if batch_idx % self._window == 0:
            gc.collect()  # free the reference cycles of the previous window
            own.mark([local_shard(each) for each in self.module.parameters() if not each.is_meta], PARAMETERS)
            own.mark([local_shard(each) for each in self.module.buffers() if not each.is_meta], BUFFERS)
            self._optimizers = list(self.trainer.strategy.optimizers)
            self._mark_states()
            for optimizer in self._optimizers if self.case.foreach else ():
                for group in optimizer.param_groups:
                    if group.get("foreach", 0) is None and not group.get("fused"):
                        group["foreach"] = True
            self.note("start")
            self._first = len(self.ledger.events), len(self.ledger.steps)
        own.mark(_tensors(batch), BATCH)
        own.phase = "forward"

    def note(self, hook: str) -> None:
        """Record the live bytes at a hook. These bytes replace the bytes of the previous batch."""
        self._live[hook] = sum(self.recorder.sizes.values())

    def ends_batch(self, batch_idx: int) -> None:
        """Record the end of a batch. After the last batch, compute the result and end the fit."""
        self.recorder.phase = "optimizer"
        if batch_idx + 1 == self._window and self._arrivals:
            self._divide_by_arrival()
        if batch_idx + 1 < self._window * WINDOWS:
            return
        if self.values.records:
            raise _EndedError
        self._mark_gradients()
        events, steps = self._first
        allows_tf32 = torch.get_float32_matmul_precision() != "highest"
        self.result = measured(
            self.ledger, events, tuple(self.blocks), _on_host(self.trainer.strategy), lists=self.lists,
            recorded=Recorded(finished(self.ledger, steps), self._is_compiled, allows_tf32, PIPELINE.schedule),
            batches=self.batches, batch_size=self.batch_size, live=self._live, classes=self._classes,
        )  # fmt: skip
        for handle in (*self._handles, *self.recorder.handles):
            handle.remove()
        raise _EndedError

    def _arrived(self, parameter: Tensor) -> None:
        if id(parameter) not in ARRIVED:
            ARRIVED.append(id(parameter))

    def _divide_by_arrival(self) -> None:
        """Divide the gradients into buckets in the order in which they were computed, as DDP does before its second
        window.
        """
        for handle in self._arrivals:
            handle.remove()
        strategy = self.trainer.strategy
        # The loop still holds the first DDP wrapper with its buffers. These buffers are not counted, because a real run
        # has only one wrapper.
        self.recorder.forget(EXCHANGED)
        wrap_again(strategy, self.module)
        strategy.driver.rebind()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._mark_gradients()
        self.recorder.phase = "optimizer"

    def _after_step(self, *_: Any) -> None:
        self._mark_states()

    def _mark_states(self) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                self.recorder.mark([local_shard(each) for each in _tensors(state)], OPTIMIZER)

    def _mark_gradients(self) -> None:
        found = [each.grad for each in self.module.parameters() if each.grad is not None]
        self.recorder.mark([local_shard(each) for each in found], GRADIENTS)


def _owns_step(strategy: Any) -> bool:
    return overrides(strategy, "bind_step", Step)


def _on_host(strategy: Any) -> tuple[str, ...]:
    """Return the kinds of memory that the strategy keeps on the host."""
    return (PARAMETERS, GRADIENTS, OPTIMIZER) if strategy.agreed_options().get("cpu_offload") else ()


def program_files(program: str) -> Callable[[str], bool]:
    """Return a function that tells whether a file is a part of the program. Installed files and Python's own files are
    not parts of the program.
    """
    installed = [*site.getsitepackages(), sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])]
    installed += [str(Path(torch.__file__).parent)]

    def is_program(path: str) -> bool:
        if not path.endswith(".py") or path.startswith("<"):
            return False
        return os.path.realpath(path) == os.path.realpath(program) or not path.startswith(tuple(installed))

    return is_program
