"""A handwritten training loop for a :class:`~tests.random_programs.programs.Program`.

The loop uses torch alone, and is the reference for a Trainer's results. The loop is optimised for reading, not for
speed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from tests.random_programs.programs import Program, loss_of
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.torch_private import states_of_scaler


@dataclass
class Outcome:
    """The results of a program.

    Attributes:
        parameters, buffers: the network's parameters and buffers, by name.
        optimizers, schedulers: the results of their ``state_dict``.
        losses, rates: the loss and the first learning rate, at each call of the training step.
        rows: the logged values: ``(step, {name: value})``, in order; ``None`` on a rank without a logger.
        metrics: the last value of each logged name.
        generators: the states of the random generators at the end, by name.
        counters: optimizer steps, epochs, batches.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    rows: list[tuple[int, dict[str, float]]] | None = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def keep(self, network: nn.Module, optimizers: list[Optimizer], schedulers: list[Any], loader: Any) -> None:
        """Keep the states of network, optimizers, schedulers and random generators at the end of a run; ``loader`` is
        the training loader.
        """
        self.parameters = {name: value.detach().cpu() for name, value in network.named_parameters()}
        self.buffers = {name: value.detach().cpu() for name, value in network.named_buffers()}
        self.optimizers = [optimizer.state_dict() for optimizer in optimizers]
        self.schedulers = [scheduler.state_dict() for scheduler in schedulers]
        self.generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if (generator := getattr(loader, "generator", None)) is not None:
            self.generators["loader"] = generator.get_state()
        if (passes := getattr(loader, "passes", None)) is not None:
            self.generators["complete passes"] = passes


def run_plain_loop(program: Program, device: torch.device) -> Outcome:
    """Run ``program`` on ``device``, in one process."""
    program.seed_everything()
    loop = _Loop(program, device)
    while loop.epoch < program.max_epochs and not loop.done:
        loop.train_epoch()
    loop.outcome.rows = loop.rows
    loop.outcome.counters = {"steps": loop.steps, "epochs": loop.epoch, "batches": loop.batches}
    loop.outcome.keep(loop.network, loop.optimizers, loop.schedulers, loop.loader)
    return loop.outcome


class _Loop:
    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.device = program, device
        self.network = program.network().to(device, program.dtype)
        self.optimizers = program.optimizers(self.network)
        self.schedulers = [schedule.build(self.optimizers[0]) for schedule in program.schedules]
        self.loader = program.training_loader()
        self.val_loader = program.validation_loader() if program.val_samples else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=program.precision == "16-mixed")
        self.outcome = Outcome()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.epoch = self.steps = self.batches = self.windows = 0
        self.batch_idx = 0
        self.losses_in_window = 0
        self.total_weight = 0.0
        self.sums = [0.0, 0.0]  # over this epoch, the sum of loss times batch size, and the sum of batch sizes

    @property
    def done(self) -> bool:
        return 0 <= self.program.max_steps <= self.steps

    # ---- an epoch ------------------------------------------------------------------------------------------------

    def train_epoch(self) -> None:
        program = self.program
        self.network.train()
        self.sums = [0.0, 0.0]
        if "on_train_epoch_start" in program.hooks:
            torch.rand(())
        was_last = was_cut = False
        in_window = 0
        batches = self.batches_of_epoch()
        for batch_idx, (batch, is_last, left) in enumerate(batches):
            if program.cut == (self.epoch, batch_idx):
                was_cut = True
                break
            self.batch_idx, was_last = batch_idx, is_last
            if in_window == 0:
                self.begin_window(min(program.accumulate, left))
            in_window += 1
            window_ends = is_last or in_window == program.accumulate
            steps_before = self.steps
            if program.manual:
                self.manual_batch(batch)
            else:
                self.automatic_batch(batch, window_ends)
            self.batches += 1
            stepped = self.steps > steps_before
            if stepped:
                self.step_schedulers("step", self.steps, watching=False)
            if is_last:
                self.step_schedulers("epoch", self.epoch + 1, watching=False)
            if window_ends:
                in_window = 0
                self.windows += 1
            if "on_train_batch_end" in program.hooks:
                torch.rand(()), random.random()
            if is_last:
                next(batches, None)  # read the loader to its end before the validation, as the Trainer does
            if window_ends and self.windows % program.log_every_n_steps == 0:
                self.rows.append((self.windows - 1, {"loss": self.outcome.losses[-1]}))
            if self.validation_is_due(batch_idx, is_last):
                self.validate(window=self.windows if in_window else self.windows - 1)
            if window_ends and stepped:
                self.step_schedulers("step", self.steps, watching=True)
            if self.done:
                break
        self.end_epoch(was_last, was_cut)

    def end_epoch(self, was_last: bool, was_cut: bool) -> None:
        if was_cut:
            self.step_schedulers("epoch", self.epoch + 1, watching=False)
        if was_last or not self.done:
            self.step_schedulers("epoch", self.epoch + 1, watching=True)
        mean = self.sums[0] / self.sums[1]
        self.outcome.metrics |= {"mean_loss": mean, "loss": self.outcome.losses[-1]}
        self.rows.append((max(self.windows - 1, 0), {"mean_loss": mean}))
        self.epoch += 1

    def batches_of_epoch(self) -> Iterator[tuple[Tensor, bool, int]]:
        """Yield each batch, whether it is the epoch's last, and how many batches remain, including this one."""
        limit = self.program.limit_train
        # the loader can be read completely in advance, because training does not influence its random numbers
        if not self.program.has_length:
            batches = list(self.loader if isinstance(limit, float) else islice(self.loader, limit))
            for index, batch in enumerate(batches):
                yield batch, index == len(batches) - 1, len(batches) - index
            return
        wanted = self.length()
        batches = iter(self.loader)
        for index in range(wanted):
            yield next(batches), index == wanted - 1, wanted - index
        if wanted == len(self.loader):
            next(batches, None)  # read the loader to its end, as a for statement would

    def length(self) -> int:
        """Return the number of batches in an epoch, if the loader has a length."""
        limit, length = self.program.limit_train, len(self.loader)
        return min(limit, length) if isinstance(limit, int) else int(length * limit)

    # ---- a batch -------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = self.program.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def training_step(self, batch: Tensor) -> tuple[Tensor | None, float]:
        """Return the loss, or ``None``, and the loss's weight, which is 1 if losses are not weighted."""
        program = self.program
        with self.autocast():
            loss = loss_of(self.network, batch.to(self.device, program.dtype))
        self.outcome.losses.append(float(loss.detach()))
        self.outcome.rates.append(self.optimizers[0].param_groups[0]["lr"])
        self.sums[0] += self.outcome.losses[-1] * len(batch)
        self.sums[1] += len(batch)
        weight = program.weight(batch, self.epoch, self.batch_idx)
        if not program.gives_loss(self.epoch, self.batch_idx) or (weight == 0 and program.loss == "weighted"):
            return None, 1.0
        return loss, 1.0 if weight is None else weight

    def begin_window(self, size: int) -> None:
        self.losses_in_window, self.total_weight, self.window_size = 0, 0.0, size

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none="optimizer_zero_grad" not in self.program.hooks)

    def automatic_batch(self, batch: Tensor, window_ends: bool) -> None:
        program, optimizer = self.program, self.optimizers[0]
        if program.optimizer == "lbfgs":

            def closure() -> Any:
                self.begin_window(1)
                self.add_gradients(batch, zeroes=True)
                self.finish_gradients()
                return self.outcome.losses[-1]

            optimizer.step(closure)
            self.steps += 1
            return
        self.add_gradients(batch, zeroes=self.losses_in_window == 0 and self.batch_idx % program.accumulate == 0)
        if not window_ends or self.losses_in_window == 0:
            return
        if "optimizer_step" in program.hooks and program.steps_closure_only(self.epoch, self.batch_idx):
            return
        self.scaler.unscale_(optimizer)
        self.finish_gradients()
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        # a smaller scale means that gradients overflowed and no optimizer stepped
        self.steps += self.scaler.get_scale() >= before

    def add_gradients(self, batch: Tensor, zeroes: bool) -> None:
        loss, weight = self.training_step(batch)
        if zeroes:
            self.zero_grad()
        if loss is None:
            return
        self.losses_in_window += 1
        self.total_weight += weight
        if self.program.loss in ("weighted", "weighted_tensor"):
            if self.window_size > 1 or weight == 0:
                loss = loss * weight
        elif self.program.tolerance == 0 and self.window_size > 1:
            loss = loss / self.window_size
        self.backward(loss)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if "on_after_backward" in self.program.hooks:
            shift_gradients(self.network)

    def finish_gradients(self) -> None:
        """Divide the sum of the gradients of the window (the batches of one optimizer step), then run the hooks before
        a step and clip.
        """
        program, optimizer = self.program, self.optimizers[0]
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        divisor = 1.0
        if program.loss in ("weighted", "weighted_tensor"):
            divisor = (self.total_weight or 1.0) if self.window_size > 1 else 1.0
        elif program.tolerance > 0:
            divisor = self.losses_in_window
        for parameter in parameters if divisor != 1 else ():
            assert parameter.grad is not None  # all parameters in this list have a gradient
            parameter.grad /= divisor
        if "on_before_optimizer_step" in program.hooks:
            scale_gradients(optimizer)
        clip_val, algorithm = program.clip_val, program.clip_algorithm
        if "configure_gradient_clipping" in program.hooks:
            clip_val, algorithm = 0.1, "norm"
        if clip_val is not None and algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        elif clip_val is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    def manual_batch(self, batch: Tensor) -> None:
        """Do what ``training_step`` does in manual optimization, under the default dtype that a Trainer sets for it:
        with precision "64-true", new tensors are float64.
        """
        torch.set_default_dtype(self.program.dtype)
        try:
            self.step_by_hand(batch)
        finally:
            torch.set_default_dtype(torch.float32)

    def step_by_hand(self, batch: Tensor) -> None:
        loss, _ = self.training_step(batch)
        assert loss is not None  # these programs always have a loss
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if (self.batch_idx + 1) % self.program.manual_every:
            return
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            if "on_before_optimizer_step" in self.program.hooks:
                scale_gradients(optimizer)
            self.scaler.step(optimizer)
        states = states_of_scaler(self.scaler).values() if self.scaler.is_enabled() else ()
        overflows = sum(any(float(found) > 0 for found in state["found_inf_per_device"].values()) for state in states)
        before = self.scaler.get_scale()
        self.scaler.update()
        assert (self.scaler.get_scale() < before) == (overflows > 0)
        self.steps += len(self.optimizers) - overflows
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    # ---- schedulers and validation -------------------------------------------------------------------------------

    def step_schedulers(self, interval: str, count: int, watching: bool) -> None:
        for schedule, scheduler in zip(self.program.schedules, self.schedulers, strict=True):
            if schedule.interval != interval or schedule.watches is not watching or count % schedule.frequency:
                continue
            if not watching:
                scheduler.step()
            elif "val_loss" in self.outcome.metrics:
                scheduler.step(self.outcome.metrics["val_loss"])

    def validation_is_due(self, batch_idx: int, is_last: bool) -> bool:
        program = self.program
        every, every_n_epoch = program.val_check_interval, program.check_val_every_n_epoch
        if self.val_loader is None:
            return False
        if every_n_epoch is None:
            return self.batches % int(every) == 0
        if (self.epoch + 1) % every_n_epoch:
            return False
        if every == 1.0 and isinstance(every, float):
            return is_last
        if isinstance(every, float):
            every = max(1, int(self.length() * every))
        return (batch_idx + 1) % every == 0

    @torch.no_grad()
    def validate(self, window: int) -> None:
        self.network.eval()
        limit, loader = self.program.limit_val, self.val_loader
        assert loader is not None  # validation was due
        sums = [0.0, 0.0]
        for index, batch in enumerate(loader):
            with self.autocast():
                loss = loss_of(self.network, batch.to(self.device, self.program.dtype))
            sums[0] += float(loss) * len(batch)
            sums[1] += len(batch)
            if isinstance(limit, int) and index + 1 == limit:
                break
        self.network.train()
        self.outcome.metrics["val_loss"] = sums[0] / sums[1]
        self.rows.append((window, {"val_loss": sums[0] / sums[1]}))


def scale_gradients(optimizer: Optimizer) -> None:
    """Change the gradients as the ``on_before_optimizer_step`` of programs does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad *= 0.5


def shift_gradients(network: nn.Module) -> None:
    """Change the gradients as the ``on_after_backward`` of programs does."""
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.001
