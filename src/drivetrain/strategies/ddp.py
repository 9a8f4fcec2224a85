"""The whole model on every device; gradients are averaged while they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, NotSupportedError, did_you_mean
from drivetrain.precision.precision import Precision
from drivetrain.registry import Registry
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy
from drivetrain.strategies.strategy import Strategy

_STARTS = ("popen", "spawn", "fork", "forkserver")


class DDPStrategy(ParallelStrategy):
    """``torch.nn.parallel.DistributedDataParallel`` around the model while it is trained.

    Evaluation and prediction run the model itself: nothing is exchanged there but what user code asks for (trap T43).

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as for :class:`ParallelStrategy`.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: how gradients are exchanged; see torch's communication hooks.
        model_averaging_period: not in this version.
        start_method: how the processes are started where no cluster does: "popen", the program anew; "spawn", "fork" or
            "forkserver", this one's objects in new processes.
        ddp_arguments: what else the constructor of DistributedDataParallel takes, such as ``find_unused_parameters``,
            ``static_graph`` or ``gradient_as_bucket_view``.
    """

    @classmethod
    def register_strategies(cls, strategy_registry: Registry[Strategy]) -> None:
        starts = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
        for name, start in starts.items():
            strategy_registry.register(name, cls, start_method=start)
            for unused in (True, False):
                strategy_registry.register(
                    f"{name}_find_unused_parameters_{str(unused).lower()}",
                    cls,
                    start_method=start,
                    find_unused_parameters=unused,
                )

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_arguments: Any,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout,
        )  # fmt: skip
        if start_method not in _STARTS:
            raise ConfigurationError(
                f"DDPStrategy(start_method={start_method!r}): there is no such way to start processes. "
                f"{did_you_mean(str(start_method), _STARTS)}"
            )
        if model_averaging_period is not None:
            raise NotSupportedError(
                f"DDPStrategy(model_averaging_period={model_averaging_period!r}) is not supported by this version of "
                "drivetrain. Leave it out."
            )
        self.start_method = start_method
        self.ddp_arguments = ddp_arguments
        self.comm = (ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        self._wraps = True

    def setup(self, trainer: Any) -> None:
        self._wraps = trainer is None or trainer.progress.fn == "fit"
        super().setup(trainer)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        if not (self._wraps and any(parameter.requires_grad for parameter in module.parameters())):
            self._same_everywhere(module)
            return module
        wrapped = DistributedDataParallel(module, **self.ddp_arguments)
        state, hook, wrapper = self.comm
        if hook is not None:
            wrapped.register_comm_hook(state, hook if wrapper is None else wrapper(hook))
        return wrapped

    def _same_everywhere(self, module: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0, as wrapping does."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.copy_(self.broadcast(tensor.detach()))

    def bind(self, name: str) -> Callable[..., Any]:
        step, model = super().bind(name), self.model
        if not isinstance(model, DistributedDataParallel) or self.lightning_module.automatic_optimization:
            return step
        if model.static_graph:
            raise ConfigurationError(
                "DDPStrategy(static_graph=True) needs to see where a backward pass begins, and manual optimization has "
                "it inside the step. Leave static_graph out."
            )

        def step_by_hand(*args: Any, **kwargs: Any) -> Any:
            model.require_forward_param_sync = True
            with model.no_sync():  # the backward passes are inside the step, and say themselves when they begin
                return step(*args, **kwargs)

        return step_by_hand

    def before_manual_backward(self, loss: torch.Tensor) -> None:
        model = self.model
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = True
            found = [loss] if model.find_unused_parameters and not model.static_graph else []
            model.reducer.prepare_for_backward(found)

    def after_manual_backward(self) -> None:
        if isinstance(self.model, DistributedDataParallel):  # or the end of the forward pass would prepare it again
            self.model.require_backward_grad_sync = False

    def teardown(self) -> None:
        self.model = self.lightning_module  # the wrapper belongs to the run
        super().teardown()

    def block_backward_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()
