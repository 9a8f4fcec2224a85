"""Mixed precision: parameters in float32, matrix products in 16 bits, and loss scaling for float16."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides, temporarily
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import COUNT, Form, WrongForm, expect, number
from drivetrain.base.torch_private import GROWTH_TRACKER, SCALES_ITSELF, scale_of, states_of_scaler
from drivetrain.base.tree import rescale
from drivetrain.errors import ConfigurationError, check_known
from drivetrain.precision.precision import Autocast, Precision

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_SKIPS_BEFORE_WARNING = 100


class MixedPrecision(Autocast):
    """Runs the steps under ``torch.autocast``; with float16, also scales the loss.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: the device type for autocast; ``None``: the device type of the accelerator.
        scaler: your own ``torch.amp.GradScaler`` for "16-mixed"; ``None``: a scaler with torch's defaults.

    The backward pass runs outside the autocast context, as torch advises. Autocast's cache of cast weights is off. The
    cache could give a training step a copy of a weight that was cast under ``no_grad``. The weight would then get no
    gradient.

    "16-mixed" skips a step whose gradients are not finite. This check reads one value from the device in each step.
    "bf16-mixed" checks nothing and reads nothing.

    All optimizers of a run share one scale. After a step, the scale is updated at once if no other optimizer has
    gradients. Otherwise the scale is updated when the next loss is scaled. The gradients of the other optimizers are
    then multiplied to fit the new scale. Gradients of further losses can then be added to them. Gradients that were
    unscaled for clipping are then scaled again.

    Raises:
        ConfigurationError: the precision is unknown, or a scaler was passed for "bf16-mixed".
    """

    _names: ClassVar = {name: {"precision": full} for full in _DTYPES for name in (full, full.partition("-")[0])}

    def __init__(
        self, precision: str = "bf16-mixed", device: str | None = None, scaler: GradScaler | None = None
    ) -> None:
        check_known("MixedPrecision", precision, "mixed precision", _DTYPES)
        self.name = precision
        self.computes_in = _DTYPES[precision]
        self.device = device
        self.scales_loss = precision == "16-mixed"
        if scaler is not None and not self.scales_loss:
            raise ConfigurationError(
                f"MixedPrecision({precision!r}) got a {type(scaler).__name__}, and bfloat16 needs no scaled loss. "
                'Leave scaler out, or write precision="16-mixed".'
            )
        self._scaler = scaler
        self._made_for = ""  # the device type for which this object created its scaler; "" for a user's scaler
        self._loaded: dict[str, Any] = {}  # a loaded state, kept until the scaler exists
        self._optimizers: tuple[Optimizer, ...] | None = None  # None until bind() is called
        self._device: torch.device | None = None  # the device of the losses
        self._rounds: list[dict[str, Any]] = []  # the entry "optimizers" of a loaded state: see state_dict()
        self._scaled = False  # whether a loss was scaled since the last update
        self._unscaled: set[Optimizer] = set()  # optimizers whose gradients were unscaled and not yet used in a step
        self._stepped: set[Optimizer] = set()  # optimizers that have stepped or skipped a step since the last update
        self._skipped: dict[Optimizer, int] = {}  # the number of skipped steps in a row

    def forward_context(self) -> AbstractContextManager[Any] | None:
        kind = self.device or self.device_type
        if self.scales_loss:
            self._scaler_for(kind)  # this call creates the scaler, which must exist before the first batch
        return torch.autocast(kind, dtype=self.computes_in, cache_enabled=False)

    def bind(self, optimizers: Sequence[Optimizer]) -> None:
        """Store all optimizers of the run. Called when the run starts.

        Without this call, the scale is updated only when the next loss is scaled, because unknown optimizers may have
        gradients.
        """
        self._optimizers = tuple(optimizers)
        self._skipped.clear()

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` multiplied by the current scale."""
        if not self.scales_loss:
            return loss
        scaler = self._scaler_for(loss.device.type)
        if self._rounds:  # a state was loaded, but restored_gradients() was not called
            self.restored_gradients(loss.device)
        if self._stepped or self._unscaled:
            self._settle()
        self._scaled, self._device = True, loss.device
        return scaler.scale(loss)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide this optimizer's gradients by the scale. A second call before the optimizer's step does nothing.

        Raises:
            ConfigurationError: the gradients do not come from a scaled loss.
        """
        if not self.scales_loss or optimizer in self._unscaled or not _holds_gradients(optimizer):
            return
        if not self._scaled or optimizer in self._stepped or self._scaler is None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has gradients, but no scaled loss was computed since the last step, and "
                f"precision={self.name!r} would divide them by its scale. Call self.manual_backward(loss) instead of "
                "loss.backward(); with an Engine engine.backward(loss), in other loops precision.backward(loss, model)."
            )
        self._scaler.unscale_(optimizer)
        self._unscaled.add(optimizer)

    unscale = unscale_gradients

    def _step_scaled(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step ``optimizer`` if all its gradients are finite, and set :attr:`stepped`.

        Raises:
            ConfigurationError: the gradients do not come from a scaled loss.
        """
        if not _holds_gradients(optimizer):
            optimizer.step(**kwargs)
            self.stepped = True
            return
        self.unscale_gradients(optimizer)
        assert self._scaler is not None  # unscaling has created the scaler
        called: list[bool] = []
        # The scaler calls the optimizer only if all gradients are finite.
        hook = optimizer.register_step_post_hook(lambda *_: called.append(True))
        try:
            # For an optimizer with a fused kernel, the scaler always calls ``step``. The kernel skips the update if
            # gradients are not finite. But before the kernel, ``step`` allocates the optimizer's state, such as SGD's
            # momentum buffers. If the kernel skips the update, the buffers stay uninitialised. With this attribute, the
            # scaler calls ``step`` only if all gradients are finite.
            with temporarily(vars(optimizer), **{SCALES_ITSELF: False}):
                self._scaler.step(optimizer, **kwargs)
        finally:
            hook.remove()
        self.stepped = bool(called)
        self._unscaled.discard(optimizer)
        self._stepped.add(optimizer)
        if self._optimizers is not None and not self._held():
            self._update()
        self._count_skips(optimizer)

    def restored_gradients(self, device: torch.device) -> None:
        if self.scales_loss:
            # the scaler creates its tensors when it scales its first loss
            self._scaler_for(device.type).scale(torch.ones((), device=device))
            self._scaled, self._device = True, device
            for optimizer, its_round in zip(self._optimizers or (), self._rounds, strict=False):
                self._restore_round(optimizer, its_round, device)
            self._rounds = []

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler of "16-mixed"; ``None`` for "bf16-mixed". If a run uses a different device type than the run
        before, the run gets a new scaler.
        """
        return self._scaler_for(self.device or self.device_type) if self.scales_loss else None

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler

    def state_dict(self, module: nn.Module | None = None, optimizers: Sequence[Optimizer] = ()) -> dict[str, Any]:
        """Return the scale and its growth state, or an empty state for "bf16-mixed". Reading the state changes nothing.

        If the scale is due for an update and no optimizer has gradients, the state contains the updated scale. If
        optimizers have gradients, the state contains the current scale, by which these gradients are scaled. If an
        optimizer has also stepped or unscaled gradients since the last update of the scale, the state has a list
        "optimizers". Each entry tells what has happened to an optimizer's gradients since this update.
        """
        if self._scaler is None:
            return dict(self._loaded)
        if not (self._stepped or self._unscaled) or not self._scaler.is_enabled():
            return self._scaler.state_dict()
        if self._optimizers is None or not self._held():
            scaler = self._scaler
            if self._stepped:
                scaler = _twin(scaler, copy.deepcopy)
                scaler.update()
            return scaler.state_dict()
        return {**self._scaler.state_dict(), "optimizers": [self._round_of(each) for each in self._optimizers]}

    def deferred_state_dict(
        self, module: nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> Callable[[], dict[str, Any]]:
        if self._scaler is None or not self._scaler.is_enabled() or overrides(self, "state_dict", MixedPrecision):
            return super().deferred_state_dict(module, optimizers)
        # The scale is due for an update, or gradients are unscaled. In this rare case, the state is read now, which may
        # wait for the device.
        if self._stepped or self._unscaled:
            return super().deferred_state_dict(module, optimizers)
        twin = _twin(self._scaler, lambda value: value.clone() if isinstance(value, Tensor) else value)
        return twin.state_dict  # not called here, because reading the scale waits for the device

    def load_state_dict(
        self, state_dict: dict[str, Any], module: nn.Module | None = None, optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """Restore a scaler's state. An empty state is ignored. With "bf16-mixed", every state is ignored."""
        if not expect(state_dict, Mapping) or not self.scales_loss:
            return
        expect(state_dict, _SCALER)
        self._rounds = list(state_dict.get("optimizers", ()))
        if self._scaler is None:
            self._loaded = dict(state_dict)
            return
        if self._stepped:
            self._update()  # update now, because a later update would change the loaded state
        self._scaler.load_state_dict(state_dict)

    # ---- the scale -----------------------------------------------------------------------------------------------

    def _scaler_for(self, device_type: str) -> GradScaler:
        has_scaled = scale_of(self._scaler) is not None  # a scaler creates its scale when it scales its first loss
        if self._scaler is None or (self._made_for not in ("", device_type) and not has_scaled):
            self._scaler, self._made_for = GradScaler(device_type), device_type
            if self._loaded:
                self._scaler.load_state_dict(self._loaded)
        return self._scaler

    def _held(self) -> list[Optimizer]:
        """Return the optimizers with gradients that no step has used yet."""
        others = {*(self._optimizers or ()), *self._unscaled} - self._stepped
        return [optimizer for optimizer in others if _holds_gradients(optimizer)]

    def _update(self) -> None:
        assert self._scaler is not None  # a step has created the scaler
        self._scaler.update()
        self._unscaled.clear()
        self._stepped.clear()
        self._scaled = False

    def _round_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what has happened to the gradients of ``optimizer`` since the last update of the scale. "stepped" is
        True if a step has used them, and "unscaled" if they were unscaled. "found_inf" is above 0 if a gradient was not
        finite, and ``None`` if the gradients were not checked.
        """
        known = states_of_scaler(self._scaler).get(id(optimizer), {})
        found = known.get("found_inf_per_device", {}).values()
        return {
            "stepped": optimizer in self._stepped,
            "unscaled": optimizer in self._unscaled,
            "found_inf": sum(each.item() for each in found) if found else None,
        }

    def _restore_round(self, optimizer: Optimizer, its_round: dict[str, Any], device: torch.device) -> None:
        if its_round["stepped"]:
            self._stepped.add(optimizer)
        if its_round["unscaled"]:
            self._unscaled.add(optimizer)
        if its_round["found_inf"] is not None and self._scaler is not None and self._scaler.is_enabled():
            found = torch.full((), float(its_round["found_inf"] > 0), dtype=torch.float32, device=device)
            stage = OptState.STEPPED if its_round["stepped"] else OptState.UNSCALED
            states_of_scaler(self._scaler)[id(optimizer)].update(stage=stage, found_inf_per_device={device: found})

    @torch.no_grad()
    def _settle(self) -> None:
        """If an optimizer has stepped since the last update, update the scale. Also multiply all gradients that no step
        has used yet, so that these gradients fit the new scale.
        """
        assert self._scaler is not None  # unscaling has created the scaler
        held = self._held()
        one = torch.ones((), device=self._device)
        before = self._scaler.scale(one)
        for optimizer in self._unscaled:
            # Reset the scaler's state of this optimizer. The scaler itself resets states only in update(), for all
            # optimizers together. A disabled scaler has no such state.
            states_of_scaler(self._scaler).pop(id(optimizer), None)
            rescale(optimizer, before)
        self._unscaled.clear()
        if self._stepped:
            self._update()
            ratio = self._scaler.scale(one) / before
            for optimizer in held:
                rescale(optimizer, ratio)
            self._scaled = bool(held)

    def _count_skips(self, optimizer: Optimizer) -> None:
        if self.stepped:
            self._skipped.pop(optimizer, None)
            return
        self._skipped[optimizer] = self._skipped.get(optimizer, 0) + 1
        if self._skipped[optimizer] == _SKIPS_BEFORE_WARNING:
            rank_zero_warn(
                f"{type(optimizer).__name__} has skipped {_SKIPS_BEFORE_WARNING} steps in a row, because its gradients "
                f"were not finite (precision={self.name!r}). Look for a division by zero or a learning rate that is "
                'too large, or write precision="bf16-mixed".'
            )


def _twin(scaler: GradScaler, copied: Callable[[Any], Any]) -> GradScaler:
    """Return a copy of ``scaler``, with each attribute copied by ``copied``."""
    twin = object.__new__(type(scaler))  # copy.copy() raises an error for a scaler whose update is due
    vars(twin).update({name: copied(value) for name, value in vars(scaler).items()})
    return twin


def _positive(value: Any, place: str) -> None:
    if not 0 < number(value, place) < math.inf:
        raise WrongForm(place, f"is {value}, and a finite number above 0 is expected")


_FACTOR: Form = (int, float, _positive)
_SCALER: Form = {
    "scale": _FACTOR, "growth_factor": _FACTOR, "backoff_factor": _FACTOR, "growth_interval": COUNT,
    GROWTH_TRACKER: COUNT,
    "optimizers?": [{"stepped": bool, "unscaled": bool, "found_inf": (int, float, None, number)}],
}  # fmt: skip
"""The types of the entries in a result of :meth:`MixedPrecision.state_dict`."""


def _holds_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def torch_scaler(precision: Precision) -> Any:
    """Return the ``torch.amp.GradScaler`` of ``precision``, or ``None``."""
    if not (precision.scales_loss and isinstance(precision, MixedPrecision)):
        return None
    precision.forward_context()  # creates the scaler
    return precision.scaler
