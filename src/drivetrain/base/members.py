"""What becomes of an override of each member that a contract has in the field, so that none is left out in silence.

A class that users subclass names its table in ``members_table``. A table has the names of the members, and of the
members that subclasses override although they begin with an underscore. An override of a member is called where the
field calls it; or it is refused when the object is taken, because leaving it out would change numbers, state or ranks;
or it changes nothing of these, and one line says that it is not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drivetrain.base.introspect import is_own_class, near_misses
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError

_warned: set[tuple[type, frozenset[str]]] = set()


@dataclass(frozen=True)
class Members:
    """The members of one contract, each in one of three sets.

    Attributes:
        kind: the word that messages use for an object of it, for example ``"strategy"``.
        called: members whose override is called, or read.
        refused: members whose override is an error, and what to write instead.
        harmless: members whose override is not called, and changes no number, state or rank.
        needed: what to write instead of a subclass of the contract that overrides nothing; empty where one is useful.
    """

    kind: str
    called: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    needed: str = ""

    def check(self, cls: type) -> None:
        """Check that everything that a user's class overrides is called; warn once about what is harmless.

        Raises:
            ConfigurationError: it overrides a member that is never called, and whose absence would change numbers,
                state or ranks. Or it overrides nothing, where a subclass of the contract must.
        """
        own = overridden_members(cls)
        for name in sorted(own.keys() & self.refused.keys()):
            raise ConfigurationError(
                f"{own[name].__name__} overrides {name}, which is never called here, and without it this {self.kind} "
                f"would do something else than it says. {self.refused[name]}"
            )
        base = _own_base(cls)
        if self.needed and "members_table" in vars(base) and "__init__" not in own and not _public(own) & {*dir(base)}:
            near = next(near_misses(cls, base, self.called, alike=0.8, values=True), None)
            cure = self.needed if near is None else f"Is {near[0]} meant as {near[1]}? Rename it."
            raise ConfigurationError(f"{cls.__name__} overrides nothing of {base.__name__}. {cure}")
        warn_once(cls, self.harmless, "which is not called here and not needed.")


def check_members(cls: type) -> None:
    """Check a class of the user's by the table that its contract names, and warn of names that are nearly members.

    Raises:
        ConfigurationError: it overrides a member that is never called; see :meth:`Members.check`.
    """
    if is_own_class(cls):
        return
    table: str | None = getattr(cls, "members_table", None)
    known: set[str] = set()
    if table is not None:
        members: Members = load(table)
        members.check(cls)
        known = {*members.called, *members.refused, *members.harmless}
    warn_of_near_misses(cls, known)


def warn_of_near_misses(cls: type, known: Iterable[str] = ()) -> None:
    """Warn, once for a class, of what it defines under nearly the name of a member of its contract.

    Args:
        cls: a class of the user's.
        known: members beyond the public attributes of the contract.
    """
    base = _own_base(cls)
    names = _public({*dir(base), *known})
    for name, member in near_misses(cls, base, names, values=True):
        if name not in names and (cls, frozenset({name})) not in _warned:
            _warned.add((cls, frozenset({name})))
            rank_zero_warn(
                f"{cls.__name__}.{name} is never called or read by drivetrain. Did you mean {member}? If the name is "
                "meant, nothing is wrong.",
                about=member_of if inspect.isfunction(member_of := getattr(cls, name, None)) else cls,
            )


def warn_once(cls: type, names: frozenset[str], remark: str) -> None:
    """Warn, once for a class, if it overrides any of ``names``."""
    found = sorted(overridden_members(cls).keys() & names)
    if found and (cls, names) not in _warned:
        _warned.add((cls, names))
        rank_zero_warn(f"{cls.__name__} overrides {', '.join(found)}, {remark}", about=cls)


def _public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _own_base(cls: type) -> type:
    """Return the class of drivetrain's that a user's class extends."""
    return next((owner for owner in cls.__mro__ if is_own_class(owner)), object)


def overridden_members(cls: type) -> dict[str, type]:
    """Return what the user's classes define, by name, with the class that wins."""
    owners = [owner for owner in reversed(cls.__mro__) if owner is not object and not is_own_class(owner)]
    return {name: owner for owner in owners for name in vars(owner)}
