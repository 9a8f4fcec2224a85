"""Train random programs with a Trainer and with a plain loop, and compare everything that they computed."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tests.random_programs.plain_loop import Outcome, run_plain_loop, scale_gradients, shift_gradients
from tests.random_programs.programs import PRECISIONS, Program, loss_of, random_program
from torch import Tensor

from drivetrain.errors import ConfigurationError
from drivetrain.loggers.dummy import DummyLogger
from drivetrain.module.losses import WeightedLoss
from drivetrain.module.module import LightningModule
from drivetrain.precision.precision import Precision
from drivetrain.trainer.trainer import Trainer


def check_against_plain_loop(
    programs: int = 20, seed: int = 0, *, device: str | torch.device = "cpu", **trainer_arguments: Any
) -> None:
    """Train random programs with the Trainer and with a plain loop; both must compute the same results.

    The programs vary data, network, optimizers, schedulers, precision, limits, validation, logging and the hooks that
    the module overrides. The function compares parameters, buffers, the states of optimizers, schedulers and random
    generators, every loss and learning rate, every logged row, and the counters. With one process everything is equal
    to the last bit, except for a program's ``tolerance``; with several processes to 1e-9.

    With a ``precision`` argument, or a precision of a test's own in ``plugins``, only programs of this precision are
    trained; that precision's ``name`` says which.

    With several processes, call the function on every rank, with ``use_distributed_sampler=True`` (the default).

    Args:
        programs: the number of programs.
        seed: the seed of the first program; each further program has the next number.
        device: the device of the plain loop.
        trainer_arguments: the Trainer's. They override the programs' arguments. The plain loop does not get these
            arguments, so an argument that changes numbers, such as ``max_epochs``, causes a difference.

    Raises:
        ConfigurationError: no program has the requested precision.
        AssertionError: a program's results differ. The message shows the program and the differences;
            ``random_program(seed)`` returns the same program again.
    """
    shared = _processes(trainer_arguments) > 1
    for program in _programs(programs, seed, shared, _precision(trainer_arguments)):
        with warnings.catch_warnings():
            # ignore torch's warnings, for example about schedulers whose optimizer has not stepped yet
            warnings.simplefilter("ignore")
            expected = run_plain_loop(program, torch.device(device))
            found = run_trainer(program, **({"split_batches": True} if shared else {}), **trainer_arguments)
        if differing := differences(found, expected, 1e-9 if shared else program.tolerance, whole=not shared):
            shown = "\n  ".join(differing[:10])
            raise AssertionError(f"The Trainer and a plain loop computed different numbers with\n{program}:\n  {shown}")


def _programs(count: int, seed: int, shared: bool, precision: str | None) -> Iterator[Program]:
    """Yield ``count`` programs with seeds from ``seed`` on; with ``precision``, only programs of this precision."""
    drawn = (random_program(number, exactly_shared=shared) for number in itertools.count(seed))
    return itertools.islice((one for one in drawn if precision in (None, one.precision)), count)


def _precision(trainer_arguments: Mapping[str, Any]) -> str | None:
    """Return the precision that all programs must have, or ``None``. It is the ``name`` of a Precision in ``plugins``,
    or the ``precision`` argument.
    """
    plugins = trainer_arguments.get("plugins") or []
    names = [one.name for one in (plugins if isinstance(plugins, list) else [plugins]) if isinstance(one, Precision)]
    asked = names[0] if names else trainer_arguments.get("precision")
    drawn = ("64-true",) if _processes(trainer_arguments) > 1 else PRECISIONS
    if asked is not None and asked not in drawn:
        raise ConfigurationError(
            f"check_against_plain_loop has no program in precision={asked!r}. Write one of "
            f"{', '.join(map(repr, drawn))}; a Precision of your own has it as its name."
        )
    return asked


def _processes(trainer_arguments: Mapping[str, Any]) -> int:
    devices = trainer_arguments.get("devices", 1)
    return (devices if isinstance(devices, int) else 1) * int(trainer_arguments.get("num_nodes", 1))


# ---- a program in the Trainer ----------------------------------------------------------------------------------------


class _ProgramModule(LightningModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.network = program.network()
        self.automatic_optimization = not program.manual
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.loaders: list[Any] = []  # the training loaders that were created

    def configure_optimizers(self) -> Any:
        optimizers = self.program.optimizers(self.network)
        schedulers = [
            {
                "scheduler": schedule.build(optimizers[0]),
                "interval": schedule.interval,
                "frequency": schedule.frequency,
                **({"monitor": "val_loss", "strict": False} if schedule.watches else {}),
            }
            for schedule in self.program.schedules
        ]
        return optimizers, schedulers

    def make_loader(self) -> Any:
        self.loaders.append(self.program.training_loader())
        return self.loaders[-1]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        program = self.program
        loss = loss_of(self.network, batch)
        self.losses.append(float(loss.detach()))
        optimizers = self.trainer.optimizers
        self.rates.append(optimizers[0].param_groups[0]["lr"])
        self.log("loss", loss, on_step=True, on_epoch=False)
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if program.manual:
            self._step_by_hand(loss, batch_idx)
            return None
        if not program.gives_loss(self.current_epoch, batch_idx):
            return None
        weight = program.weight(batch, self.current_epoch, batch_idx)
        if weight is None:
            return {"loss": loss, "size": len(batch)} if program.loss == "mapping" else loss
        as_tensor = program.loss == "weighted_tensor"
        return WeightedLoss(loss, torch.tensor(weight, dtype=loss.dtype, device=loss.device) if as_tensor else weight)

    def _step_by_hand(self, loss: Tensor, batch_idx: int) -> None:
        self.manual_backward(loss)
        if (batch_idx + 1) % self.program.manual_every == 0:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.network, batch), sync_dist=True)


class _Overridden(_ProgramModule):
    """Overrides of all hooks that a program may override. Each program's module gets only the overrides that the
    program names.
    """

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.program.steps_closure_only(epoch, batch_idx):
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        scale_gradients(optimizer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step() if metric is None else scheduler.step(metric)

    def on_train_epoch_start(self) -> None:
        torch.rand(())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.program.cut == (self.current_epoch, batch_idx) else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.rand(()), random.random()

    def on_after_backward(self) -> None:
        shift_gradients(self.network)

    def train_dataloader(self) -> Any:
        return self.make_loader()

    def val_dataloader(self) -> Any:
        return self.program.validation_loader()


def program_module(program: Program) -> LightningModule:
    """Return the module of ``program``, with a class that overrides the program's hooks."""
    names = set(program.hooks)
    if program.cut is not None:
        names.add("on_train_batch_start")
    if not program.passed:
        names |= {"train_dataloader", "val_dataloader"} if program.val_samples else {"train_dataloader"}
    overridden = {name: vars(_Overridden)[name] for name in names}
    return type("ProgramModule", (_ProgramModule,), overridden)(program)


class _Rows(DummyLogger):
    """A logger that keeps the logged values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        kept = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if kept:
            self.rows.append((0 if step is None else step, kept))


def arguments_of(program: Program) -> dict[str, Any]:
    """Return the Trainer's arguments for ``program``, with output turned off."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "precision": program.precision,
        "accumulate_grad_batches": program.accumulate,
        "gradient_clip_val": program.clip_val,
        "gradient_clip_algorithm": program.clip_algorithm,
        "max_epochs": program.max_epochs,
        "max_steps": program.max_steps,
        "limit_train_batches": program.limit_train,
        "limit_val_batches": program.limit_val,
        "val_check_interval": program.val_check_interval,
        "check_val_every_n_epoch": program.check_val_every_n_epoch,
        "log_every_n_steps": program.log_every_n_steps,
        "num_sanity_val_steps": program.sanity_steps,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def run_trainer(program: Program, **trainer_arguments: Any) -> Outcome:
    """Run ``program`` in a Trainer with its arguments, overridden by ``trainer_arguments``."""
    rows = _Rows()
    program.seed_everything()
    module: Any = program_module(program)
    arguments = {"logger": rows, **arguments_of(program), **trainer_arguments}
    if "precision" not in trainer_arguments and _precision(trainer_arguments) is not None:
        del arguments["precision"]  # a plugin sets the precision, so the argument must not
    trainer = Trainer(**arguments)
    loaders: dict[str, Any] = {}
    if program.passed:
        loaders["train_dataloaders"] = module.make_loader()
        loaders["val_dataloaders"] = program.validation_loader() if program.val_samples else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ProgramModule has a validation_step", UserWarning)
        trainer.fit(module, **loaders)
    progress = trainer.progress
    outcome = Outcome(losses=module.losses, rates=module.rates, rows=rows.rows if trainer.is_global_zero else None)
    outcome.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    outcome.counters = {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "batches": progress.total_batches,
    }
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    outcome.keep(module.network, list(trainer.optimizers), schedulers, module.loaders[0])
    return outcome


# ---- comparing -----------------------------------------------------------------------------------------------------


def differences(found: Outcome, expected: Outcome, tolerance: float = 0.0, whole: bool = True) -> list[str]:
    """Return one line for each value of ``found`` that differs from ``expected``.

    Args:
        found: the Trainer's results.
        expected: the plain loop's results.
        tolerance: the allowed relative difference of numbers; 0: bit-equal.
        whole: also compare what is only comparable with a single process: losses, values logged in a step, and random
            generators.
    """
    outcomes, parts = (found, expected), ["parameters", "buffers", "optimizers", "rates", "counters"]
    if whole:
        parts += ["losses", "generators"]
        logged: list[dict[str, Any]] = [{"rows": one.rows, "metrics": one.metrics} for one in outcomes]
    else:
        logged = [_without_step_values(one) for one in outcomes]
    left, right = ({name: getattr(one, name) for name in parts} for one in outcomes)
    for outcome, part in zip(outcomes, logged, strict=True):
        if found.rows is None:
            part.pop("rows")
        # compare these as approximately as the logged means, because a scheduler may store the best mean
        part["schedulers"] = outcome.schedulers
    # Means of float32 values are exact; the last bits of float64 means depend on the order of the sum.
    return [*_differing("", left, right, tolerance), *_differing("", logged[0], logged[1], max(tolerance, 1e-14))]


def _without_step_values(outcome: Outcome) -> dict[str, Any]:
    """Return the logged values without those named "loss", which are losses of single batches and differ between
    ranks.
    """
    rows = [(step, {name: value for name, value in row.items() if name != "loss"}) for step, row in outcome.rows or ()]
    metrics = {name: value for name, value in outcome.metrics.items() if name != "loss"}
    return {"rows": [(step, row) for step, row in rows if row], "metrics": metrics}


def _differing(place: str, left: Any, right: Any, tolerance: float) -> Iterator[str]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if set(left) != set(right):
            yield f"{place}: {sorted(map(str, left))} instead of {sorted(map(str, right))}"
            return
        for key in left:
            yield from _differing(f"{place}.{key}".lstrip("."), left[key], right[key], tolerance)
    elif isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype
        if same and not torch.equal(left, right):
            same = bool(tolerance) and torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
            same = same or (bool(left.is_floating_point()) and torch.equal(left.nan_to_num(), right.nan_to_num()))
        if not same:
            yield f"{place}: {_brief(left)} instead of {_brief(right)}"
    elif isinstance(left, Sequence) and isinstance(right, Sequence) and not isinstance(left, (str, bytes)):
        if len(left) != len(right):
            yield f"{place}: {len(left)} entries instead of {len(right)}: {_brief(left)} instead of {_brief(right)}"
            return
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differing(f"{place}[{index}]", one, other, tolerance)
    elif isinstance(left, float) and isinstance(right, (float, int)):
        equal = left == right or (math.isnan(left) and math.isnan(right))
        if not equal and not math.isclose(left, right, rel_tol=max(tolerance, 0.0), abs_tol=tolerance):
            yield f"{place}: {left!r} instead of {right!r}"
    elif callable(left) and callable(right):
        return  # a scheduler's function
    elif left != right:
        yield f"{place}: {_brief(left)} instead of {_brief(right)}"


def _brief(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 120 else text[:117] + "..."
