"""Restore parts of a checkpoint, and turn each error into a CheckpointError that names the part."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.torch_private import LAST_RATES, SCHEDULERS, schedulers_in
from drivetrain.errors import CheckpointError, CheckpointMismatchError, DrivetrainError, shown

_LARGEST = 2**63


class WrongForm(CheckpointError):
    """An entry of a saved state is missing or wrong. :func:`restoring` completes the message.

    Args:
        place: the path of the entry, such as "['state'][0]"; "" is the state itself.
        what: a description of the error.
    """

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place or 'it'} {what}")
        self.place, self.what = place, what


class WrongBuild(WrongForm):
    """The state was saved by an optimizer, or a similar object, that was built differently from the present one."""


@contextlib.contextmanager
def restoring(part: str) -> Iterator[None]:
    """Return a context for restoring ``part``, such as "optimizer 0 (Adam)". Exceptions become CheckpointErrors that
    name the part.

    Raises:
        CheckpointError: an exception was raised in the context. drivetrain's own errors are raised unchanged.
    """
    try:
        yield
    except WrongBuild as error:
        raise CheckpointMismatchError(
            f"The checkpoint's entry for {part} does not fit: {error}. Build it as it was when it was saved."
        ) from error
    except WrongForm as error:
        raise CheckpointError(
            f"The checkpoint's entry for {part} is damaged, or another program wrote it: {error}. "
            "Use another checkpoint."
        ) from error
    except DrivetrainError:
        raise
    except Exception as error:
        kind = CheckpointMismatchError if isinstance(error, RuntimeError) else CheckpointError
        raise kind(
            f"The checkpoint's entry for {part} could not be restored: {type(error).__name__}: {shown_error(error)}. "
            "Build everything as it was when the checkpoint was saved, or use another checkpoint."
        ) from error


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
    """Return a context that adds the name of the file to the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        if str(path) not in str(error):
            error.args = (f"{path}: {error}", *error.args[1:])
        raise


def problem_of(call: Callable[..., Any], *args: Any) -> str | None:
    """Call ``call(*args)``, and return the message of a CheckpointError; ``None`` without an error."""
    try:
        call(*args)
    except CheckpointError as error:
        return str(error)
    return None


def shown_error(error: BaseException) -> str:
    """Return the text of ``error`` in one line. Shorten a long text."""
    text = " ".join(str(error).split()).removesuffix(".")
    return text if len(text) <= 300 else f"{text[:297]}..."


# ---- the form of plain data ------------------------------------------------------------------------------------------


Form = Any
"""The type and structure of a saved value. Each form is declared beside the code that saves the value. A form is one
of:

- a type: the value is an instance of the type.
- ``{"name": form, "other?": form}``: the value is a mapping with these entries. Entries with "?" may be missing. Other
  entries are allowed.
- ``{str: form}``: the value is a mapping of strings to values of the form.
- ``[form]``: the value is a list or tuple of values of the form.
- a function: it gets the value and the value's place, and raises :class:`WrongForm` for a wrong value.
- a tuple: the value is an instance of one of the types in the tuple, and has all other forms in the tuple. If the tuple
  contains ``None``, the value may be ``None``.
"""


def expect(value: Any, form: Form, place: str = "") -> Any:
    """Check that ``value`` has the :data:`Form` ``form``, and return ``value``.

    Raises:
        WrongForm: ``value`` does not have this form.
    """
    parts = form if isinstance(form, tuple) else (form,)
    if value is None and None in parts:
        return value
    types = [part for part in parts if isinstance(part, type)]
    if types and not isinstance(value, tuple(types)):
        names = ["NoneType" if part is None else part.__name__ for part in parts if part is None or part in types]
        raise WrongForm(place, f"is {shown(value)}, and {' or '.join(names)} is expected")
    for part in parts:
        if isinstance(part, dict):
            _expect_entries(value, part, place)
        elif isinstance(part, list):
            for index, item in enumerate(expect(value, (list, tuple), place)):
                expect(item, part[0], f"{place}[{index}]")
        elif part is not None and part not in types:
            part(value, place)
    return value


def _expect_entries(value: Any, forms: dict[Any, Form], place: str) -> None:
    expect(value, Mapping, place)
    for key, form in forms.items():
        if not isinstance(key, str):
            for each, item in value.items():
                expect(each, key, place)
                expect(item, form, f"{place}[{each!r}]")
        elif key.removesuffix("?") in value:
            name = key.removesuffix("?")
            expect(value[name], form, f"{place}[{name!r}]")
        elif not key.endswith("?"):
            raise WrongForm(f"{place}[{key!r}]", "is missing")


def entry(mapping: Any, key: str, form: Form, place: str = "") -> Any:
    """Check that the entry ``key`` of ``mapping`` has the :data:`Form` ``form``, and return the entry.

    Raises:
        WrongForm: the entry is missing or has another form, or ``mapping`` is not a mapping.
    """
    expect(mapping, {key: form}, place)
    return mapping[key]


def count(value: Any, place: str = "") -> int:
    """Check that ``value`` is a non-negative integer, and return ``value``.

    Raises:
        WrongForm: ``value`` is not a non-negative integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise WrongForm(place, f"is {shown(value)}, and a count is expected")
    return value


def number(value: Any, place: str = "") -> Any:
    """Check that ``value`` is a real number or a tensor with one element, and return ``value``.

    Raises:
        WrongForm: ``value`` is neither a real number nor a tensor with one real element, or it is an integer that
            does not fit into 64 bits.
    """
    is_one = isinstance(value, (int, float))
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not value.is_complex()
    if not is_one or (isinstance(value, int) and abs(value) >= _LARGEST):
        raise WrongForm(place, f"is {shown(value)}, and a number is expected")
    return value


def of_length(number_of_items: int, value: Any, place: str) -> Any:
    """Check that ``value`` is a list or tuple with ``number_of_items`` items, and return ``value``.

    Raises:
        WrongForm: ``value`` has another type or length.
    """
    if len(expect(value, (list, tuple), place)) != number_of_items:
        raise WrongForm(place, f"has {len(value)} items, and {number_of_items} are expected")
    return value


COUNT: Form = (int, count)
NUMBER: Form = (Tensor, bool, int, float, number)


def check_form(saved: Any, own: Any, place: str = "") -> None:
    """Check that a saved state has the same types as ``own``, the present state of the same object. Entries that only
    one of the states has are ignored. If a present value is ``None``, any scalar is accepted.

    Raises:
        WrongForm: the types of a saved value and a present value differ.
    """
    if own is None:
        if isinstance(expect(saved, (type(None), bool, int, float, str, Tensor), place), Tensor):
            number(saved, place)
    elif isinstance(own, bool):
        expect(saved, bool, place)
    elif isinstance(own, int):
        number(saved, place)
        if isinstance(saved, float) and not math.isfinite(saved):
            raise WrongForm(place, f"is {shown(saved)}, and a finite number is expected")
    elif isinstance(own, Tensor) and own.numel() != 1:
        if expect(saved, Tensor, place).shape != own.shape:
            raise WrongForm(place, f"has the shape {tuple(saved.shape)}, and {tuple(own.shape)} is expected")
    elif isinstance(own, (float, Tensor)):
        number(saved, place)
    elif isinstance(own, str):
        expect(saved, str, place)
    elif isinstance(own, Mapping):
        expect(saved, Mapping, place)
        for key, value in own.items():
            if key in saved:
                check_form(saved[key], value, f"{place}[{shown(key)}]")
    elif isinstance(own, (list, tuple)):
        if isinstance(own, tuple):
            of_length(len(own), saved, place)
        expect(saved, (list, tuple), place)
        for index, value in enumerate(saved):
            if own:
                check_form(value, own[min(index, len(own) - 1)], f"{place}[{index}]")


# ---- values that torch uses without a check --------------------------------------------------------------------------

# Optimizers of torch that create the complete state of a parameter in the first step, for any gradient.
_TRIED = frozenset({
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
})  # fmt: skip
# Options that some versions of torch lack. If a loaded state lacks one of these options, the optimizer adds it.
_LATER_OPTIONS = frozenset({
    "amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "initial_lr", "maximize",
    "nesterov", "param_names", "swap",
})  # fmt: skip


def check_optimizer_state(state: Any, optimizer: Optimizer) -> None:
    """Check the values in an optimizer's state that torch does not check before the next step.

    Raises:
        WrongForm: a value is missing, or has another type or shape.
        WrongBuild: the optimizer has different groups of parameters.
    """
    groups, states = entry(state, "param_groups", (list, [{"params": list}])), entry(state, "state", Mapping)
    saved, own_sizes = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if saved != own_sizes:
        text = f"is of an optimizer whose groups hold {saved} parameters, and those of this one hold {own_sizes}"
        raise WrongBuild("", text)
    is_tried = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _TRIED
    parameters: dict[Any, tuple[Tensor, Mapping[str, Tensor]]] = {}
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        place = f"['param_groups'][{index}]"
        for key, value in own.items():
            if key == "params":
                continue
            if key in group:
                check_form(group[key], value, f"{place}[{key!r}]")
            # an option that a scheduler or a wrapper has added may be missing
            elif key in optimizer.defaults and key not in _LATER_OPTIONS:
                raise WrongForm(f"{place}[{key!r}]", "is missing")
        example = _example_state(type(optimizer), group, own, place) if is_tried else {}
        for identity, parameter in zip(group["params"], own["params"], strict=True):
            if expect(identity, int, f"{place}['params']") in parameters:
                raise WrongForm(f"{place}['params']", f"lists {shown(identity)} twice")
            parameters[identity] = parameter, example
    for identity, each in states.items():
        if identity not in parameters:
            raise WrongForm(f"['state'][{shown(identity)}]", "belongs to no parameter")
        if expect(each, Mapping, f"['state'][{identity}]"):
            _check_parameter_state(each, *parameters[identity], f"['state'][{identity}]")


def _example_state(
    kind: type[Optimizer], group: Mapping[str, Any], own: Mapping[str, Any], place: str
) -> Mapping[str, Tensor]:
    """Return the state that an optimizer with the options of ``group`` creates for a small parameter in one step. The
    optimizer's constructor rejects wrong options. Otherwise, a later step would divide by zero or fail.
    """
    on_host = all(parameter.device.type == "cpu" for parameter in own["params"])
    for option in ("capturable", "differentiable"):
        if group.get(option) and not own.get(option) and (on_host or option == "differentiable"):
            raise WrongForm(f"{place}[{option!r}]", f"is True, and the optimizer was made with {option}=False")
    without = {"params", "lr", "fused", "foreach", "capturable", "differentiable"}
    taken = inspect.signature(kind).parameters.keys() - without
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    try:
        example = kind([parameter], **{key: group[key] for key in taken if key in group})
        with torch.no_grad():
            # unwrap() skips the optimizer hooks that the program has registered globally
            inspect.unwrap(kind.step)(example)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongForm(place, f"has options that {kind.__name__} refuses: {shown_error(error)}") from error
    return example.state[parameter]


def _check_parameter_state(
    state: Mapping[Any, Any], parameter: Tensor, example: Mapping[str, Tensor], place: str
) -> None:
    for key, made in example.items():
        value, where = state.get(key), f"{place}[{key!r}]"
        if value is None and example.keys() == {"momentum_buffer"}:
            continue  # SGD creates a missing momentum_buffer itself
        if value is None:
            raise WrongForm(where, "is missing")
        if not made.ndim:
            number(value, where)
            if key == "step" and not float(value) >= 0:
                raise WrongForm(where, f"is {shown(value)}, and a count is expected")
        elif (shape := expect(value, Tensor, where).shape) != parameter.shape:
            raise WrongForm(where, f"has the shape {tuple(shape)}, and its parameter {tuple(parameter.shape)}")


def load_states(
    kind: str,
    parts: Sequence[Any],
    states: Sequence[Any],
    check: Callable[[Any, Any], None],
    load: Callable[[Any, Any], None] = lambda part, state: part.load_state_dict(state),
) -> None:
    """Check each state, and load it into its optimizer or scheduler.

    Args:
        kind: "optimizer" or "scheduler", for messages.
        parts: the result of ``configure_optimizers``.
        states: the states in a checkpoint, in the same order.
        check: a function that is called with a state and its part before the state is loaded. It raises
            :class:`WrongForm` for a wrong state.
        load: a function that gets a part and a state, and loads the state.

    Raises:
        CheckpointError: the numbers of states and parts differ, or a state does not fit its part.
    """
    if len(parts) != len(states):
        raise CheckpointError(
            f"The checkpoint holds {len(states)} {kind} states, and configure_optimizers made {len(parts)}. "
            "Return as many as when it was saved. [DT1036]"
        )
    for index, (part, state) in enumerate(zip(parts, states, strict=True)):
        with restoring(f"{kind} {index} ({type(part).__name__})"):
            check(state, part)
            load(part, state)


_BY_GROUP = frozenset({"base_lrs", LAST_RATES, "lr_lambdas", "max_lrs", "min_lrs"})
_OF_OLDER_TORCH = frozenset({"verbose"})  # entries of a scheduler's state in older versions of torch


def scheduler_state(scheduler: Any) -> Any:
    """Return a scheduler's state without ``anneal_func``. In torch 2.9, the state of SWALR contains this function,
    which is not plain data. The constructor sets the function again.
    """
    state = scheduler.state_dict()
    if isinstance(state, Mapping) and callable(state.get("anneal_func")):
        return {name: value for name, value in state.items() if name != "anneal_func"}
    return state


def load_schedulers(schedulers: Sequence[Any], states: Any) -> None:
    """Load each scheduler's state. If a state changes a numeric argument of the scheduler's constructor, such as
    ``gamma``, log the change.

    Raises:
        CheckpointError: a state is missing or does not fit.
    """
    before = [scheduler_state(scheduler) for scheduler in schedulers]
    load_states("scheduler", schedulers, states, check_scheduler_state)
    for scheduler, own in zip(schedulers, before, strict=True):
        if not isinstance(now := scheduler_state(scheduler), Mapping):
            continue  # a user's scheduler without a state
        names = inspect.signature(type(scheduler).__init__).parameters.keys() & own.keys() & now.keys()
        numbers = [name for name in sorted(names - {"last_epoch"}) if isinstance(own[name], (int, float))]
        if changed := [f"{name}={now[name]} instead of {own[name]}" for name in numbers if now[name] != own[name]]:
            rank_zero_info(
                f"{type(scheduler).__name__} continues with {', '.join(changed)}, as the checkpoint says. To change "
                "that, set it in on_train_start."
            )


def check_scheduler_state(state: Any, scheduler: Any, place: str = "") -> None:
    """Check the entries of a scheduler's state, because torch's schedulers set each entry as an attribute.

    Raises:
        WrongForm: an entry is missing, has another type, or would replace a method or the optimizer.
    """
    own_class = not type(scheduler).__module__.startswith("torch.optim")
    expect(state, (Mapping, None) if own_class else Mapping, place)
    if own_class:
        return
    own = scheduler_state(scheduler)
    for key, value in own.items():
        if key not in state and not key.startswith("_"):
            raise WrongForm(f"{place}[{key!r}]", "is missing")
        if key in _BY_GROUP and isinstance(value, list):
            of_length(len(value), expect(state.get(key, value), list, f"{place}[{key!r}]"), f"{place}[{key!r}]")
    for key in state:
        if not isinstance(key, str) or (key not in own and hasattr(scheduler, key)):
            raise WrongForm(f"{place}[{shown(key)}]", "is no entry of a scheduler")
        if key not in own and not key.startswith("_") and key not in _OF_OLDER_TORCH:
            name = type(scheduler).__name__
            raise WrongForm(f"{place}[{shown(key)}]", f"is no entry of a {name}: another scheduler has saved this")
    check_form(state, own, place)
    for index, (part, saved) in enumerate(zip(schedulers_in(scheduler), state.get(SCHEDULERS, ()), strict=False)):
        check_scheduler_state(saved, part, f"{place}[{SCHEDULERS!r}][{index}]")


# ---- random states ---------------------------------------------------------------------------------------------------


def check_rng_state(state: Any, place: str = "") -> None:
    """Check a random state by loading it into unused generators.

    Raises:
        WrongForm: a generator rejects the state.
    """
    _tried(random.Random().setstate, entry(state, "python", Sequence, place), f"{place}['python']")
    _tried(torch.Generator().set_state, entry(state, "torch", Tensor, place), f"{place}['torch']")
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        _tried(numpy.random.RandomState().set_state, expect(state["numpy"], Sequence), f"{place}['numpy']")
    if "device" in state and torch.accelerator.is_available():
        generator = torch.Generator(torch.accelerator.current_accelerator())
        _tried(generator.set_state, expect(state["device"], Tensor, f"{place}['device']"), f"{place}['device']")
    if "xla_generator" in state:
        expect(state["xla_generator"], int, f"{place}['xla_generator']")
    check_generators(state.get("generators", []), f"{place}['generators']")


def check_generators(states: Any, place: str) -> None:
    """Check each state by loading the state into an unused generator of torch, on the host or on the accelerator."""
    for index, state in enumerate(expect(states, (list, tuple), place)):
        expect(state, Tensor, f"{place}[{index}]")
        try:
            _tried(torch.Generator().set_state, state, f"{place}[{index}]")
        except WrongForm:
            if not torch.accelerator.is_available():
                raise
            generator = torch.Generator(torch.accelerator.current_accelerator())
            _tried(generator.set_state, state, f"{place}[{index}]")


def _tried(take: Callable[[Any], Any], state: Any, place: str) -> None:
    try:
        take(state)
    except Exception as error:  # a generator may raise any exception
        raise WrongForm(place, f"is not the state of a generator: {shown_error(error)}") from error
