"""The methods with which a strategy changes parts of a step, or owns the whole step.

A method ("verb") that is not overridden is not called: the loop binds what it would do. An override counts on
the class and on the instance, also one that is set during a run (from the next batch on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.compiled import compiled_method
from drivetrain.base.introspect import defined_by_user, overrides
from drivetrain.base.restoring import WrongForm
from drivetrain.base.tree import move
from drivetrain.precision.familiar import differentiate, end_step
from drivetrain.precision.precision import Precision
from drivetrain.strategies.facts import Facts
from drivetrain.strategies.redirection import redirected

if TYPE_CHECKING:
    from drivetrain.strategies.local_passes import LocalPasses

OwnStep = Callable[[Any, int, int, bool, int], "tuple[Any, int]"]
"""``step(batch, batch_idx, index_in_window, last, size)`` of a strategy that owns its step.

``index_in_window`` counts the window's batches from 0, ``last`` says that the window ends with this one, and ``size``
is the number of batches that the window is expected to hold. Returns what ``training_step`` returned, for the hooks at
the batch's end, and how many optimizer steps were made.
"""


@dataclass(frozen=True)
class StepParts:
    """The operations of a training step, for a strategy that composes the step itself.

    With one batch per window, the Trainer does this::

        parts.begin(size=1)
        output = parts.training_step(batch, batch_idx)
        loss = parts.loss_of(output, index=0, last=True)
        if loss is not None:
            parts.backward(loss)
            parts.before_step()
            steps = int(parts.optimizer_step())

    These operations call the hooks in :attr:`HOOKS`, in the usual places.

    Attributes:
        training_step: ``(batch, batch_idx)``: calls the module's ``training_step`` in the precision, through the
            wrapper around the module if there is one. The batch may be a part of one.
        begin: ``(size, optimizer)``: starts a window of ``size`` backward passes; clears the optimizer's gradients.
        loss_of: ``(output, index, last)``: returns the loss in the output of ``training_step``, divided or weighted as
            its share of the window; ``None`` if there is none. ``index`` counts the window's backward passes from 0.
        backward: ``(loss)``: computes gradients, scaled if the precision scales.
        accumulating: a context around ``training_step`` and ``backward`` in which gradients stay on this rank; the
            window's last pass exchanges them. Outside of it every pass does. See :meth:`Stepping.accumulating`.
        before_step: ``(optimizer)``: unscales and weights the finished gradients, calls the hooks, clips.
        optimizer_step: ``(optimizer)``: steps it, by the strategy's ``optimizer_step`` if it is overridden; returns
            whether it really stepped, because a precision may skip a step.
        module, model: the user's module, and the object that the strategy made of it.
        optimizers: those of the run; operations that take an optimizer use the first by default.
        precision: that of the run.
        data: the group of ranks that see different samples.
    """

    HOOKS: ClassVar[frozenset[str]] = frozenset(
        {
            "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
            "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients",
        }
    )  # fmt: skip

    training_step: Callable[[Any, int], Any]
    begin: Callable[..., None]
    loss_of: Callable[[Any, int, bool], Tensor | None]
    backward: Callable[..., None]
    accumulating: Callable[[], AbstractContextManager[None]]
    before_step: Callable[..., None]
    optimizer_step: Callable[..., bool]
    module: nn.Module
    model: nn.Module
    optimizers: Sequence[Optimizer]
    precision: Precision
    data: Any


@dataclass
class Driver:
    """Functions of the running loop that the verbs call; unset in an Engine's loop.

    Attributes:
        differentiate: ``(loss, *args, **kwargs)``: scales it, calls the hooks around backward and the module's own.
        transfer: ``(batch, device, dataloader_idx)``: the transfer hooks of the module and the datamodule.
        steps: the module's steps by name, as they were bound.
        rebind: called when a verb was replaced: bind the step again.
        exchanges_always: :meth:`Stepping.accumulating` was called: gradients are exchanged in every backward pass.
    """

    differentiate: Callable[..., Any] | None = None
    transfer: Callable[[Any, torch.device, int], Any] | None = None
    steps: dict[str, Callable[..., Any]] = field(default_factory=dict)
    rebind: Callable[[], None] | None = None
    exchanges_always: bool = False


class Stepping:
    """The methods of a step ("verbs"). Each is complete: ``super()`` in an override does the usual thing."""

    @property
    def also_overrides(self) -> frozenset[str]:
        """The verbs whose part in the precision is overridden: they are called as if they were overridden here."""
        precision = self.precision_plugin
        backward = any(overrides(precision, name, Precision) for name in ("pre_backward", "post_backward"))
        verbs = {
            "backward": backward or defined_by_user(precision, "backward"),
            "optimizer_step": defined_by_user(precision, "optimizer_step"),
        }
        return frozenset(name for name, overridden in verbs.items() if overridden)

    @property
    def enters_step_contexts(self) -> bool:
        """Whether the contexts of the four steps are made by the user, and made again for each step."""
        names = ("forward_context", *_STEP_CONTEXTS.values())
        return any(defined_by_user(self.precision_plugin, name) for name in names)

    facts: Facts
    lightning_module: Any
    model: nn.Module | None
    precision_plugin: Precision
    driver: Driver

    @property
    def root_device(self) -> torch.device:
        """The device this process computes on."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _VERBS and (driver := self.__dict__.get("driver")) is not None and driver.rebind is not None:
            driver.rebind()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in _VERBS and (driver := self.__dict__.get("driver")) is not None and driver.rebind is not None:
            driver.rebind()

    # ---- the four steps ------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``, with the arguments that it takes."""
        with self.precision_plugin.train_step_context():
            return self._module_step("training_step")(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step``."""
        with self.precision_plugin.val_step_context():
            return self._module_step("validation_step")(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step``."""
        with self.precision_plugin.test_step_context():
            return self._module_step("test_step")(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step``."""
        with self.precision_plugin.predict_step_context():
            return self._module_step("predict_step")(*args, **kwargs)

    def post_training_step(self) -> None:
        """A ``training_step`` has returned; its backward pass is still to come."""

    def bind(self, name: str) -> Callable[..., Any]:
        """The module's method of this name, in a form whose call goes through what is wrapped around the module."""
        method = compiled_method(self.lightning_module, name)
        assert self.model is not None  # setup() came first
        return redirected(method, self.lightning_module, self.model, self.facts.calls_through_forward)

    def bound_step(self, name: str) -> Callable[..., Any]:
        """Return what runs the step of this name: the module's, or the strategy's own if it is overridden."""
        bound = self.driver.steps[name] = self.bind(name)
        step: Callable[..., Any] = getattr(self, name) if overrides(self, name, Stepping) else bound
        return self._in_step_context(name, step) if self.enters_step_contexts else step

    def _in_step_context(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        context = getattr(self.precision_plugin, _STEP_CONTEXTS[name])

        def step_in_context(*args: Any, **kwargs: Any) -> Any:
            with context():
                return step(*args, **kwargs)

        return step_in_context

    def _module_step(self, name: str) -> Callable[..., Any]:
        return self.driver.steps.get(name) or self.bind(name)

    # ---- a batch -------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batch on ``device``, by the transfer hooks of module and datamodule; ``None``: on the root device."""
        device = self.root_device if device is None else device
        if self.driver.transfer is None:
            return move(batch, device)
        return self.driver.transfer(batch, device, dataloader_idx)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """A backward pass begins."""

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, with everything that belongs to it: scaling, the hooks, the module's own ``backward``.

        Args:
            closure_loss: the loss, not scaled yet.
            optimizer: the optimizer of these gradients; ``None`` if it is not known.
            args, kwargs: for ``Tensor.backward``.

        Returns: ``closure_loss``.
        """
        precision, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        compute = self.driver.differentiate or self._differentiate
        differentiate(precision, closure_loss, module, optimizer, compute, *args, **kwargs)
        self.post_backward(closure_loss)
        return closure_loss

    def post_backward(self, closure_loss: Tensor) -> None:
        """A backward pass is done."""

    def local_passes(self) -> LocalPasses:
        """Return passes without an exchange between ranks, and the exchange after them, for ``split_on_oom``."""
        from drivetrain.strategies.local_passes import LocalPasses  # here, because few runs need it

        return LocalPasses()

    def before_manual_backward(self, loss: Tensor) -> None:
        """Called before a backward pass that user code starts itself, by ``manual_backward``."""

    def after_manual_backward(self) -> None:
        """It is done."""

    @property
    def differentiates_plainly(self) -> bool:
        """Whether ``loss.backward()`` is all there is to a backward pass, where no hooks are called."""
        verbs, precision = ("pre_backward", "backward", "post_backward"), self.precision_plugin
        plain = not (precision.scales_loss or overrides(precision, "backward", Precision))
        return plain and not any(overrides(self, verb, Stepping) for verb in verbs)

    def _differentiate(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        precision = self.precision_plugin
        precision.backward(precision.scale(loss) if precision.scales_loss else loss, *args, **kwargs)

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context whose backward passes leave gradients to this process, to be exchanged by a later one.

        A strategy that exchanges them in every backward pass, as sharded ones do, leaves it as it is.
        """
        self.driver.exchanges_always = True
        return nullcontext()

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """:meth:`accumulating` for the model of the run."""
        assert self.model is not None  # setup() came first
        return self.accumulating(self.model)

    def open_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of a window that is not complete, by parameter name: this rank's own, not copied.

        For a checkpoint, and for :meth:`rescale_gradients`. Override it where :meth:`accumulating` leaves gradients
        elsewhere than in ``parameter.grad``.
        """
        from drivetrain.strategies.sharded_state import local_shard  # here, so that importing the Trainer stays quick

        named = ((name, parameter.grad) for name, parameter in self.lightning_module.named_parameters())
        return {name: local_shard(gradient) for name, gradient in named if gradient is not None}

    def load_open_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`open_gradients` returned.

        Raises:
            WrongForm: a gradient has another shape than this strategy's.
        """
        from drivetrain.strategies.sharded_state import from_local_shard, local_shard

        for name, parameter in self.lightning_module.named_parameters():
            if name in gradients and gradients[name].shape != (shape := local_shard(parameter).shape):
                found = tuple(gradients[name].shape)
                raise WrongForm(f"[{name!r}]", f"is a gradient of shape {found}, and {tuple(shape)} is expected")
            parameter.grad = from_local_shard(gradients[name], parameter) if name in gradients else None

    def rescale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None, factor: float | Tensor) -> None:
        """Multiply the gradients that are there by ``factor``.

        A window does so when its losses have weights, and when it holds fewer batches than expected. Override it if the
        strategy keeps gradients where :meth:`open_gradients` cannot return them to be multiplied in place.

        Args:
            optimizer: of whose parameters; several: of all of theirs.
            factor: a number, or a tensor with one element.
        """
        if overrides(self, "open_gradients", Stepping):
            for gradient in self.open_gradients().values():
                gradient.mul_(factor)
            return
        optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        for group in (group for each in optimizers if each is not None for group in each.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients, on a window's first batch."""
        optimizer.zero_grad()

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer`` in this precision.

        Args:
            optimizer: the user's.
            closure: computes the loss and the gradients, unscaled and clipped, and returns the loss. ``None``: the
                gradients are there.
            model: whose parameters are stepped.
            kwargs: for ``optimizer.step``.

        Returns: what ``closure`` returned.
        """
        precision = self.precision_plugin
        loss = precision.optimizer_step(optimizer, model, closure, **kwargs)
        end_step(precision, optimizer)
        return loss

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip this optimizer's gradients by their total norm; see :meth:`Precision.clip_gradients`.

        Returns: the norm before clipping; ``None`` where none was computed.
        """
        return self.precision_plugin.clip_gradients(optimizer, max_norm, "norm", norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of this optimizer's gradients to ``clip_val``."""
        self.precision_plugin.clip_gradients(optimizer, clip_val, "value")

    # ---- more than a verb ----------------------------------------------------------------------------------------

    def bind_step(self, parts: StepParts) -> OwnStep | None:
        """Return the step, for a strategy that owns it; ``None``: the loop's own. Not called in manual optimization.

        Called when the run is set up, at the start of each epoch, and when a part of the run was replaced.
        A strategy that returns one says in ``facts.honoured_hooks`` which hooks inside a step it calls.
        """
        return None

    def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function``, which is the whole training, evaluation or prediction, and return what it returns."""
        return function()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A batch begins, after the callbacks' and the module's hook of this name; not called unless overridden."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader or what to iterate instead; called for each loader, after its sampler was set."""
        return dataloader


_STEP_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
_VERBS = frozenset(name for name, value in vars(Stepping).items() if callable(value) and not name.startswith("_"))

HOOKS_IN_A_STEP = StepParts.HOOKS | {"optimizer_step"}
"""The hooks that run inside a step; a strategy that owns its step decides which of them it calls."""
