"""Train with DeepSpeed's ZeRO, which shards optimizer states, gradients and parameters over the ranks. DeepSpeed's
engine runs the optimizer step.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.compiled import compiled_method
from drivetrain.base.introspect import reads, temporarily
from drivetrain.base.packages import deepspeed
from drivetrain.base.restoring import load_states
from drivetrain.base.torch_private import mark_as_stepped
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import CheckpointError, ConfigurationError, check_installed
from drivetrain.precision.precision import ClipAlgorithm, Precision
from drivetrain.strategies import _deepspeed_config, _deepspeed_optimizers, _deepspeed_state
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy
from drivetrain.strategies.step_parts import OwnStep, StepParts
from drivetrain.strategies.strategy import StrategyRegistry

_NAMES: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "deepspeed_stage_1": {"stage": 1},
    "deepspeed_stage_1_offload": {"stage": 1, "offload_optimizer": True},
    "deepspeed_stage_2": {"stage": 2},
    "deepspeed_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "deepspeed_stage_3": {"stage": 3},
    "deepspeed_stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "deepspeed_stage_3_offload_nvme": {
        "stage": 3, "offload_optimizer": True, "offload_parameters": True, "offload_optimizer_device": "nvme",
        "offload_params_device": "nvme",
    },
}  # fmt: skip
_WORLD: list[Any] = []  # the process group from which DeepSpeed has created its own groups


class DeepSpeedStrategy(ParallelStrategy):
    """DeepSpeed's ZeRO on any accelerator that DeepSpeed supports, including the CPU; needs the package ``deepspeed``.

    DeepSpeed's engine exchanges and clips gradients, and steps the optimizer of ``configure_optimizers``. The engine
    skips a step whose gradients overflow. Schedulers of ``configure_optimizers`` step after each optimizer step that
    the engine has not skipped. If ``config`` names a scheduler, the engine itself steps this scheduler.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as for :class:`ParallelStrategy`.
        stage: which tensors are sharded over the ranks. 1: optimizer states; 2: also gradients; 3: also parameters.
            ``None``: the stage in ``config``, or 2.
        offload_optimizer: keep optimizer states in host memory, and run the optimizer step on the host. ``True``, or
            DeepSpeed's options for offloading.
        offload_parameters: keep parameters in host memory; only with ``stage=3``.
        offload_optimizer_device, offload_params_device: "cpu", or "nvme" for files in ``nvme_path``.
        nvme_path: a folder on a fast disk.
        zero_optimization: more entries for the section of this name in DeepSpeed's configuration.
        config: DeepSpeed's configuration, or the path of a JSON file with the configuration. The other arguments
            override entries of the configuration.
        logging_level: the level of DeepSpeed's own logger.
        options: any other entry of DeepSpeed's configuration or of the section ``zero_optimization``, such as
            ``allgather_bucket_size``, ``overlap_comm`` or ``gradient_clipping``.

    Raises:
        ConfigurationError: the package is missing, or an argument is wrong.
    """

    strategy_name = "deepspeed"
    facts = ParallelStrategy.facts.but(
        honoured_hooks=StepParts.HOOKS,
        engine_class="drivetrain.compat.fabric_deepspeed:FabricDeepSpeedStrategy",
        refuses={"replica_check_every": "spreads the optimizer's state over them."},
    )

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        *,
        stage: int | None = None,
        offload_optimizer: bool | Mapping[str, Any] = False,
        offload_parameters: bool | Mapping[str, Any] = False,
        offload_optimizer_device: str = "cpu",
        offload_params_device: str = "cpu",
        nvme_path: str = "/local_nvme",
        zero_optimization: Mapping[str, Any] | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        logging_level: int = logging.WARNING,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        **options: Any,
    ) -> None:
        check_installed(type(self).__name__, "deepspeed")
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.process_group_backend, self.timeout = process_group_backend, timeout
        offloaded = {
            "offload_optimizer": (offload_optimizer, offload_optimizer_device),
            "offload_param": (offload_parameters, offload_params_device),
        }
        self.config = _deepspeed_config.given(config, stage, zero_optimization, offloaded, nvme_path, options)
        self.stage: int = self.config["zero_optimization"]["stage"]
        # stage 3 gathers parameters during evaluation, which inference mode does not allow
        self.facts = self.facts.but(allows_inference_mode=self.stage < 3)
        self.logging_level, self._options = logging_level, options
        self._engine: Any = None
        self._trained: set[int] = set()  # the id() of each parameter that the engine trains
        self._unit = 1.0  # the factor by which the engine's gradients must be multiplied
        self._window_open = False
        self._had_local_rank = True
        self._kept: tuple[dict[str, Any], dict[int, dict[str, Any]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None, "_trained": set(), "_kept": None}

    deepspeed_engine: Any = reads("_engine", "DeepSpeed's engine of the current or last run; ``None`` before.")

    def agreed_options(self) -> dict[str, Any]:
        return {**super().agreed_options(), "config": json.dumps({**self.config, **self._options}, default=str)}

    # ---- life ----------------------------------------------------------------------------------------------------

    def connect(self, model: nn.Module) -> None:
        self._let_go()
        super().connect(model)

    def setup_environment(self) -> None:
        super().setup_environment()
        deepspeed = self._deepspeed()
        self._had_local_rank = "LOCAL_RANK" in os.environ
        os.environ["LOCAL_RANK"] = str(self.local_rank)  # DeepSpeed reads this variable in every step
        if _WORLD and _WORLD[0] is not dist.group.WORLD:
            # DeepSpeed's groups belong to an earlier, destroyed process group
            deepspeed.utils.groups._release_process_group_references()
        _WORLD[:] = [dist.group.WORLD]
        deepspeed.init_distributed(verbose=False)  # DeepSpeed then uses the existing process group
        device = deepspeed.accelerator.get_accelerator().device_name()
        if device.partition(":")[0] != self.root_device.type:
            raise ConfigurationError(
                f"DeepSpeed was imported for the accelerator {device!r}, and this Trainer computes on "
                f"{self.root_device.type!r}. Set the environment variable DS_ACCELERATOR={self.root_device.type} "
                "before the program imports deepspeed."
            )

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return a context for ``configure_model``. With stage 3, DeepSpeed partitions each new layer in this
        context.
        """
        if self.stage < 3:
            return super().model_sharded_context()
        return self._deepspeed().zero.Init(config_dict_or_path=self.engine_config())

    def setup(self, trainer: Any) -> None:
        fitting = trainer.progress.fn == "fit"
        if fitting:
            self._check_run(trainer)
        self.engine_config()  # raise configuration errors before the model is moved
        super().setup(trainer)
        if not fitting and self.stage == 3:
            self._start_engine(None)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        if module is not self.lightning_module:
            raise ConfigurationError(
                "DeepSpeedStrategy works only under a Trainer. An Engine has another class, with the options of "
                'Fabric\'s. Write Engine(strategy="deepspeed_stage_2"), or pass '
                "drivetrain.compat.fabric_deepspeed.FabricDeepSpeedStrategy(...)."
            )
        module = super().setup_module(module, move_to_device)
        whole = [parameter for parameter in module.parameters() if not hasattr(parameter, "ds_id")]
        self.share_from_rank_zero([*whole, *module.buffers()])
        return module

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        _deepspeed_optimizers.check(self.optimizers, bool(self.lr_scheduler_configs), self.engine_config())
        self._start_engine(self.optimizers[0] if self.optimizers else None)

    def _check_run(self, trainer: Any) -> None:
        if not self.lightning_module.automatic_optimization:
            raise ConfigurationError(
                "DeepSpeed's engine makes the optimizer step, and automatic_optimization = False makes it in "
                'training_step. Write automatic_optimization = True, or strategy="ddp".'
            )
        if trainer.settings.gradient_clip_val and trainer.settings.gradient_clip_algorithm == "value":
            raise self._no_clipping_by_value()

    def _no_clipping_by_value(self) -> ConfigurationError:
        return ConfigurationError(
            'DeepSpeed\'s engine clips gradients by their norm, not with gradient_clip_algorithm="value". '
            'Write gradient_clip_algorithm="norm", or strategy="ddp".'
        )

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration that DeepSpeed's engine gets.

        Raises:
            ConfigurationError: the configuration contradicts the Trainer's arguments, or an option is unknown.
        """
        self._deepspeed()
        return _deepspeed_config.complete(self.config, self._options, self.precision_plugin.name)

    def _deepspeed(self) -> Any:
        """Return the package ``deepspeed``, configured for this strategy's device and logging level."""
        os.environ.setdefault("DS_ACCELERATOR", self.root_device.type)

        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # DeepSpeed calls both functions in every step
            message = f"`torch.distributed.{name}` is deprecated"
            warnings.filterwarnings("ignore", message, FutureWarning, module="torch.distributed.c10d_logger")
        deepspeed.utils.logger.setLevel(self.logging_level)
        return deepspeed

    def _start_engine(self, optimizer: Optimizer | None) -> None:
        deepspeed, module = self._deepspeed(), self.lightning_module
        index = self.root_device.index
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        fitting = optimizer is not None or "optimizer" in self.engine_config()
        self._engine, *_ = deepspeed.initialize(
            args=None if index is None else SimpleNamespace(device_rank=index),
            model=module,
            model_parameters=trained if fitting else None,
            optimizer=None if optimizer is None else _deepspeed_optimizers.stand_in(optimizer),
            config=self.engine_config(),
        )
        self.model, self._trained = self._engine, set(map(id, trained))
        if fitting:
            _deepspeed_optimizers.hand_over(self.precision_plugin, self._engine.optimizer)
        if fitting and optimizer is None:
            made = self._engine.basic_optimizer
            groups = [{**group, "params": trained} for group in made.param_groups]
            self.optimizers = [_deepspeed_optimizers.like(made, groups)]

    def _let_go(self) -> None:
        """Detach the last run's engine from its module."""
        engine, self._engine, self._kept, self._window_open = self._engine, None, None, False
        if engine is not None:
            for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
                hook.remove()
            engine.destroy()

    def teardown(self) -> None:
        _deepspeed_optimizers.take_back(self.precision_plugin)
        try:
            self._tear_down()
        finally:
            if self.world_size == 1 and not self._had_local_rank:
                # a later run would conclude from LOCAL_RANK that a launcher has started this process
                os.environ.pop("LOCAL_RANK", None)

    def _tear_down(self) -> None:
        if self._engine is None:
            super().teardown()
            return
        # Read the states first: reading needs the process group, and super() destroys the process group.
        if self.world_size == 1 and dist.is_initialized():
            states = {id(each): self.optimizer_state(each) for each in self.optimizers}
            kept = self.module_state(self.lightning_module), states
            self._let_go()
            self._kept = kept
            _deepspeed_state.put_together(self.lightning_module)
            self.model = self.lightning_module
        # Hide module and optimizers from super(), because super() would move both to the host. The engine's shards must
        # stay on their device, so that the module still works and can be saved.
        with temporarily(vars(self), optimizers=[], lightning_module=None):
            super().teardown()

    # ---- the step ------------------------------------------------------------------------------------------------

    def bind(self, name: str) -> Callable[..., Any]:
        if name == "training_step" or self.stage == 3:
            return super().bind(name)
        return compiled_method(self.lightning_module, name)

    def bind_step(self, parts: StepParts) -> OwnStep:
        engine = self._engine
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.requires_grad != (id(parameter) in self._trained):
                raise ConfigurationError(
                    f"{name} was {'frozen' if parameter.requires_grad else 'trained'} when DeepSpeed's engine started, "
                    "which divides the trained parameters among the ranks once. Freeze and thaw before fit, or use "
                    'strategy="ddp".'
                )

        def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> tuple[Any, int]:
            self._window_open = False
            if index == 0:
                parts.begin(size)
                self._unit = 1.0
            engine.set_gradient_accumulation_boundary(last)
            output = parts.training_step(batch, batch_idx)
            loss = None if output is None else parts.loss_of(output, index, last)
            if loss is None:
                found = "None" if output is None else "a WeightedLoss of the number 0"  # with one process
                raise ConfigurationError(
                    f"training_step returned {found}, and DeepSpeed's engine counts on a backward pass for every "
                    "batch. Return a loss of zero that depends on the parameters, or a WeightedLoss whose weight 0 is "
                    "a tensor."
                )
            parts.backward(engine.scale(loss if self._unit == 1 else loss / self._unit))
            self._window_open = not last
            if not last:
                return output, 0
            parts.before_step()
            return output, int(parts.optimizer_step())

        return step

    def rescale_gradients(self, optimizer: Any, factor: float | Tensor) -> None:
        """Record that the gradients accumulated so far must be multiplied by ``factor``. The optimizer step multiplies
        the engine's gradients by the product of all factors. To compensate, each later loss is divided by the product
        of the factors so far.

        If ``factor`` is on the device, this method waits for the device.
        """
        self._unit *= float(factor)
        if self._unit == 0:  # the factor was 0: the earlier gradients are 0 already
            self._unit = 1.0

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float,
        algorithm: ClipAlgorithm = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Let the engine clip gradients in the next optimizer step."""
        if algorithm == "value":
            if clip_val:  # a limit of 0 means no clipping
                raise self._no_clipping_by_value()
            return None
        if norm_type != 2 or error_if_nonfinite:
            raise ConfigurationError(
                f"clip_gradients(norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}): DeepSpeed's "
                "engine clips by the norm 2, and skips a step that is not finite. Leave the arguments out."
            )
        self._engine.optimizer.clip_grad = float(clip_val)
        return None

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Let the engine clip gradients, step with the current options of ``optimizer``, and clear the gradients."""
        loss = None if closure is None else closure()
        engine, zero = self._engine, self._engine.optimizer
        schedules_itself = engine.lr_scheduler is not None
        if not schedules_itself:
            _deepspeed_optimizers.pass_options_to(engine, optimizer)
        if self._unit != 1:
            zero.override_loss_scale(zero.loss_scale / self._unit)
        engine.step()
        zero.custom_loss_scaler = False
        if schedules_itself:
            _deepspeed_optimizers.take_options_of(engine, optimizer)
        mark_as_stepped(optimizer)
        self.precision_plugin.stepped = engine.was_step_applied()
        return loss

    # ---- state ---------------------------------------------------------------------------------------------------

    def _trains(self) -> bool:
        return self._engine is not None and getattr(self._engine, "basic_optimizer", None) is not None

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """On rank 0, return the complete weights, in float32 if the engine has float32 master weights."""
        if self._kept is not None:
            return self._kept[0]
        if self.stage < 3 and not (self._trains() and self.precision_plugin.name in ("bf16-true", "16-true")):
            return super().module_state(module)
        return _deepspeed_state.whole_weights(module, self.is_global_zero, self._trains())

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        if any(map(_deepspeed_state.is_partitioned, module.parameters())):
            _deepspeed_state.load_partitioned_weights(module, state, strict)
        else:
            super().load_module_state(module, state, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0, return the state dict that the optimizer would have in a job of one process."""
        if self._kept is not None:
            return self._kept[1].get(id(optimizer), {})
        if not self._trains():
            return super().optimizer_state(optimizer)
        return _deepspeed_state.whole_optimizer_state(self._engine, optimizer, self.is_global_zero)

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        load = functools.partial(_deepspeed_state.load_optimizer_state, self._engine)
        load_states("optimizer", optimizers, states, lambda state, optimizer: None, load)
        _deepspeed_state.load_master_weights(self.lightning_module, module_state)

    def whole_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if state := self.optimizer_state(optimizer):
            optimizer.load_state_dict(state)
        return optimizer

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        if self._window_open:
            raise CheckpointError(
                "The gradients of an open accumulation window are in DeepSpeed's engine, and a checkpoint cannot hold "
                "them. Save after an optimizer step: ModelCheckpoint(every_n_train_steps=...) counts those."
            )
        return super().rank_state(module)

    # ---- folders of DeepSpeed's own format -----------------------------------------------------------------------

    def save_deepspeed_checkpoint(self, folder: str | Path, tag: str | None = None) -> None:
        """Write weights and optimizer states as a folder of DeepSpeed's own format. Every rank must call this method.

        Args:
            folder: the folder to write, for DeepSpeed's tools. DeepSpeed also copies the tool ``zero_to_fp32.py`` into
                this folder.
            tag: the name of the subfolder; ``None``: DeepSpeed makes a name from the number of steps.
        """
        self._running_engine("save_deepspeed_checkpoint").save_checkpoint(str(folder), tag=tag)

    def load_deepspeed_checkpoint(self, folder: str | Path, tag: str | None = None) -> None:
        """Load a folder that :meth:`save_deepspeed_checkpoint` wrote. Every rank must call this method in
        ``on_train_start``.

        The folder's files are unpickled, which can run code.

        Raises:
            CheckpointError: the folder has no checkpoint with this tag, or a different number of processes has written
                the folder.
        """
        engine = self._running_engine("load_deepspeed_checkpoint")
        _deepspeed_state.load_folder(engine, Path(folder), tag, self.world_size)
        for optimizer in self.optimizers:
            _deepspeed_optimizers.take_options_of(engine, optimizer)

    def _running_engine(self, method: str) -> Any:
        if not self._trains() or not dist.is_initialized():
            raise ConfigurationError(
                f"{method} needs DeepSpeed's engine, which exists while fit runs. Call it in a hook of a callback or "
                "of the module, such as on_train_epoch_end."
            )
        return self._engine

    def reads_folder(self, path: str) -> bool:
        return _deepspeed_state.is_folder(path)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None, into: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint. From a folder of DeepSpeed's own format, read only the weights.

        Raises:
            CheckpointError: for a folder of DeepSpeed's own format, if ``weights_only`` is not False or training would
                resume from the folder.
        """
        if not self.reads_folder(str(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, weights_only, into)
        trainer = getattr(self.lightning_module, "_trainer", None)
        resumes = trainer is not None and trainer.progress.fn == "fit"
        return {"state_dict": _deepspeed_state.weights_in(Path(checkpoint_path), resumes, weights_only)}


for _name, _arguments in _NAMES.items():
    StrategyRegistry.register(_name, DeepSpeedStrategy, **_arguments)
