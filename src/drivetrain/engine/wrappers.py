"""The wrappers of modules, optimizers and loaders that an Engine returns.

A wrapper behaves like the wrapped object: the attributes, the methods and the names in the state dict are unchanged.
For ``isinstance``, a wrapped optimizer has the optimizer's class. If the strategy and the precision change nothing, a
wrapper takes no additional time.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from drivetrain.base.introspect import calls, reads
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import COUNT, entry
from drivetrain.base.torch_private import STORES, apply, compiled_call
from drivetrain.base.tree import move, was_there
from drivetrain.data import sample_seeds as seeding
from drivetrain.data.batched import log_fetching, start_pass
from drivetrain.data.combined import without_restart
from drivetrain.data.feed import set_epoch
from drivetrain.errors import ConfigurationError, MissingAttributeError, WrongTypeError, described, did_you_mean, shown
from drivetrain.precision.precision import Precision, in_default_dtype
from drivetrain.strategies.redirection import redirected

TakeStep = Callable[[Optimizer, "Callable[[], Any] | None", "dict[str, Any]"], Any]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Numbers(Protocol):
    """The members of an Engine that an :class:`EngineModule` uses in a forward pass.

    Attributes:
        calls_through_forward: whether steps must run inside the module's ``__call__``, because the strategy adds hooks
            to the module, as FSDP2 does.
    """

    @property
    def calls_through_forward(self) -> bool: ...

    def forward_context(self) -> AbstractContextManager[Any] | None: ...

    def input_conversion(self) -> Callable[[Any], Any] | None: ...

    def output_conversion(self) -> Callable[[Any], Any] | None: ...


class Mover(Protocol):
    """An object with a function that moves a loader's batches; ``None``: the loader moves the tensors itself."""

    @property
    def batch_to_device(self) -> Callable[..., Any] | None: ...


class OptimizerHandle:
    """Wraps an optimizer. The wrapper can replace ``step`` and ``zero_grad``. All other attributes are the optimizer's.

    For ``isinstance``, the wrapper has the optimizer's class. Schedulers accept both the wrapper and the optimizer.

    Attributes:
        optimizer: the wrapped optimizer.
        take_step: a function that is called with ``(optimizer, closure, kwargs)`` in place of the optimizer's ``step``;
            ``None``: ``step`` is not replaced.
    """

    _OWN = frozenset({"_optimizer", "take_step", "step"})

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.bind(None, optimizer.zero_grad)

    def bind(self, take_step: TakeStep | None, zero_grad: Callable[..., None]) -> None:
        """Set the functions that ``step`` and ``zero_grad`` call."""
        self.take_step = take_step
        # set on the instance, because ``__getattr__`` would take time in every step
        object.__setattr__(self, "zero_grad", zero_grad)

    @property
    def __class__(self) -> type:
        return type(self._optimizer)

    @__class__.setter
    def __class__(self, value: type) -> None:  # required by type checkers
        raise TypeError("the class of a wrapped optimizer is that of its optimizer")

    optimizer: Optimizer = reads(
        "_optimizer", "The wrapped optimizer; stepping it directly bypasses precision and strategy."
    )

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer, and return the result of ``closure``, which computes the loss again. ``kwargs`` are
        passed to the optimizer's ``step``.
        """
        if self.take_step is None:
            return self._optimizer.step(closure, **kwargs) if closure else self._optimizer.step(**kwargs)
        return self.take_step(self._optimizer, closure, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:
            raise AttributeError(name)  # while an object is copied, its attributes do not exist yet
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A scheduler replaces ``step`` by a function that counts and calls the original. The replacement must be set on
        # this object, not on the wrapped optimizer.
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside a wrapper. An optimizer without a wrapper is returned unchanged."""
    return optimizer.optimizer if issubclass(type(optimizer), OptimizerHandle) else optimizer


def requires_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` must be called with a closure, as the ``step`` of LBFGS must be."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def check_closure(optimizer: Optimizer, precision: Precision, *others: tuple[bool, str]) -> None:
    """If ``optimizer`` evaluates the loss several times per step, check that all conditions allow this. ``others``
    contains pairs: a condition that forbids it, and the end of the error message.

    Raises:
        ConfigurationError: the precision scales the loss, or a condition in ``others`` is true.
    """
    cure = 'Write precision="bf16-mixed" or "32-true".'
    scaled = f"the scaled loss of precision={precision.name!r} does not allow. {cure}"
    for holds, what in (*others, (precision.scales_loss, scaled)):
        if holds and requires_closure(optimizer):
            name = type(optimizer).__name__
            raise ConfigurationError(f"{name} evaluates the loss several times per step, which {what}")


class EngineModule(nn.Module):
    """A module whose ``forward`` runs in the engine's precision and through the strategy's wrapper.

    The wrapper has the original module's parameters, buffers and children, under the original names. All other
    attributes are read from the original module, and set on the original module. If the precision changes the forward
    pass, floating-point results are converted to torch's default dtype. A loss is therefore not computed in 16 bits.

    Args:
        forward_module: the strategy's wrapper of the module, or the module itself if there is no wrapper.
        original: the user's module.
        numbers: the Engine, which provides the precision's contexts and conversions.
    """

    def __init__(self, forward_module: nn.Module, original: nn.Module, numbers: Numbers) -> None:
        own = self.__dict__
        own["_original"], own["_forward_module"], own["_numbers"] = original, forward_module, numbers
        own["_marked"] = {name for name in _STEPS if hasattr(original, name)}
        super().__init__()
        for store in STORES:
            own[store] = original.__dict__[store]
        own["_convert"] = numbers.input_conversion()
        of_users = numbers.output_conversion()
        own["_converts"] = bool(own["_convert"] or of_users or numbers.forward_context() is not None)
        own["_convert_output"] = of_users or in_default_dtype
        if not own["_converts"]:
            own["forward"] = forward_module.__call__  # the engine adds nothing to the forward pass
        own["_watch"] = _FirstCall() if own["_converts"] or forward_module is not original else None
        # A module that is compiled in place is not watched, because torch would also compile the hooks that ``begin``
        # registers.
        if own["_watch"] is not None and compiled_call(original) is None:
            own["_watch"].begin(self, original)

    module: nn.Module = reads("_original", "The module as the user wrote it.")

    @property
    def device(self) -> torch.device:
        """The original module's attribute ``device``; if there is none, the device of the first parameter or buffer."""
        return self._of_first_tensor("device", torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The original module's attribute ``dtype``; if there is none, the dtype of the first parameter or buffer."""
        return self._of_first_tensor("dtype", torch.get_default_dtype())

    def _of_first_tensor(self, name: str, default: Any) -> Any:
        if hasattr(self._original, name):
            return getattr(self._original, name)
        tensor = next(itertools.chain(self.parameters(), self.buffers()), None)
        return default if tensor is None else getattr(tensor, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._forward_module, args, kwargs)

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        convert = self._convert
        if convert is not None:
            args, kwargs = convert(args), convert(kwargs)
        # Each call needs a new context, because this function may call itself, and an autocast object stores only one
        # outer state.
        context = self._numbers.forward_context()
        with context or nullcontext():
            output = call(*args, **kwargs)
        return self._convert_output(output) if self._converts else output

    # ---- methods that run as forward does ----------------------------------------------------------------------------

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Make a method of the module run as ``forward`` does: in the precision, and through the strategy's wrapper.

        The steps of a LightningModule are already marked.

        Args:
            method: the method or its name.

        Raises:
            ConfigurationError: the module has no such method, or the method is ``forward``, which is always marked.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", None)
        found = None if name is None else getattr(self._original, name, None)
        if name is None or not callable(found):
            known = [key for key, _ in inspect.getmembers(type(self._original), callable) if not key.startswith("_")]
            kind = WrongTypeError if name is None else MissingAttributeError
            raise kind(
                f"mark_forward_method({shown(method)}): {type(self._original).__name__} has no such method. "
                f"{did_you_mean(str(name), known)}"
            )
        if isinstance(found, nn.Module) or inspect.isgeneratorfunction(found):
            raise ConfigurationError(
                f"mark_forward_method({shown(method)}): {described(found)} cannot run as forward does. "
                "Write a method that calls it and returns its result."
            )
        if name == "forward":
            raise ConfigurationError('mark_forward_method("forward"): it is marked already. Leave the call out.')
        self._marked.add(name)

    def _redirected(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if self._watch is not None:
            self._watch.end()
        call = redirected(method, self._original, self._forward_module, self._numbers.calls_through_forward)
        return lambda *args, **kwargs: self._run(call, args, kwargs)

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``method``. If ``method`` runs a layer, the function raises an error, because
        the strategy's wrapper would be bypassed.
        """
        original = self._original

        def watched(*args: Any, **kwargs: Any) -> Any:
            mine = set(original.modules())

            def refuse(module: nn.Module, inputs: Any) -> None:
                if module in mine:
                    raise ConfigurationError(
                        f"{type(original).__name__}.{name} runs {type(module).__name__}.forward past the strategy, "
                        f'which then cannot keep the processes alike. Write model.mark_forward_method("{name}") first.'
                    )

            hook = register_module_forward_pre_hook(refuse)
            try:
                return method(*args, **kwargs)
            finally:
                hook.remove()

        return watched

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("_original")
        if original is None:
            raise AttributeError(name)  # while an object is copied, its attributes do not exist yet
        value = getattr(original, name)
        if name in self._marked:
            return self._redirected(value)
        if inspect.ismethod(value) and value.__self__ is original and self._forward_module is not original:
            return self._watched(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NN_MODULE_STATE:
            object.__setattr__(self, name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    # ---- members that are read from the original module --------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether the original module is in training mode."""
        return self._original.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing. nn.Module's constructor sets this attribute, but only :meth:`train` changes the mode."""

    def train(self, mode: bool = True) -> EngineModule:
        self._forward_module.train(mode)
        return self

    state_dict: Any = calls("_original.state_dict")
    load_state_dict: Any = calls("_original.load_state_dict")
    compile: Any = calls("_original.compile")

    def apply(self, fn: Callable[[nn.Module], None]) -> EngineModule:
        self._original.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> EngineModule:
        apply(self._original, fn, recurse)
        return self

    def __repr__(self) -> str:
        return f"EngineModule({self._original!r})"

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._original)})


class _FirstCall:
    """Forward hooks on a module and its wrapper. They warn if the first training pass bypasses the wrapper. When this
    pass begins, they are removed.
    """

    def __init__(self) -> None:
        self._wrapper: int | None = None  # an id, because a reference to the wrapper would form a cycle
        self._handles: list[Any] = []

    def begin(self, wrapper: nn.Module, original: nn.Module) -> None:
        """Start to watch the calls of the wrapper and of the original module."""
        self._wrapper = id(wrapper)
        self._handles = [each.register_forward_pre_hook(self) for each in (wrapper, original)]

    def end(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()
        self._wrapper = None

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._wrapper is None or not (torch.is_grad_enabled() and module.training):
            return  # without gradients, the program may call the original module
        past = id(module) != self._wrapper
        self.end()
        if past:
            rank_zero_warn(
                f"The {type(module).__name__} was called itself, and not the wrapped module that Engine.setup "
                "returned: its forward pass has neither the precision of the Engine nor what the strategy adds to it, "
                "such as the exchange of gradients. Write model = engine.setup(model), and call model(...); a method "
                "that calls the layers is named by model.mark_forward_method(name)."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # copies are not watched


# Attributes that nn.Module's constructor sets. The wrapper has separate values, because hooks on the wrapper are not
# hooks on the original module.
_NN_MODULE_STATE = frozenset({*vars(nn.Module()), "training"})


class EngineLoader:
    """Wraps a loader: moves batches to the device, and calls ``set_epoch`` of the samplers when a pass begins.

    Args:
        loader: a DataLoader, or any re-iterable object.
        device: the device to which batches are moved; ``None``: they are not moved.
        mover: an object with the attribute ``batch_to_device``: a function that moves batches, or ``None``. Each pass
            reads this attribute once, at its start.
        pins: whether to fetch batches into pinned memory, from which the device copies in the background.
        sample_seeds: whether the random numbers of a sample depend only on the seed, the epoch and the sample's index.
            Each pass counts as an epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | None,
        mover: Mover | None = None,
        pins: bool = False,
        sample_seeds: bool = False,
    ) -> None:
        self._loader = self._source = loader
        self._seeds: Any = None
        if sample_seeds:
            self._seeds = seeding.SampleSeeds(seeding.seed_of_program(), lambda: 0)
            self._source = seeding.seeded(loader, self._seeds)
        self._device = device
        self._mover = mover
        self._pins = pins
        self._passes = 0
        log_fetching(loader)

    def __iter__(self) -> Iterator[Any]:
        set_epoch(self._loader, self._passes)
        if self._seeds is not None:
            # a function that returns this pass's number and does not refer to self
            self._seeds.epoch = partial(int, self._passes)
        self._passes += 1
        device, own = self._device, None if self._mover is None else self._mover.batch_to_device
        # Batches that user code moves are not pinned, because the code could change memory that the device still reads.
        batches = without_restart(start_pass(self._source, self._pins and device is not None and own is None))
        if device is None:
            return batches
        if own is not None:
            return (own(batch, device) for batch in batches)
        for first in batches:
            moved = move(first, device)
            # if the first batch was on the device, all batches are assumed to be there
            if was_there(first, moved):
                return itertools.chain((first,), batches)
            return itertools.chain((moved,), (move(batch, device) for batch in batches))
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state and the number of passes that have begun. Samplers get this number as the epoch."""
        own = getattr(self._loader, "state_dict", None)
        return {"passes": self._passes, "loader": own() if callable(own) else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""
        passes = entry(state, "passes", COUNT)
        if (loader := state.get("loader")) is not None:
            self._loader.load_state_dict(loader)  # type: ignore[attr-defined]  # it has saved a state
        self._passes = passes

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # else Python raises

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_source", "_seeds", "_device", "_mover", "_pins", "_passes"):
            raise AttributeError(name)  # while an object is copied, its attributes do not exist yet
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"EngineLoader({self._loader!r})"


def follow(optimizers: Sequence[Optimizer], before: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """In ``optimizers``, replace the parameters ``before`` by the current parameters of ``module``.

    On most devices, moving a module keeps its parameter objects. If moving creates new parameters, an optimizer would
    continue to update the old parameters, without an error.
    """
    now = dict(module.named_parameters())
    replaced = {id(old): now[name] for name, old in before.items() if name in now and now[name] is not old}
    if not replaced:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in replaced]:
            optimizer.state[replaced[id(parameter)]] = optimizer.state.pop(parameter)
