"""Lightning's ``fabric.strategies.DeepSpeedStrategy``: DeepSpeed for your own training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import strategies as plain
from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.introspect import reads, temporarily
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.compat.fabric_strategies import FabricParallelStrategy, Strategy, Target
from drivetrain.engine import snapshots
from drivetrain.engine.wrappers import requires_closure
from drivetrain.errors import ConfigurationError
from drivetrain.precision.precision import Precision
from drivetrain.strategies import _deepspeed_config, _deepspeed_optimizers, _deepspeed_state
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT

_TAG = "checkpoint"  # the name of the subfolder in a checkpoint's folder
_OF_DEEPSPEED = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "lr_scheduler", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    }
)  # fmt: skip
"""The entries that DeepSpeed itself writes into a checkpoint."""

_LOSS_SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
"""The constructor's arguments for loss scaling with the precision "16-true". Each one is also an attribute."""


@dataclass
class _Trained:
    """A module that was set up with an optimizer."""

    engine: Any
    module: nn.Module
    optimizer: Optimizer
    scheduler: Any


class FabricDeepSpeedStrategy(FabricParallelStrategy, plain.DeepSpeedStrategy):
    """DeepSpeed's ZeRO; see :class:`drivetrain.strategies.DeepSpeedStrategy`, and docs/deepspeed.md.

    Set up a module and its optimizer in one call, ``fabric.setup(model, optimizer)``. ``fabric.backward(loss)`` and
    ``optimizer.step()`` call DeepSpeed's engine. To accumulate gradients, set ``gradient_accumulation_steps`` in the
    engine's configuration, or use ``fabric.no_backward_sync``. After each optimizer step, the strategy steps the
    scheduler that was passed to ``fabric.setup``. Checkpoints are folders in DeepSpeed's own format.

    Args:
        accelerator, parallel_devices, cluster_environment, precision, process_group_backend, timeout: as for DDP.
        stage: what is sharded over the ranks. 1: optimizer states; 2: optimizer states and gradients; 3: optimizer
            states, gradients and parameters.
        remote_device: with stage 3, the device on which ``fabric.init_module`` creates parameters.
        logging_batch_size_per_gpu: the batch size in DeepSpeed's messages.
        config: DeepSpeed's configuration, or the path of a JSON file. It replaces all arguments that are entries of a
            configuration, such as ``stage``. ``None``: the file that the environment variable
            ``PL_DEEPSPEED_CONFIG_PATH`` names, if it is set.
        logging_level: the level of DeepSpeed's own logger.
        loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale: the loss scaling with precision
            "16-true".
        load_full_weights: ignored. A file is always read as complete weights, and a folder as DeepSpeed's format.
        exclude_frozen_parameters: leave parameters with ``requires_grad=False`` out of checkpoints.
        zero_optimization: must be True. The arguments that are not listed here are entries of DeepSpeed's
            configuration.

    Raises:
        ConfigurationError: DeepSpeed is missing, or an argument is wrong.
    """

    _plain: type = plain.DeepSpeedStrategy
    DEEPSPEED_ENV_VAR = "PL_DEEPSPEED_CONFIG_PATH"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        zero_optimization: bool = True,
        stage: int = 2,
        remote_device: str | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str = "/local_nvme",
        params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000,
        max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int = 4,
        block_size: int = 1048576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        thread_count: int = 1,
        pin_memory: bool = False,
        sub_group_size: int = 1_000_000_000_000,
        contiguous_gradients: bool = True,
        overlap_comm: bool = True,
        allgather_partitions: bool = True,
        reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000,
        reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True,
        logging_batch_size_per_gpu: int | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        logging_level: int = logging.WARNING,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: int = 1,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        given = dict(locals())
        plain.DeepSpeedStrategy.__init__(
            self, accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            precision_plugin=precision, process_group_backend=process_group_backend, timeout=timeout,
            logging_level=logging_level,
        )  # fmt: skip
        found = os.environ.get(self.DEEPSPEED_ENV_VAR) if config is None else config
        self.config = _config(given) if found is None else _deepspeed_config.read(found)
        self.stage = self.config.get("zero_optimization", {}).get("stage", 0)
        if self.stage not in (1, 2, 3):
            raise ConfigurationError(
                f"DeepSpeedStrategy got the stage {self.stage!r} of ZeRO, or a configuration without one: nothing "
                'would be spread over the ranks. Write stage=1, 2 or 3, or strategy="ddp".'
            )
        self.remote_device, self.load_full_weights = remote_device, load_full_weights
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self.loss_scale, self.initial_scale_power = loss_scale, initial_scale_power
        self.loss_scale_window, self.hysteresis, self.min_loss_scale = loss_scale_window, hysteresis, min_loss_scale
        self._all: list[_Trained] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_all": []}

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are sharded over the ranks."""
        return self.stage == 3

    _deepspeed_engine: Any = reads("deepspeed_engine", "DeepSpeed's engine, under a name that programs read.")

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration that DeepSpeed's engine gets."""
        made = super().engine_config()
        made["gradient_accumulation_steps"] = self.config.get("gradient_accumulation_steps", 1)
        if self.precision_plugin.name == "16-true":
            made["fp16"] = {**{name: getattr(self, name) for name in _LOSS_SCALING}, **made["fp16"]}
        return made

    # ---- set up --------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Set up ``module`` for evaluation. With stage 3, return DeepSpeed's engine, which contains ``module``."""
        module = super().setup_module(module)
        return module if self.stage < 3 else self._started(module, None)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise NotImplementedError(
            "DeepSpeedStrategy sets an optimizer up together with its module. Write "
            "model, optimizer = fabric.setup(model, optimizer)."
        )

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Return DeepSpeed's engine, which contains ``module`` and steps the optimizer. Also return the optimizer and
        the scheduler.
        """
        if len(optimizers) != 1:
            raise ConfigurationError(
                f"fabric.setup got {len(optimizers)} optimizers, and DeepSpeed's engine steps one. Put all parameters "
                "into one optimizer, with a parameter group for each kind."
            )
        [optimizer] = optimizers
        if requires_closure(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} evaluates the loss several times per step, and DeepSpeed's engine steps "
                'once after a backward pass. Use another optimizer, or strategy="ddp".'
            )
        module = super().setup_module(module)
        engine = self._started(module, optimizer)
        self._all.append(_Trained(engine, module, optimizer, scheduler))
        self._engine = engine
        return engine, optimizers, scheduler

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which to create layers. With stage 3, DeepSpeed shards each layer when it is created."""
        return self.module_sharded_context() if self.zero_stage_3 else super().module_init_context(empty_init)

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Context in which to create layers. With stage 3, DeepSpeed shards each layer when it is created."""
        if not self.zero_stage_3 or self.remote_device is None:
            return self.model_sharded_context()
        return self._deepspeed().zero.Init(config_dict_or_path=self.engine_config(), remote_device=self.remote_device)

    def _started(self, module: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        with self._for(module):
            self._start_engine(optimizer)
            engine: nn.Module = self._engine
        return engine

    @contextmanager
    def _for_trained(self, module: nn.Module) -> Iterator[_Trained | None]:
        """Enter :meth:`_for` for a module or its engine. Yield the module's :class:`_Trained`; ``None`` for a module
        without an optimizer.
        """
        one = self._of(module)
        with self._for(module) if one is None else self._for(one.module, one.engine):
            yield one

    def _for(self, module: nn.Module, engine: Any = None) -> AbstractContextManager[None]:
        """Context in which the methods of the base class use ``module`` and ``engine``."""
        return temporarily(vars(self), lightning_module=module, _engine=engine)

    def _of(self, what: Any) -> _Trained | None:
        """Return the :class:`_Trained` that has this module, engine or optimizer; ``None`` if there is none."""
        return next((each for each in self._all if what in (each.engine, each.module) or what is each.optimizer), None)

    def teardown(self) -> None:
        """Release the engines. If there is only one process, this restores the modules' complete parameters."""
        while len(self._all) > 1:
            one = self._all.pop(0)
            with self._for(one.module, one.engine):
                self._let_go()
        last = self._all.pop() if self._all else None
        with nullcontext() if last is None else self._for(last.module, last.engine):
            plain.DeepSpeedStrategy.teardown(self)
        self._engine = None

    # ---- one step ------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Let DeepSpeed's engine compute the gradients of ``tensor``, and scale the loss as configured."""
        one = self._all[0] if module is None and len(self._all) == 1 else self._of(module)
        if one is None:
            raise ConfigurationError(
                f"fabric.backward(loss) with DeepSpeed, and {len(self._all)} modules were set up with an optimizer. "
                "Write fabric.backward(loss, model=model), with a module that was set up with an optimizer."
            )
        one.engine.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        """Let the engine step, if enough gradients are accumulated. Then step the scheduler."""
        one = self._of(optimizer)
        if one is None:
            return Strategy.optimizer_step(self, optimizer, **kwargs)
        with self._for(one.module, one.engine):
            loss = plain.DeepSpeedStrategy.optimizer_step(self, optimizer, kwargs.pop("closure", None), **kwargs)
        if one.scheduler is not None and one.engine.was_step_applied():
            one.scheduler.step()
        return loss

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Do nothing for an engine's optimizer, because the engine clears gradients itself."""
        if self._of(optimizer) is None:
            optimizer.zero_grad()

    @contextmanager
    def accumulating(self, model: Any) -> Iterator[None]:
        if (one := self._of(model)) is None or one.engine.gradient_accumulation_steps() > 1:
            yield  # the engine counts the batches itself
            return
        one.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            one.engine.set_gradient_accumulation_boundary(True)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Let the engine clip gradients from its next step on. The engine skips a step with non-finite gradients."""
        one = self._of(optimizer)
        with self._for(module, None if one is None else one.engine):
            return plain.DeepSpeedStrategy.clip_gradients(self, module, optimizer, max_norm, "norm", norm_type)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return complete weights on rank 0; every rank must call this method."""
        with self._for_trained(module):
            return self.lightning_module_state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load complete weights; every rank must call this method."""
        with self._for_trained(module) as one:
            self.load_model_state_dict({"state_dict": state_dict}, strict)
            if one is not None:
                _deepspeed_state.load_master_weights(one.module, state_dict)

    def save_checkpoint(  # type: ignore[override]
        self,
        path: str | Path,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: snapshots.Filters | None = None,
    ) -> None:
        """Write ``state`` into a folder in DeepSpeed's own format.

        Raises:
            ConfigurationError: ``state`` does not have exactly one module that was set up with an optimizer, or it has
                a name that DeepSpeed uses itself; or ``filter`` or ``storage_options`` is given.
        """
        if filter or storage_options is not None:
            raise ConfigurationError(
                "DeepSpeed's engine writes checkpoints itself, without filter and storage_options. Leave them out, or "
                "save fabric.strategy.get_module_state_dict(model)."
            )
        one, rest = self._parted(state, "save")
        if taken := sorted(_OF_DEEPSPEED & rest.keys()):
            raise ConfigurationError(
                f"The state has the names {', '.join(map(repr, taken))}, which DeepSpeed uses itself. Rename them."
            )
        besides = snapshots.of(rest, {}, self.states(self))
        # A scheduler may have changed the optimizer's options, such as ``lr``, since the last step.
        _deepspeed_optimizers.pass_options_to(one.engine, one.optimizer)
        one.engine.save_checkpoint(
            str(self.broadcast(path)), tag=_TAG, client_state=besides,
            exclude_frozen_parameters=self.exclude_frozen_parameters,
        )  # fmt: skip

    def load_checkpoint(  # type: ignore[override]
        self, path: str | Path, state: Target = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file with weights, or a folder in DeepSpeed's own format. Files in the folder are unpickled and can
        run code.

        Raises:
            CheckpointError: the checkpoint does not fit.
        """
        folder = Path(self.broadcast(path))
        if not folder.is_dir() or not isinstance(state, MutableMapping):
            return Strategy.load_checkpoint(self, folder, state, strict, weights_only)
        one, rest = self._parted(state, "load")
        wants_optimizer = any(each is one.optimizer for each in state.values())
        tag = _TAG if (folder / _TAG).is_dir() else None
        held = _deepspeed_state.load_folder(
            one.engine, folder, tag, self.world_size, load_module_strict=strict, load_optimizer_states=wants_optimizer,
            load_lr_scheduler_states=False,
        )  # fmt: skip
        if wants_optimizer:
            _deepspeed_optimizers.take_options_of(one.engine, one.optimizer)
        own = {name: value for name, value in held.items() if name not in _OF_DEEPSPEED}
        left = snapshots.into(rest, own, strict, str(folder), self.states(self))
        state.update(rest)
        return left

    def _parted(self, state: Mapping[str, Any], verb: str) -> tuple[_Trained, dict[str, Any]]:
        """Return the :class:`_Trained` of the module in ``state``, and the entries other than this module and its
        optimizer.
        """
        found = [one for value in state.values() if isinstance(value, nn.Module) and (one := self._of(value))]
        if len(found) != 1:
            raise ConfigurationError(
                f"fabric.{verb} got a state with {len(found)} modules that were set up with an optimizer, and a folder "
                f'of DeepSpeed holds one. Write fabric.{verb}(path, {{"model": model, "optimizer": optimizer}}).'
            )
        own = (found[0].engine, found[0].module, found[0].optimizer)
        return found[0], {name: value for name, value in state.items() if not any(value is each for each in own)}


def _config(given: Mapping[str, Any]) -> dict[str, Any]:
    def named(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    zero = named(
        "stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter",
        "allgather_bucket_size", "reduce_bucket_size", "sub_group_size",
    )  # fmt: skip
    memory = named("nvme_path", "pin_memory")
    if given["offload_optimizer"]:
        own = {"device": given["offload_optimizer_device"], "buffer_count": given["optimizer_buffer_count"]}
        zero["offload_optimizer"] = {**memory, **own}
    if given["offload_parameters"]:
        own = {"device": given["offload_params_device"], "buffer_count": given["params_buffer_count"]}
        own |= {"buffer_size": given["params_buffer_size"], "max_in_cpu": given["max_in_cpu"]}
        zero["offload_param"] = {**memory, **own}
    config = {
        "activation_checkpointing": named(
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
        ),
        "aio": named("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count"),
        "zero_allow_untested_optimizer": given["zero_allow_untested_optimizer"],
        "zero_optimization": zero if given["zero_optimization"] else {},
    }  # fmt: skip
    if given["logging_batch_size_per_gpu"]:
        config["train_micro_batch_size_per_gpu"] = given["logging_batch_size_per_gpu"]
    return config
