"""Checks which members a user's class overrides, so that every ignored override causes a warning or an error.

A contract is a base class that users extend, such as ``Strategy``. drivetrain calls overrides of a contract's public
members. :mod:`drivetrain.compat.members` lists members of Lightning's classes that drivetrain never calls. If an
ignored override would change numbers, state or ranks, drivetrain raises an error when the object is created. For any
other ignored override, drivetrain warns.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drivetrain.base.introspect import is_own_class, near_misses
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError

_warned: set[tuple[type, frozenset[str]]] = set()


@dataclass(frozen=True)
class Members:
    """The members of a contract that drivetrain never calls, and the treatment of their overrides.

    Attributes:
        kind: the word for an object of the contract in messages, for example ``"strategy"``.
        refused: for each member whose override is an error, what to write instead.
        harmless: members whose override is ignored without an effect on numbers, state or ranks.
        needed: what to write instead of a subclass that overrides nothing; empty if a subclass without overrides is
            useful.
        contract: the name of the contract; ``needed`` applies only to direct subclasses of the contract.
    """

    kind: str
    refused: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    needed: str = ""
    contract: str = ""

    def check(self, cls: type) -> None:
        """Check that drivetrain calls the overrides in a user's class; warn once about harmless overrides that are
        ignored.

        Raises:
            ConfigurationError: drivetrain would ignore an override that changes numbers, state or ranks; or the class
                overrides nothing, although the contract requires an override.
        """
        own = overridden_members(cls)
        for name in sorted(own.keys() & self.refused.keys()):
            raise ConfigurationError(
                f"{own[name].__name__} overrides {name}, which is never called here, so this {self.kind} "
                f"would not do what it is written for. {self.refused[name]}"
            )
        base = own_base(cls)
        extends_contract = base.__name__ == self.contract
        if self.needed and extends_contract and "__init__" not in own and not _public(own) & {*dir(base)}:
            near = next(near_misses(cls, base, members_of(base), alike=0.8, values=True), None)
            cure = self.needed if near is None else f"Did you mean {near[1]} by {near[0]}? Rename it."
            raise ConfigurationError(f"{cls.__name__} overrides nothing of {base.__name__}. {cure}")
        warn_once(cls, self.harmless, "which is not called here and not needed.")


def warn_of_near_misses(cls: type, known: Iterable[str] = ()) -> None:
    """Warn once per class about definitions whose name resembles the name of a member of the contract.

    Args:
        cls: the user's class.
        known: further members besides the public attributes of the contract.
    """
    base = own_base(cls)
    names = members_of(base) | _public(known)
    for name, member in near_misses(cls, base, names, values=True):
        if name not in names and (cls, frozenset({name})) not in _warned:
            _warned.add((cls, frozenset({name})))
            rank_zero_warn(
                f"{cls.__name__}.{name} is never called or read by drivetrain. Did you mean {member}? If the name is "
                "meant, nothing is wrong.",
                about=member_of if inspect.isfunction(member_of := getattr(cls, name, None)) else cls,
            )


def members_of(contract: type) -> set[str]:
    """Return the public members of a contract: its methods, properties, and declared attributes."""
    declared = (name for owner in contract.__mro__ for name in vars(owner).get("__annotations__", ()))
    return _public((*dir(contract), *declared))


def warn_once(cls: type, names: frozenset[str], remark: str) -> None:
    """Warn, once per class, if the class overrides any of ``names``."""
    found = sorted(overridden_members(cls).keys() & names)
    if found and (cls, names) not in _warned:
        _warned.add((cls, names))
        rank_zero_warn(f"{cls.__name__} overrides {', '.join(found)}, {remark}", about=cls)


def _public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def own_base(cls: type) -> type:
    """Return the class of drivetrain that a user's class extends."""
    return next((owner for owner in cls.__mro__ if is_own_class(owner)), object)


def overridden_members(cls: type) -> dict[str, type]:
    """Return, for each name that user's classes define, the class whose definition takes precedence."""
    owners = [owner for owner in reversed(cls.__mro__) if owner is not object and not is_own_class(owner)]
    return {name: owner for owner in owners for name in vars(owner)}
