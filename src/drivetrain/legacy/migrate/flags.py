"""Rewrites calls of ``Trainer(...)`` with arguments of earlier Lightning generations."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from drivetrain.legacy.migrate.bindings import Bindings
from drivetrain.legacy.migrate.source import Span
from drivetrain.legacy.v1_3 import flags
from drivetrain.legacy.v1_3.precision_plugins import ApexMixedPrecisionPlugin
from drivetrain.settings import NOT_YET
from drivetrain.strategies.strategy import StrategyRegistry

_UNKNOWN: Any = object()  # a value that is not known before the program runs
_CALLBACKS = re.compile(r"callbacks=\[(.*)\]", re.DOTALL)
_ARGUMENTS = re.compile(r'(\w+=("[^"]*"|[\w.\-]+|\{value\})(, )?)+')


class TrainerCall:
    """A call of the Trainer in a program."""

    def __init__(self, bindings: Bindings, call: ast.Call) -> None:
        self.source, self.bindings, self.call = bindings.source, bindings, call
        self.given = {keyword.arg: keyword for keyword in call.keywords if keyword.arg is not None}
        self.values = {name: _literal(keyword.value) for name, keyword in self.given.items()}
        self.doomed: set[int] = set()  # the indices of arguments to remove
        self.more: list[tuple[ast.keyword, tuple[str | Span, ...]]] = []  # flag -> the callback that replaces it
        self.imports: list[str] = []

    def run(self) -> list[str]:
        """Rewrite the arguments; return the callbacks of drivetrain that must be imported for them."""
        if self.call.args:
            self.source.left(self.call, "Trainer(...) takes keywords only: write the name of each argument")
        for keyword in self.call.keywords:
            if keyword.arg is None:
                self.source.left(keyword.value, f"Trainer({self.source.text_of(keyword)}): look at what it contains")
            else:
                self._rewrite(keyword.arg, keyword)
        if self.more:
            self._add_callbacks()
        self._report_differences()
        if self.doomed:
            self.source.remove(self._arguments(), self.doomed)
        return self.imports

    def _arguments(self) -> list[Span]:
        """Return the span of each argument in the program's text, in order."""
        positional = [self.source.span(each) for each in self.call.args]
        return sorted([*positional, *(self.source.span(each) for each in self.call.keywords)])

    def _rewrite(self, name: str, keyword: ast.keyword) -> None:
        value = self.values[name]
        if name == "auto_select_gpus":
            self._drop_or_leave(name, keyword, value, 'write devices="auto" for any free ones')
        elif name in ("gpus", "tpu_cores", "num_processes"):
            self._devices(name, keyword, value)
        elif name in ("distributed_backend", "accelerator"):
            self._backend(name, keyword, value)
        elif name in ("amp_level", "amp_backend", "precision"):
            self._precision(name, keyword, value)
        elif name in ("checkpoint_callback", "accumulate_grad_batches"):
            self._callback_or_not(name, keyword, value)
        elif name in flags.NO_EFFECT:
            self._drop(keyword)
        elif name in flags.TUNER and name not in flags.PRESENT:
            self._drop_or_leave(name, keyword, value, "write Tuner(trainer) of drivetrain.tuner")
        elif name in flags.NEW_SPELLING and name not in flags.PRESENT:
            self._superseded(name, keyword, value)
        elif name == "max_steps" and value is None:
            self._drop(keyword)
        elif name not in flags.PRESENT:
            self._leave(keyword, f"Trainer has no argument {name} any more: see docs/arguments.md")
        elif name in NOT_YET and value != NOT_YET[name]:
            self._leave(keyword, "not supported yet: leave it out")

    def _report_differences(self) -> None:
        """Report arguments that drivetrain accepts but whose effect has changed."""
        values = self.values
        if self.bindings.is_of_version_1 and not _HARDWARE & {keyword.arg for keyword in self.call.keywords}:
            self.source.differs(
                self.call, "Trainer(...) without gpus= trained on the CPU, and takes a GPU today if there is one: "
                'write accelerator="cpu" to stay on the CPU',
            )  # fmt: skip
        several = [values.get(name) for name in ("gpus", "num_processes", "devices")]
        if any(type(value) is int and value > 1 for value in several):
            if self.bindings.is_of_version_1 and not {"distributed_backend", "accelerator", "strategy"} & values.keys():
                self.source.differs(
                    self.call, 'several devices were spawned processes, and mean strategy="ddp" today: write '
                    'strategy="ddp_spawn" to spawn them',
                )  # fmt: skip
            self.source.differs(
                self.call, "several processes evaluate each sample once, also where the samples do not divide: "
                "padded_evaluation in docs/compat.md",
            )  # fmt: skip
        if values.get("accumulate_grad_batches", 1) != 1:
            self.source.differs(
                self.given["accumulate_grad_batches"], "accumulate_grad_batches: if an epoch's last window is smaller, "
                "its loss is divided by the batches that it holds: undersized_windows in docs/compat.md",
            )  # fmt: skip

    # ---- kinds of flags ----------------------------------------------------------------------------------------------

    def _devices(self, name: str, keyword: ast.keyword, value: Any) -> None:
        others = ["gpus", "tpu_cores", "num_processes"]
        wins = next((each for each in others if each in self.given and not self._is_off(each)), "gpus")
        has_accelerator = "accelerator" in self.given and not flags.is_backend(self.values["accelerator"])
        if "devices" in self.given or name != wins:
            known = wins in self.given and _UNKNOWN not in (value, self.values[wins])
            drops = name != wins and known
            self._drop_or_leave(name, keyword, value, "two arguments choose the devices: keep one", drops)
        elif value is _UNKNOWN and name != "num_processes":
            self._devices_at_run_time(name, keyword, has_accelerator)
        elif flags.is_off(value) or (value == 1 and name == "num_processes"):
            if has_accelerator:
                self._drop(keyword)
            else:
                self._becomes(keyword, 'accelerator="cpu"')
        else:
            new = flags.spelling_of(name, "{value}")
            self._becomes(keyword, new.partition(", ")[2] if has_accelerator else new)

    def _devices_at_run_time(self, name: str, keyword: ast.keyword, has_accelerator: bool) -> None:
        hardware = {"gpus": "gpu", "tpu_cores": "tpu"}[name]
        simple = all(
            isinstance(node, (ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.expr_context))
            for node in ast.walk(keyword.value)
        )
        if not simple or has_accelerator:
            self._leave(keyword, f'write accelerator="{hardware}", devices=..., or accelerator="cpu" if there are none')
            return
        self._becomes(keyword, f'accelerator="{hardware}" if {{value}} else "cpu", devices={{value}} or 1')

    def _backend(self, name: str, keyword: ast.keyword, value: Any) -> None:
        if value is None:
            self._drop(keyword)
        elif not flags.is_backend(value):
            if name == "distributed_backend":
                self._leave(keyword, "write strategy=..., one of docs/arguments.md")
        elif "strategy" in self.given:
            self._leave(keyword, "strategy= is there too: keep one")
        elif value == "ddp_cpu":
            devices = any(each in self.given for each in ("num_processes", "devices"))
            self._becomes(keyword, 'strategy="ddp_spawn"' if devices else 'accelerator="cpu", strategy="ddp_spawn"')
        elif value in StrategyRegistry.available():
            self._becomes(keyword, flags.spelling_of(name, "{value}"))
            if value.startswith("ddp"):
                self._leave(
                    keyword, f"parameters without a gradient were allowed: if {value} raises an error for them, write "
                    f'strategy="{value}_find_unused_parameters_true"',
                )  # fmt: skip
        else:
            self._leave(keyword, "write a strategy of today, or plugins=[...] with a plugin of drivetrain.legacy.v1_3")

    def _precision(self, name: str, keyword: ast.keyword, value: Any) -> None:
        backend, level = self.values.get("amp_backend"), self.values.get("amp_level")
        if name != "precision":
            if _UNKNOWN in (backend, level):
                self._leave(keyword, f"write {flags.spelling_of(name, '')}")
            else:
                self._drop(keyword)
        elif str(value) == "16" and backend == "apex" and level is not _UNKNOWN:
            today = ApexMixedPrecisionPlugin(level or flags.FLAGS["amp_level"]).today.name
            self._becomes(keyword, f'precision="{today}"')

    def _callback_or_not(self, name: str, keyword: ast.keyword, value: Any) -> None:
        span = self.source.span(keyword.value)
        if name == "accumulate_grad_batches":
            if isinstance(keyword.value, ast.Dict):
                self._callback(keyword, "GradientAccumulationScheduler(", span, ")")
        elif isinstance(value, bool):
            self._becomes(keyword, flags.spelling_of(name, "{value}"))
        elif isinstance(keyword.value, ast.Call) or self._is_assigned_a_call(keyword.value):
            self._callback(keyword, span)
        else:
            self._drop_or_leave(
                name, keyword, value, "write enable_checkpointing=... for a bool, callbacks=[...] for a ModelCheckpoint"
            )

    def _superseded(self, name: str, keyword: ast.keyword, value: Any) -> None:
        has_off = flags.spelling_of(name, "x", True) != flags.spelling_of(name, "x")
        new = flags.spelling_of(name, "{value}", value is not _UNKNOWN and flags.is_off(value))
        inner = _CALLBACKS.fullmatch(new)
        is_sure = "..." not in new and (value is not _UNKNOWN or ("{value}" in new and not has_off))
        if value is not _UNKNOWN and flags.is_default(name, value):
            self._drop(keyword)
        elif is_sure and inner is not None:
            self._callback(keyword, *_filled(inner[1], self.source.span(keyword.value)))
        elif is_sure and _ARGUMENTS.fullmatch(new):
            self._becomes(keyword, new)
        else:
            self._leave(keyword, f"write {new.format(value=self.source.text_of(keyword.value))}")

    # ---- edits -------------------------------------------------------------------------------------------------------

    def _becomes(self, keyword: ast.keyword, new: str) -> None:
        """Replace an argument by ``new``; "{value}" in ``new`` stands for the argument's value."""
        start, end = self.source.span(keyword)
        value = (_after_equals(self.source.text, start, self.source.span(keyword.value)[0]), end)
        self.source.replace(start, end, *_filled(new, value))
        self._changed(keyword, new.replace("{value}", self.source.text_of(keyword.value)))

    def _callback(self, keyword: ast.keyword, *pieces: str | Span) -> None:
        given = self.given.get("callbacks")
        if given is not None and not isinstance(given.value, (ast.List, ast.Constant)):
            self._leave(keyword, f"write {self._text(pieces)} into callbacks=")
            return
        self.more.append((keyword, pieces))
        first = pieces[0] if isinstance(pieces[0], str) else ""
        if name := first.partition("(")[0]:
            self.imports.append(name)
        self._changed(keyword, f"callbacks=[{self._text(pieces)}]")

    def _text(self, pieces: Sequence[str | Span]) -> str:
        return "".join(each if isinstance(each, str) else self.source.text[slice(*each)] for each in pieces)

    def _add_callbacks(self) -> None:
        pieces: list[str | Span] = []
        for _, each in self.more:
            pieces += [", ", *each]
        given = self.given.get("callbacks")
        if given is not None and isinstance(given.value, ast.List) and given.value.elts:
            end = self.source.span(given.value.elts[-1])[1]
            self.source.replace(end, end, *pieces)
        elif given is not None:  # the value is [] or None
            self.source.replace(*self.source.span(given.value), "[", *pieces[1:], "]")
        else:
            first = self.more.pop(0)[0]
            self.source.replace(*self.source.span(first), "callbacks=[", *pieces[1:], "]")
        self.doomed |= {self._index(keyword) for keyword, _ in self.more}

    def _drop(self, keyword: ast.keyword) -> None:
        self.doomed.add(self._index(keyword))
        self.source.changed(keyword, f"Trainer({self.source.text_of(keyword)})", "")

    def _drop_or_leave(self, name: str, keyword: ast.keyword, value: Any, text: str, drops: bool = False) -> None:
        if drops or (value is not _UNKNOWN and flags.is_default(name, value)):
            self._drop(keyword)
        else:
            self._leave(keyword, text)

    def _leave(self, keyword: ast.keyword, text: str) -> None:
        self.source.left(keyword, f"Trainer({self.source.text_of(keyword)}): {text}")

    def _changed(self, keyword: ast.keyword, now: str) -> None:
        self.source.changed(keyword, f"Trainer({self.source.text_of(keyword)})", f"Trainer({now})")

    def _index(self, keyword: ast.keyword) -> int:
        return self._arguments().index(self.source.span(keyword))

    # ---- queries -----------------------------------------------------------------------------------------------------

    def _is_off(self, name: str) -> bool:
        value = self.values[name]
        return value is not _UNKNOWN and (flags.is_off(value) or (name == "num_processes" and value == 1))

    def _is_assigned_a_call(self, node: ast.expr) -> bool:
        """Whether ``node`` is a name, and the file assigns the result of a call, such as ModelCheckpoint(...), to this
        name.
        """
        return isinstance(node, ast.Name) and any(
            isinstance(other, ast.Assign)
            and isinstance(other.value, ast.Call)
            and any(isinstance(target, ast.Name) and target.id == node.id for target in other.targets)
            for other in ast.walk(self.source.tree)
        )


_HARDWARE = frozenset({
    None, "gpus", "tpu_cores", "num_processes", "accelerator", "distributed_backend", "devices", "plugins", "strategy",
})  # fmt: skip


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; ``_UNKNOWN`` for any other expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN


def _filled(text: str, value: Span) -> list[str | Span]:
    """Return the pieces of ``text`` with ``value`` in place of each "{value}"."""
    first, *others = text.split("{value}")
    pieces: list[str | Span] = [first]
    for each in others:
        pieces += [value, each]
    return pieces


def _after_equals(text: str, start: int, value: int) -> int:
    """Return the position at which a keyword's value starts, before any parentheses around the value."""
    found = re.compile(r"\w+\s*=[ \t]*").match(text, start)
    return value if found is None else min(found.end(), value)
