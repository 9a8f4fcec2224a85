"""A profiler that measures operations with torch.profiler, and writes a trace for Chrome's viewer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch.autograd.profiler_util import EventList

from drivetrain.accelerators.cuda import has_cuda
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.errors import ConfigurationError, UnknownNameError, did_you_mean, shown, unknown_argument
from drivetrain.profilers.profiler import Profiler

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

_BATCH = {
    "fit": "run_training_batch", "validate": "run_validation_batch", "test": "run_test_batch",
    "predict": "run_predict_batch",
}  # fmt: skip
"""For each stage, the action whose end is also the end of a step in torch.profiler's schedule."""


class ProfileArguments(TypedDict, total=False):
    """The arguments that PyTorchProfiler passes to ``torch.profiler.profile``."""

    activities: Any
    schedule: Any
    on_trace_ready: Any
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    experimental_config: Any
    execution_trace_observer: Any
    acc_events: bool


_OPTIONS = tuple(ProfileArguments.__annotations__)

_TABLE_ARGUMENTS = tuple(
    name for name in inspect.signature(EventList.table).parameters if name not in ("self", "sort_by", "row_limit")
)
_SORT_KEYS = (
    "cpu_time", "cuda_time", "cpu_time_total", "cuda_time_total", "cpu_memory_usage", "cuda_memory_usage",
    "self_cpu_memory_usage", "self_cuda_memory_usage", "count", "device_time", "device_time_total",
    "device_memory_usage", "self_device_memory_usage", "self_cpu_time_total", "self_device_time_total",
)  # fmt: skip


class PyTorchProfiler(Profiler):
    """Records torch's operations on the host and on the device, with the actions and the layers in which they ran.

    Recording is slow and takes memory, so by default only batches 2, 3 and 4 are recorded (the first batch is 0):
    ``torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)``. After these batches, the run continues at full
    speed. The profiler writes a trace for https://ui.perfetto.dev or ``chrome://tracing``. The report is a table of
    operations.

    Args:
        dirpath: the folder of the trace and of the table's file; ``None``: the folder of the run's logger.
        filename: a part of the files' names. ``None``: the table is printed.
        group_by_input_shapes: whether the table has separate rows for calls of an operation with different input
            shapes.
        emit_nvtx: mark operations for NVIDIA's Nsight instead of recording them. Needs a CUDA device.
        export_to_chrome: write the trace.
        row_limit: the number of rows of the table; -1: all.
        sort_by_key: the column that sorts the table; ``None``: the total time on the CUDA device, or without CUDA, on
            the CPU.
        record_module_names: show the forward pass of each layer in the trace, under the layer's name.
        table_kwargs: further arguments of the method ``table`` of ``torch.profiler.profile.key_averages()``.
        profiler_kwargs: arguments for ``torch.profiler.profile``: ``activities``, ``record_shapes``,
            ``profile_memory``, ``with_stack``, ... ``schedule=None`` records the whole run.

    Raises:
        ConfigurationError: an argument is unknown, or ``sort_by_key`` is not a column.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: Mapping[str, Any] | None = None,
        **profiler_kwargs: Unpack[ProfileArguments],
    ) -> None:
        super().__init__(dirpath, filename)
        if unknown := {key: value for key, value in profiler_kwargs.items() if key not in _OPTIONS}:
            raise unknown_argument("PyTorchProfiler", unknown, _OPTIONS)
        if sort_by_key is not None and sort_by_key not in _SORT_KEYS:
            raise ConfigurationError(
                f"PyTorchProfiler got sort_by_key={shown(sort_by_key)}. {did_you_mean(sort_by_key, _SORT_KEYS)}"
            )
        for key in table_kwargs or {}:
            if key not in _TABLE_ARGUMENTS:
                raise UnknownNameError(
                    f"PyTorchProfiler(table_kwargs=...) got {key!r}, which the table does not take or the profiler has "
                    f"as an argument of its own. {did_you_mean(str(key), _TABLE_ARGUMENTS)}"
                )
        schedule = profiler_kwargs.get("schedule")
        if schedule is not None and not (callable(schedule) and isinstance(schedule(0), torch.profiler.ProfilerAction)):
            raise ConfigurationError(
                f"PyTorchProfiler(schedule={shown(schedule)}): a schedule is a function of the step that returns a "
                "torch.profiler.ProfilerAction. Write schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)."
            )
        self._by_shapes = group_by_input_shapes
        self._emit_nvtx = emit_nvtx
        self._exports = export_to_chrome
        self._row_limit = row_limit
        self._sort_by = None if sort_by_key is None else sort_by_key.replace("cuda_", "device_")
        self._names_layers = record_module_names
        self._table_kwargs = dict(table_kwargs or {})
        self._kwargs = profiler_kwargs
        self._forget()

    def _forget(self) -> None:
        self.profiler: Any = None
        """The running ``torch.profiler.profile`` or ``emit_nvtx``; ``None`` outside a run."""
        self._report = ""
        self._actions: list[tuple[str, Any]] = []
        self._layers: list[Any] = []  # the marks of layers whose forward pass is running
        self._hooks: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(), "profiler": None, "_report": "", "_actions": [], "_layers": [], "_hooks": [],
        }  # fmt: skip

    # ---- a run ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Start recording.

        Raises:
            ConfigurationError: ``emit_nvtx`` is True and there is no CUDA device.
        """
        self.teardown(None)
        self._forget()
        super().setup(stage, local_rank, log_dir)
        if self._emit_nvtx and not has_cuda():
            raise ConfigurationError(
                "PyTorchProfiler(emit_nvtx=True) marks operations for NVIDIA's tools, and there is no CUDA device. "
                "Leave it out to record here."
            )
        self.profiler = self._torch_profiler()
        self.profiler.__enter__()

    def _torch_profiler(self) -> Any:
        if self._emit_nvtx:
            return torch.autograd.profiler.emit_nvtx()  # type: ignore[no-untyped-call]
        kwargs: dict[str, Any] = {
            "schedule": torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
            "record_shapes": self._by_shapes,
            **self._kwargs,
        }
        user = kwargs.pop("on_trace_ready", None)
        if kwargs["schedule"] is not None:  # without a schedule, torch would call the handler too early
            kwargs["on_trace_ready"] = lambda profiler: self._ready(profiler, user)
        return torch.profiler.profile(**kwargs)

    def watch(self, module: nn.Module) -> None:
        """Until the run ends, record the forward pass of each layer of ``module``, under the layer's name."""
        if not self._names_layers:
            return
        for name, layer in module.named_modules():
            if not name:
                continue
            label = f"[module] {name}: {type(layer).__name__}"

            def enter(*_: Any, label: str = label) -> None:
                self._layers.append(_entered(label))

            def leave(*_: Any) -> None:
                if self._layers:
                    self._layers.pop().__exit__(None, None, None)

            self._hooks.append(layer.register_forward_pre_hook(enter))
            self._hooks.append(layer.register_forward_hook(leave, always_call=True))

    def start(self, action_name: str) -> None:
        """Begin an action. The trace shows the action under this name."""
        if self.profiler is not None:
            self._actions.append((action_name, _entered(action_name)))

    def stop(self, action_name: str) -> None:
        """End an action. If the action is a batch, also let torch's schedule step."""
        index = next((index for index, (name, _) in enumerate(self._actions) if name == action_name), None)
        if index is not None:
            self._actions.pop(index)[1].__exit__(None, None, None)
        if action_name == _BATCH.get(self._stage or "") and isinstance(self.profiler, torch.profiler.profile):
            # end open marks before the step and begin new marks after the step, because torch crashes if a mark spans
            # two recordings
            ends = self.profiler.current_action is torch.profiler.ProfilerAction.RECORD_AND_SAVE
            while_open = self._actions if ends else []
            for _, mark in reversed(while_open):
                mark.__exit__(None, None, None)
            self.profiler.step()
            while_open[:] = [(name, _entered(name)) for name, _ in while_open]

    def _ready(self, profiler: Any, user: Any) -> None:
        averages = profiler.key_averages(group_by_input_shape=self._by_shapes)
        key = self._sort_by or ("device_time_total" if has_cuda() else "cpu_time_total")
        table = averages.table(**{"sort_by": key, "row_limit": self._row_limit, **self._table_kwargs})
        stage = f" of {self._stage}" if self._stage else ""
        self._report = f"Profile{stage}, batches up to {profiler.step_num}\n{table}"
        if user is not None:
            user(profiler)
        if self._exports:
            path = self._path(".pt.trace.json", f"step{profiler.step_num}")
            profiler.export_chrome_trace(path)
            rank_zero_info(f"PyTorchProfiler wrote {path}. Open it in https://ui.perfetto.dev or chrome://tracing.")

    def _finish(self) -> None:
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        while self._actions:
            self._actions.pop()[1].__exit__(None, None, None)
        profiler.__exit__(None, None, None)
        if not isinstance(profiler, torch.profiler.profile):
            return
        if self._kwargs.get("schedule", True) is None:
            self._ready(profiler, self._kwargs.get("on_trace_ready"))
        elif not self._report and self._stage is not None:
            rank_zero_warn(
                f"PyTorchProfiler has recorded nothing: its schedule did not reach a batch that is recorded, and "
                f"{self._stage} had {profiler.step_num} batches. Run more batches, or pass schedule=None to record the "
                "whole run."
            )

    def summary(self) -> str:
        """Return the table of the last recorded operations; "" before the first recording."""
        return self._report

    def describe(self) -> None:
        """Stop recording, and print or write the table."""
        self._finish()
        super().describe()

    def teardown(self, stage: str | None) -> None:
        """Stop recording, end all actions, and remove the hooks from the module."""
        self._finish()
        while self._layers:
            self._layers.pop().__exit__(None, None, None)
        while self._hooks:
            self._hooks.pop().remove()


def _entered(label: str) -> Any:
    mark: Any = torch.profiler.record_function(label)
    mark.__enter__()
    return mark
