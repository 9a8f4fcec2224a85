"""Finds methods of a user's class that drivetrain would never call. They cause a warning or an error.

A contract is a base class that users extend, such as ``Strategy``. :mod:`drivetrain.compat.members` lists members that
Lightning's contracts have, but that drivetrain never calls. Creating an object whose class overrides such a member
raises an error, if ignoring it would change numbers, state or ranks. Otherwise drivetrain warns.
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
    """The members of a contract that drivetrain never calls, and what happens if a class overrides them.

    Attributes:
        kind: the word for an object in messages, for example ``"strategy"``.
        refused: members that must not be overridden, with what to write instead.
        harmless: members whose override only causes a warning.
        needed: the advice in the error about a subclass that overrides nothing; "": such a subclass is no error.
        contract: the name of the class to whose direct subclasses ``needed`` applies.
    """

    kind: str
    refused: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    needed: str = ""
    contract: str = ""

    def check(self, cls: type) -> None:
        """Raise an error if a user's class overrides a refused member. Warn once if it overrides harmless members.

        Raises:
            ConfigurationError: the class overrides a refused member; or it overrides nothing, although ``needed`` is
                set.
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
    """Warn once per class about names that look like a misspelled member of the contract.

    Args:
        cls: the user's class.
        known: names of members that the contract itself does not have.
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
    """Return the public methods, properties and annotated attributes of a contract."""
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
    """Return the first of drivetrain's classes from which a user's class inherits."""
    return next((owner for owner in cls.__mro__ if is_own_class(owner)), object)


def overridden_members(cls: type) -> dict[str, type]:
    """For each name that the program's own classes define, return the class whose definition Python uses."""
    owners = [owner for owner in reversed(cls.__mro__) if owner is not object and not is_own_class(owner)]
    return {name: owner for owner in owners for name in vars(owner)}
