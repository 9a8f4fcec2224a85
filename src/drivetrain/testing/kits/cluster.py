"""The checks for cluster environments. Most checks create the environment once for each rank, with this rank's
environment variables.
"""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.base.ini import tables
from drivetrain.clusters.environment import ClusterRegistry
from drivetrain.errors import ConfigurationError
from drivetrain.testing.checks import CannotTryError, Part, Skipped, is_true, raises, same

SETTINGS = ("ranks",)

_KEPT = ("PATH", "HOME", "TMPDIR", "PYTHONPATH", "LANG", "SYSTEMROOT")
_CLUSTERS = tables(__file__, "clusters.ini")


def _known(name: str) -> dict[str, str]:
    """Return the environment variables that the registered cluster ``name`` sets. For another class, return torchrun's
    variables.
    """
    own = dict(_CLUSTERS.get(name, _CLUSTERS["torchrun"]))
    return {**(_known(own.pop("with")) if "with" in own else {}), **own}


def _variables(part: Part) -> list[dict[str, str]]:
    """Return the environment variables of each rank: the setting ``ranks``, or by default the variables of two ranks on
    this machine.
    """
    if "ranks" in part.settings:
        return [{name: str(value) for name, value in each.items()} for each in part.settings["ranks"]]
    Path(part.folder, "hosts").write_text(f"launch\n{platform.node()}\n")
    known = _known(part.path).items()
    return [{name: value.format(rank=rank, folder=part.folder) for name, value in known} for rank in range(2)]


@contextmanager
def _rank(part: Part, variables: Mapping[str, str]) -> Iterator[Any]:
    """Context in which this process has the environment variables of a rank. Yields a new cluster environment."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    os.environ.clear()
    os.environ.update({**kept, **variables})
    yield part.make()  # the check's sandbox restores the process's variables


def _answers(environment: Any) -> dict[str, Any]:
    names = ("world_size", "global_rank", "local_rank", "node_rank")
    meeting = {"main_address": environment.main_address, "main_port": environment.main_port}
    return {**{name: getattr(environment, name)() for name in names}, **meeting}


def _all(part: Part) -> list[dict[str, Any]]:
    found = []
    for variables in _variables(part):
        with _rank(part, variables) as environment:
            found.append(_answers(environment))
    return found


def try_it(part: Part) -> None:
    """Check that a cluster environment can be created and knows the world size."""
    for variables in _variables(part):
        with _rank(part, variables) as environment:
            try:
                environment.world_size()
            except Exception as error:
                raise CannotTryError(
                    f"{type(environment).__name__}.world_size() raises {type(error).__name__}: {error}. Give the kit "
                    'the variables of all ranks: --settings \'{"ranks": [{"MY_RANK": "0"}, {"MY_RANK": "1"}]}\'.'
                ) from error


def answers_have_their_types(part: Part) -> None:
    """Ranks, sizes and the port are ints, the address is a non-empty str, and each global rank is less than the world
    size.
    """
    for each in _all(part):
        for name, value in each.items():
            same(type(value), str if name == "main_address" else int, f"type of {name}, {value!r}")
        is_true(each["main_address"], "main_address is empty")
        is_true(0 < each["main_port"] < 2**16, f"main_port is {each['main_port']}")
        is_true(0 <= each["global_rank"] < each["world_size"], f"global_rank {each['global_rank']} of {each}")


def each_rank_is_there_once(part: Part) -> None:
    """The global ranks of all processes are 0, 1, ..., world size - 1, each once."""
    found = _all(part)
    same([each["global_rank"] for each in found], list(range(len(found))), "global_rank() of the processes")
    same([each["world_size"] for each in found], [len(found)] * len(found), "world_size() of the processes")


def local_ranks_count_from_zero(part: Part) -> None:
    """On each machine, the local ranks are 0, 1, ..., each once."""
    nodes: dict[int, list[int]] = {}
    for each in _all(part):
        nodes.setdefault(each["node_rank"], []).append(each["local_rank"])
    for node, found in nodes.items():
        same(found, list(range(len(found))), f"local_rank() of the processes on node {node}")
    same(sorted(nodes), list(range(len(nodes))), "node_rank() of the processes")


def all_ranks_meet_at_one_place(part: Part) -> None:
    """All processes have the same main address and main port."""
    same(len({(each["main_address"], each["main_port"]) for each in _all(part)}), 1, "number of meeting places")


def answers_stay_the_same(part: Part) -> None:
    """A second call of each method returns the value of the first call. An unpickled copy also returns this value."""
    for variables in _variables(part):
        with _rank(part, variables) as environment:
            first = _answers(environment)
            same(_answers(environment), first, "a second time")
            same(_answers(pickle.loads(pickle.dumps(environment))), first, "a pickled copy")


def the_numbers_of_the_first_process_are_kept(part: Part) -> None:
    """If this process starts the other processes, set_world_size and set_global_rank have an effect. Otherwise they do
    nothing.
    """
    with _rank(part, _variables(part)[0]) as environment:
        started_here, before = not environment.creates_processes_externally, _answers(environment)
        environment.set_world_size(3)
        environment.set_global_rank(2)
        expected = (3, 2) if started_here else (before["world_size"], before["global_rank"])
        same((environment.world_size(), environment.global_rank()), expected, "world_size() and global_rank()")


def other_settings_are_refused(part: Part) -> None:
    """validate_settings accepts the number of processes of the job, and raises a ConfigurationError for another
    number.
    """
    found = _all(part)
    nodes = len({each["node_rank"] for each in found})
    with _rank(part, _variables(part)[0]) as environment:
        if not environment.creates_processes_externally:
            raise Skipped("this process starts the others, so any number is right")
        environment.validate_settings(len(found) // nodes, nodes)
        with raises(ConfigurationError, f"validate_settings({len(found) + 1}, {nodes})"):
            environment.validate_settings(len(found) + 1, nodes)


def it_is_detected_only_where_it_is(part: Part) -> None:
    """detect(environ) is True with the variables of a rank, and False without these variables. A class with a
    detect_priority is registered, because only registered classes can be detected.
    """
    with _rank(part, _variables(part)[0]) as environment:
        cls = type(environment)
        # priority 0 means: used if nothing else is detected
        if (priority := cls.detect_priority) is None or priority == 0:
            raise Skipped("it is used only where it is passed, or where nothing else is detected")
        if part.path == "ray_train":
            raise Skipped("it asks the package ray, which knows its workers")
        same(bool(cls.detect(dict(os.environ))), True, "detect() with the variables")
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        same(bool(cls.detect(kept)), False, "detect() without them")
        asked = {entry.cls for entry in ClusterRegistry.entries()}
        if "detect_priority" in vars(cls) and cls not in asked:
            raise AssertionError(
                f"the class sets detect_priority = {priority} and is not registered. Write "
                f'ClusterRegistry.register("name", {cls.__name__}) below the class.'
            )


def it_reads_its_own_variables(part: Part) -> None:
    """A cluster environment that is created with environ= reads variables from this mapping, not from the process's
    variables.
    """
    expected, variables = _all(part), _variables(part)
    for answers, own in zip(expected, variables, strict=True):
        with _rank(part, own):
            kept = {name: value for name, value in os.environ.items() if name in _KEPT and name not in own}
        environment = part.make(environ={**kept, **own})
        if environment.environ is os.environ:
            raise Skipped("its constructor has no argument environ")
        os.environ.clear()
        os.environ.update(kept)
        same(_answers(environment), answers, "with environ= and without the variables in the process")


def it_can_be_torn_down(part: Part) -> None:
    """teardown works after the other methods were called, and can be called twice."""
    with _rank(part, _variables(part)[0]) as environment:
        _answers(environment)
        environment.teardown()
        environment.teardown()
