"""Precision plugins of Lightning 1.3; each uses a precision of drivetrain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import calls, defined_by_user, is_own_class, reads
from drivetrain.errors import ConfigurationError, described, unknown_value
from drivetrain.precision.precision import Precision, PrecisionRegistry

_APEX = {"O0": "32-true", "O1": "16-mixed", "O2": "16-mixed", "O3": "16-true"}
_BITS = {16: "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed", 32: "32-true", 64: "64-true"}


class PrecisionPlugin:
    """Full 32-bit precision, and the base class of all other precision plugins. A subclass can override each method.

    Attributes:
        precision: the value of ``Trainer(precision=...)``.
        accelerator: the accelerator to which this plugin belongs.
    """

    precision: int | str = 32
    accelerator: Any = None
    _today: Precision | None = None

    train_step_context = calls("today.train_step_context")
    """Return a new context for one ``training_step``."""
    val_step_context = calls("today.val_step_context")
    """Return a new context for one ``validation_step``."""
    test_step_context = calls("today.test_step_context")
    """Return a new context for one ``test_step``."""
    predict_step_context = calls("today.predict_step_context")
    """Return a new context for one ``predict_step``."""

    def pre_dispatch(self) -> None:
        """Called at the end of the accelerator's ``pre_dispatch``."""

    def dispatch(self, trainer: Any) -> None:
        """Called in each process, before the loop over batches."""

    def post_dispatch(self) -> None:
        """Called after the loop over batches."""

    # ---- clipping ----------------------------------------------------------------------------------------------------

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None, gradient_clip_algorithm: str = "norm", model: Any = None
    ) -> Any:
        """Clip gradients; ``None`` and 0: no clipping."""
        if clip_val is None or clip_val <= 0:
            return None
        by_value = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) == "value"
        return (self.clip_grad_by_value if by_value else self.clip_grad_by_norm)(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each element of the gradients."""
        strategy = self.accelerator.strategy
        strategy.usual.clip_gradients_value(strategy.lightning_module, optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> Any:
        """Clip the gradients by their total norm, and return the norm before clipping."""
        strategy = self.accelerator.strategy
        if defined_by_user(self, "master_params"):
            return nn.utils.clip_grad_norm_(list(self.master_params(optimizer)), clip_val)
        return strategy.usual.clip_gradients_norm(strategy.lightning_module, optimizer, clip_val)

    # ---- drivetrain's precision, and a step --------------------------------------------------------------------------

    def make_today(self) -> Precision:
        """Return a new precision of drivetrain for this plugin."""
        return PrecisionRegistry.get(_BITS.get(self.precision, str(self.precision)))

    @property
    def today(self) -> Precision:
        """drivetrain's precision for this plugin."""
        if self._today is None:
            self._today = self.make_today()
        return self._today

    scaler = reads("today.scaler")
    """The gradient scaler; ``None`` for a precision without a scaler."""

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Return the model, the optimizers and the schedulers for the run, in place of the arguments."""
        return model, optimizers, lr_schedulers

    def master_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients are clipped."""
        yield from self.today.main_params(optimizer)

    def backward(
        self, model: Any, closure_loss: Tensor, optimizer: Any, opt_idx: int, should_accumulate: bool,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the gradients, and return the loss. Gradients are scaled if the precision scales the loss."""
        self.accelerator.strategy.differentiate(closure_loss, optimizer, should_accumulate, *args, **kwargs)
        return closure_loss.detach()

    def pre_optimizer_step(
        self,
        pl_module: Any,
        optimizer: Any,
        optimizer_idx: int,
        lambda_closure: Callable[[], Any] | None,
        **kwargs: Any,
    ) -> bool:
        """Return whether to step the optimizer. An override that returns False must run ``lambda_closure`` itself."""
        return True

    def post_optimizer_step(self, optimizer: Any, optimizer_idx: int) -> None:
        """Called after each step of the optimizer, and after a skipped step."""

    def as_settings(self) -> dict[str, Any]:
        """Return the arguments of drivetrain's Trainer for this plugin. Called if the program passes no accelerator.

        Raises:
            ConfigurationError: the plugin's class overrides methods that only an accelerator calls.
        """
        name = type(self).__name__
        own = [key for key in vars(type(self)) if hasattr(PrecisionPlugin, key) and not key.startswith("__")]
        if own and not is_own_class(type(self)):
            raise ConfigurationError(
                f"plugins got a {name}, whose {', '.join(sorted(own))} only an accelerator calls. Write "
                f"accelerator=CPUAccelerator(precision_plugin={name}(), training_type_plugin=...)."
            )
        return {"plugins": [self.today]}


class MixedPrecisionPlugin(PrecisionPlugin):
    """Base class of the plugins for automatic mixed precision."""

    precision: int | str = "mixed"


class NativeMixedPrecisionPlugin(MixedPrecisionPlugin):
    """torch's automatic mixed precision.

    Args:
        precision: 16 (with a scaled loss) or "bf16".
    """

    def __init__(self, precision: int | str = 16) -> None:
        self.precision = precision


class ApexMixedPrecisionPlugin(MixedPrecisionPlugin):
    """NVIDIA's Apex in Lightning 1.3; here torch's own precisions are used instead.

    Args:
        amp_level: "O0" is full 32-bit precision; "O1" is automatic mixed precision; "O2" is equal to "O1" here,
            although Apex's "O2" also kept 32-bit master weights; "O3" is pure 16-bit precision.

    Raises:
        ConfigurationError: the level is unknown.
    """

    def __init__(self, amp_level: str = "O2") -> None:
        if amp_level not in _APEX:
            raise unknown_value("ApexMixedPrecisionPlugin", "amp_level", amp_level, _APEX)
        self.amp_level = amp_level

    def make_today(self) -> Precision:
        return PrecisionRegistry.get(_APEX[self.amp_level])


class DoublePrecisionPlugin(PrecisionPlugin):
    """Everything in float64."""

    precision: int | str = 64


def precision_plugin_of(given: Any) -> PrecisionPlugin:
    """Return a plugin for ``given``: a plugin itself, a precision, or the name of a precision.

    Raises:
        ConfigurationError: ``given`` is not a plugin, a precision or a name.
    """
    if isinstance(given, PrecisionPlugin):
        return given
    if not isinstance(given, (str, int, Precision)):
        raise ConfigurationError(
            f"precision_plugin got {described(given)}. Pass a PrecisionPlugin, or the name of a precision."
        )
    plugin = PrecisionPlugin()
    plugin.precision = given.name if isinstance(given, Precision) else given
    plugin._today = given if isinstance(given, Precision) else plugin.make_today()
    return plugin
