"""Choose the accelerator for ``Trainer(accelerator=...)`` on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from drivetrain.accelerators.accelerator import Accelerator, AcceleratorRegistry
from drivetrain.accelerators.torch_device import TorchDeviceAccelerator, check_indices, of_type
from drivetrain.base.registry import Entry
from drivetrain.errors import ConfigurationError, RunError, UnknownNameError, did_you_mean, shown, whose


def choose(given: Any) -> tuple[Accelerator, str]:
    """Return the accelerator for ``given``, and the reason for the choice. ``given`` is an instance, a class, a name,
    "auto" or "gpu".

    Raises:
        ConfigurationError: the name is unknown, or the accelerator is not available here.
    """
    if isinstance(given, type) and issubclass(given, Accelerator):
        given = given()
    if isinstance(given, Accelerator):
        if not given.is_available():
            raise ConfigurationError(f"{type(given).__name__} says that its hardware is not available here. {_cure()}")
        return given, "accelerator= is an instance"
    if given in ("auto", "gpu"):
        if (found := _first_available(given)) is not None:
            return found
        raise RunError(f"accelerator='gpu': torch sees no GPU on this machine. {_cure()} [DT1043]")
    try:
        accelerator = _entry(str(given)).build()
    except UnknownNameError:
        raise ConfigurationError(
            f"accelerator={shown(given)}: there is no such accelerator. "
            f"{whose(given) or _likely_accelerator(str(given))}"
        ) from None
    if not accelerator.is_available():
        why = accelerator.why_unavailable()
        raise RunError(f"accelerator={given!r} is not available here: {why}. {_cure()} [DT1043]")
    return accelerator, f'accelerator="{given}"'


def _entry(name: str) -> Entry[Accelerator]:
    """Return the registered accelerator with this name. If the class sets ``yields_to_torch``, and torch has an
    available device type with the same name, return the accelerator for torch's device type.

    Raises:
        UnknownNameError: the name is unknown.
    """
    entry = AcceleratorRegistry.entry(name)
    own = of_type(name) if entry.cls.yields_to_torch else None
    return entry if own is None or not own.is_available() else Entry(name, own, f"torch's device {name!r}")


def _first_available(name: str) -> tuple[Accelerator, str] | None:
    """Return the available accelerator with the highest priority, or ``None``. For the name "gpu", only consider
    torch's own device types.
    """
    for _, entry in sorted(_candidates(), key=lambda candidate: -candidate[0]):
        meant = issubclass(entry.cls, TorchDeviceAccelerator) if name == "gpu" else entry.cls.joins_auto()
        if meant and entry.cls.is_available():
            return entry.build(), f'accelerator="{name}", and of what is available here it comes first'
    return None


def _candidates() -> Iterator[tuple[int, Entry[Accelerator]]]:
    """Yield the priority and the entry of each accelerator that "auto" considers. torch's current device type is
    considered even if no registered accelerator has its name.
    """
    current = torch.accelerator.current_accelerator()
    entries = [_entry(entry.name) for entry in AcceleratorRegistry.entries()]
    if current is not None and all(entry.name != current.type for entry in entries):
        entries.append(AcceleratorRegistry.entry(current.type))
    for entry in entries:
        priority = entry.cls.auto_priority
        if priority is None and current is not None and entry.name == current.type:
            priority = TorchDeviceAccelerator.auto_priority
        if priority is not None:
            yield priority, entry


def available() -> str:
    """Return one name for each available accelerator, for messages."""
    entries = [entry for entry in AcceleratorRegistry.entries() if entry.cls.is_available()]
    return ", ".join(
        entry.name
        for entry in entries
        if all(entry.name < other for other in AcceleratorRegistry.other_names(entry.name))
    )


def _cure() -> str:
    return f'Available: {available()}. Write accelerator="auto".'


def _likely_accelerator(given: str) -> str:
    known = ["auto", "gpu", *AcceleratorRegistry.available()]
    numbered = re.fullmatch(r"(\w*[a-z]):?(\d+)", given)
    if numbered and (numbered[1] in known or AcceleratorRegistry.fallback(numbered[1]) is not None):
        device = "" if numbered[1] == "cpu" else f", devices=[{numbered[2]}]"
        return f'Did you mean {numbered[1]!r}? Write accelerator="{numbered[1]}"{device}.'
    return did_you_mean(given, known)


def check_strategy(accelerator: Accelerator, strategy: str, works_on: frozenset[str]) -> None:
    """Check that a strategy works on an accelerator.

    Args:
        accelerator: the plan's accelerator.
        strategy: name of the strategy's class, for the message.
        works_on: the names or device types of the accelerators that the strategy supports. Empty if the strategy does
            not restrict them.

    Raises:
        ConfigurationError: the strategy does not work on the accelerator.
    """
    if works_on and accelerator.name not in works_on and accelerator.autocast_device_type not in works_on:
        names = " or ".join(f'"{name}"' for name in sorted(works_on))
        kinds = [
            AcceleratorRegistry.entry(name).cls for name in sorted(works_on & set(AcceleratorRegistry.available()))
        ]
        if kinds and not any(kind.is_available() for kind in kinds):
            raise ConfigurationError(
                f"{strategy} works on the accelerator {names} only, which is not available here: "
                f'{kinds[0].why_unavailable()}. Available: {available()}. Write strategy="auto".'
            )
        raise ConfigurationError(
            f"{strategy} works on the accelerator {names} only, and the accelerator is {accelerator.name!r}. "
            f'Write accelerator={names}, or strategy="auto".'
        )
    if accelerator.own_strategies_only and not works_on:
        raise ConfigurationError(
            f"The accelerator {accelerator.name!r} needs a strategy that is made for it, and {strategy} is not. Write "
            f'strategy="{accelerator.single_device_strategy}" for one device, '
            f'strategy="{accelerator.parallel_strategy}" for several, or strategy="auto". A strategy of your own that '
            f'works there says accelerators = frozenset({{"{accelerator.name}"}}).'
        )


def check_numbers(given: Any, parsed: Any, accelerator: Accelerator) -> None:
    """Check that all device numbers in ``parsed`` exist, and that no number occurs twice.

    Raises:
        ConfigurationError: a number does not exist, or occurs twice.
    """
    # an accelerator may return a different form, which is not checked
    if isinstance(parsed, (list, tuple)) and all(type(index) is int for index in parsed):
        check_indices(given, parsed, accelerator.auto_device_count(), f"the accelerator {accelerator.name!r}")


def check_limit(given: Any, count: int, accelerator: Accelerator, reserved: int | None = None) -> None:
    """Check that the cluster has reserved at least ``count`` devices. If the accelerator sets
    ``device_count_is_limit``, also check that this machine has ``count`` devices.

    Args:
        given: ``devices`` as the user has written it.
        count: the number of devices that ``given`` means.
        accelerator: the kind of device.
        reserved: the number of devices that the cluster has reserved on each machine, or ``None`` if unknown.

    Raises:
        ConfigurationError: there are fewer devices than ``count``.
    """
    if reserved is not None and count > reserved:
        raise ConfigurationError(
            f"devices={given!r} means {count} devices, but the cluster says that {reserved} are reserved on each "
            f"machine. Write devices={reserved}, or reserve {count}."
        )
    if accelerator.device_count_is_limit and count > (there := accelerator.auto_device_count()):
        raise ConfigurationError(
            f"devices={given!r} means {count} devices, but the accelerator {accelerator.name!r} has {there} here. "
            f"Write devices={there}. [DT1044]"
        )


def reserved_of(reserved: int | None, count: int, why: str) -> tuple[int, str]:
    """Return the number of devices that ``devices="auto"`` means, and the reason.

    Args:
        reserved: the number of devices that the cluster has reserved on each machine, or ``None`` if unknown.
        count: the number of devices that the accelerator counts on this machine.
        why: the reason for ``count``.

    Raises:
        ConfigurationError: the cluster has reserved more devices than this machine has.
    """
    if reserved is None:
        return count, why
    if reserved > count:
        raise ConfigurationError(
            f"The cluster says that {reserved} devices are reserved on each machine, but this one shows {count}. Write "
            f"devices={count} if all machines have as many, or look for the missing ones."
        )
    return (count, why) if reserved == count else (reserved, 'devices="auto", and the cluster has reserved')
