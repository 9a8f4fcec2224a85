"""A plan in motion: the device, the precision and the optimizer step, for the Trainer and for loops of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.errors import NotSupportedError
from drivetrain.introspect import overrides
from drivetrain.plan import Plan, resolve
from drivetrain.precision.precision import ClipAlgorithm, Precision
from drivetrain.settings import Settings
from drivetrain.strategies.strategy import Strategy
from drivetrain.tree import move


class Engine:
    """What drives a model, without a loop.

    ::

        engine = Engine(precision="bf16-mixed")
        model, optimizer = engine.setup(model, optimizer)
        for batch in loader:
            with engine.autocast():
                loss = model(engine.to_device(batch)).mean()
            optimizer.zero_grad()
            engine.backward(loss)
            engine.clip_gradients(optimizer, 1.0)
            optimizer.step()

    Args:
        accelerator, strategy, devices, precision, plugins: as the Trainer's.
        plan: a plan that is already resolved; the other arguments are then ignored.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        precision: int | str | None = None,
        plugins: Any | list[Any] | None = None,
        plan: Plan | None = None,
    ) -> None:
        if plan is None:
            plan = resolve(
                Settings(
                    accelerator=accelerator, strategy=strategy, devices=devices, precision=precision, plugins=plugins
                )
            )
        self.plan = plan
        self.strategy = plan.strategy if isinstance(plan.strategy, Strategy) else _build(plan.strategy, plan)
        if self.strategy.accelerator is None:
            self.strategy.accelerator = plan.accelerator
        self.strategy.parallel_devices = plan.devices
        self.strategy.precision_plugin = plan.precision
        if plan.checkpoint_io is not None:
            self.strategy.checkpoint_io = plan.checkpoint_io

    @property
    def accelerator(self) -> Accelerator:
        """The kind of hardware."""
        assert self.strategy.accelerator is not None  # the constructor has filled it in
        return self.strategy.accelerator

    @property
    def precision(self) -> Precision:
        """The numeric precision."""
        return self.strategy.precision_plugin

    @property
    def device(self) -> torch.device:
        """The device this process computes on."""
        return self.strategy.root_device

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """A reusable context for forward passes, or ``None`` where the precision needs none."""
        return self.precision.forward_context(self.accelerator.autocast_device_type)

    def autocast(self) -> AbstractContextManager[Any]:
        """The same for a ``with`` statement."""
        return self.forward_context() or nullcontext()

    def input_conversion(self) -> Callable[[Any], Any] | None:
        """Brings a batch's numbers into this precision, or ``None`` where they stay as they are."""
        return self.precision.convert_input if overrides(self.precision, "convert_input", Precision) else None

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """A block in which new layers are made on the device and in the precision of the run.

        Args:
            empty_init: leave parameters as the memory was, because a checkpoint will fill them; ``None``: no.
        """
        with ExitStack() as stack:
            stack.enter_context(self.strategy.tensor_init_context())
            if (context := self.precision.init_context()) is not None:
                stack.enter_context(context)
            if empty_init:
                stack.enter_context(_NoInit())
            yield

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Put ``module`` on the device, in this precision; return it, with ``optimizers`` behind it if there are any.

        The optimizers keep working wherever moving a module keeps its parameter objects, as torch does by default.
        """
        if self.precision.scales_loss:
            raise NotSupportedError(
                f"Engine.setup with precision={self.precision.name!r}: the optimizer's step would have to unscale the "
                'gradients, which this version only does in a Trainer. Write precision="bf16-mixed".'
            )
        self.strategy.connect(module)
        self.strategy.setup_environment()
        self.strategy.setup(None)
        self.strategy.optimizers = list(optimizers)
        return (self.strategy.model, *optimizers) if optimizers else self.strategy.model

    def setup_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Iterable[Any]) -> None:
        """Hand over what ``configure_optimizers`` made after the model was set up."""
        self.strategy.optimizers = list(optimizers)
        self.strategy.lr_scheduler_configs = list(schedulers)
        self.precision.bind(self.strategy.optimizers)

    def to_device(self, obj: Any) -> Any:
        """A batch, with every tensor in it on the device."""
        return move(obj, self.device)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``, as the precision wants it."""
        self.precision.backward(loss, *args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the gradients of this optimizer's parameters, by their total L2 norm or each by value."""
        self.precision.clip_gradients(optimizer, clip_val, algorithm)

    def teardown(self) -> None:
        """Move everything to the host and free the device."""
        self.strategy.teardown()


class _NoInit(TorchFunctionMode):
    """``torch.nn.init`` does nothing inside."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _build(strategy: type[Strategy], plan: Plan) -> Strategy:
    return strategy(accelerator=plan.accelerator, precision_plugin=plan.precision, checkpoint_io=plan.checkpoint_io)
