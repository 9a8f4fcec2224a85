"""Members of Lightning's classes that drivetrain never calls. Overriding one has no effect, or raises an error that
says what to write instead.

A contract is a base class that users extend, such as ``Strategy``. drivetrain calls all members of a contract that are
not listed here. The list is from Lightning 2.6, with private members that subclasses override. For ``Strategy`` it has
the members of ``ParallelStrategy`` and ``DDPStrategy``, too; for ``ClusterEnvironment``, those of all subclasses.
"""

from __future__ import annotations

from drivetrain.base.ini import tables
from drivetrain.base.introspect import is_own_class
from drivetrain.compat.overrides import Members, own_base, warn_of_near_misses, warn_once

_FILE = tables(__file__, "members.ini")


def refused(contract: str) -> dict[str, str]:
    """For each member of ``contract`` that must not be overridden, return what to write instead."""
    return {
        name: " ".join(cure.split()) for names, cure in _FILE[f"refused: {contract}"].items() for name in names.split()
    }


def names(table: str) -> dict[str, frozenset[str]]:
    """Return the section ``table`` of ``members.ini``: names by contract or by class."""
    return {owner: frozenset(found.split()) for owner, found in _FILE[table].items()}


_HARMLESS = names("harmless")

TABLES = {
    contract: Members(
        kind,
        refused(contract),
        _HARMLESS.get(contract, frozenset()),
        " ".join(_FILE["needed"].get(contract, "").split()),
        contract,
    )
    for contract, kind in _FILE["kind"].items()
}
"""For each contract, the members that drivetrain never calls."""

TRAINER_ONLY = names("only a Trainer calls")
"""For each contract, the members that a Trainer calls, but not an Engine."""

_FOR_BOTH = {
    "Strategy": "Override setup_module(module) and the verbs of a step for both.",
    "Precision": "Override forward_context() for both.",
}

ENGINE_ONLY = frozenset({"convert_output"})
"""Members of a precision that an Engine calls, but not a Trainer."""


def check_members(cls: type) -> None:
    """Check the members that a user's class overrides. Warn about names that look like a misspelled member.

    Raises:
        ConfigurationError: see :meth:`Members.check`.
    """
    if is_own_class(cls) or own_base(cls) is object:
        return
    contracts = (owner.__name__ for owner in cls.__mro__ if is_own_class(owner))
    table = next((TABLES[name] for name in contracts if name in TABLES), None)
    if table is not None:
        table.check(cls)
    warn_of_near_misses(cls, set() if table is None else table.refused.keys() | table.harmless)


def warn_of_uncalled(cls: type, contract: str, caller: str) -> None:
    """Warn once per class about overrides that ``caller`` never calls.

    Args:
        cls: a user's callback, strategy or precision.
        contract: the name of the contract that ``cls`` extends.
        caller: "Trainer" or "Engine".
    """
    if contract == "Callback":
        _warn_of_callback(cls)
    elif caller == "Engine":
        warn_once(cls, TRAINER_ONLY[contract], f"which a Trainer calls and an Engine does not. {_FOR_BOTH[contract]}")
    else:
        warn_once(cls, ENGINE_ONLY, "which an Engine calls and a Trainer does not. Convert in training_step for both.")


# ---- private methods of callbacks ------------------------------------------------------------------------------------

UNCALLED = names("never called")
"""For each callback class, the private methods of Lightning's class that drivetrain's class never calls."""

INSTEAD = {owner: tuple(found.split()) for owner, found in _FILE["called"].items()}
"""For each callback class, the methods besides hooks that a program can override."""


def _warn_of_callback(cls: type) -> None:
    for base in filter(is_own_class, cls.__mro__):
        if names := UNCALLED.get(base.__name__):
            called = ", ".join((*INSTEAD.get(base.__name__, ()), "its hooks"))
            warn_once(
                cls, names, f"which drivetrain's {base.__name__} never calls. Override what it calls: {called}. If "
                "other code calls the method, nothing is wrong.",
            )  # fmt: skip
