"""Pipeline parallelism: each rank holds some stages of the model, and micro-batches pass through the stages."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.introspect import temporarily
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.restoring import check_optimizer_state, load_states
from drivetrain.base.tree import move_to_host, parameters_of
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, check_count, described, number_of, unknown_value
from drivetrain.precision.precision import ClipAlgorithm, Precision
from drivetrain.strategies import pipeline_stages as stages
from drivetrain.strategies.gradient_exchange import Bucket, alike
from drivetrain.strategies.group import Group
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy
from drivetrain.strategies.sharded_gradients import clip_factor, total_norm
from drivetrain.strategies.step_parts import OwnStep, StepParts
from drivetrain.strategies.strategy import StrategyRegistry

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")

_SPREAD: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that an earlier run has reduced to this rank's stages


@StrategyRegistry.register("pipeline")
class PipelineStrategy(ParallelStrategy):
    """torch.distributed.pipelining: the ranks of a pipeline hold the stages of one model, and see the same samples.

    The module defines ``configure_pipeline(num_stages)``. This hook returns the module's stages in order, and a loss
    function. See docs/pipeline.md.

    Args:
        schedule: "gpipe": forward passes of all micro-batches, then backward passes. "1f1b": forward and backward
            passes alternate, so "1f1b" needs less memory than "gpipe". "interleaved_1f1b": the passes alternate, and
            each rank holds several stages.
        num_microbatches: the number of parts into which each batch is split.
        stages_per_rank: the number of stages on each rank; ``None``: 2 if interleaved, otherwise 1.
        pipeline_parallel_size: the number of neighbouring ranks that form a pipeline; "auto": all ranks. Different
            pipelines see different samples.
        process_group_backend, timeout, accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin: as for :class:`ParallelStrategy`.

    Raises:
        ConfigurationError: an argument is wrong, or two arguments contradict each other.
    """

    facts = ParallelStrategy.facts.but(
        refuses={"compile": "It runs the stages that configure_pipeline returns; compile their layers there."},
        allows_inference_mode=False,  # autograd cannot use the inference tensors that a rank receives
        restores_after_setup=True,  # each rank loads only its own stages
        honoured_hooks=StepParts.HOOKS - {"on_before_backward", "backward", "on_after_backward"},
    )

    def __init__(
        self,
        schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b",
        num_microbatches: int = 4,
        stages_per_rank: int | None = None,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout,
        )  # fmt: skip
        if schedule not in SCHEDULES:
            raise unknown_value("PipelineStrategy", "schedule", schedule, SCHEDULES)
        interleaved = schedule == "interleaved_1f1b"
        stages_per_rank = (2 if interleaved else 1) if stages_per_rank is None else stages_per_rank
        sizes = {"num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
        sizes |= {} if pipeline_parallel_size == "auto" else {"pipeline_parallel_size": pipeline_parallel_size}
        for name, size in sizes.items():
            check_count("PipelineStrategy", name, size, lowest=1)
        if interleaved is (stages_per_rank == 1):
            raise ConfigurationError(
                f'PipelineStrategy(schedule="{schedule}", stages_per_rank={stages_per_rank}) do not go together. Write '
                'schedule="interleaved_1f1b" for several stages on each rank, and another schedule for one.'
            )
        self.schedule, self.num_microbatches, self.stages_per_rank = schedule, num_microbatches, stages_per_rank
        self.pipeline_parallel_size = pipeline_parallel_size
        self._pipeline: Group | None = None
        self._forget_stages()

    def _forget_stages(self) -> None:
        self._stages: list[nn.Module] = []
        self._loss: Callable[..., Any] = nn.MSELoss()
        # By name of a parameter or buffer: the index in the pipeline of the rank that holds the tensor. All ranks hold
        # the tensors that are not listed.
        self._owners: dict[str, int] = {}
        self._schedules: dict[Any, stages.Schedule] = {}
        # _form(loss, weight) returns a value of the type that the user's loss function returns.
        self._form: Callable[[Tensor, Tensor], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_pipeline": None, "_schedules": {}, "_stages": [], "_loss": None, "_form": None}
        return {**super().__getstate__(), **own}

    # ---- sizes and groups ----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of ranks in a pipeline.

        Raises:
            ConfigurationError: the number of processes is not a multiple of this size.
        """
        world, size = self.world_size, self.pipeline_parallel_size
        if size == "auto":
            return world
        if size == 1 < world:
            raise ConfigurationError(
                f"PipelineStrategy(pipeline_parallel_size=1) with {world} processes splits no model. "
                'Write strategy="ddp".'
            )
        if world % size:
            raise ConfigurationError(
                f"PipelineStrategy(pipeline_parallel_size={size}) does not divide the {world} processes of this job. "
                "Write a size that does, or start another number of processes."
            )
        return size

    @property
    def _rank_of_loss(self) -> int:
        return self.pipeline.ranks[(self.num_stages - 1) % self.size]

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return self.size * self.stages_per_rank

    def make_data_group(self, world: Group) -> Group:
        size = self.size
        data = world if size == 1 else world.new(range(world.rank % size, world.size, size))
        first = world.rank - world.rank % size
        self._pipeline = world if size == world.size else world.new(range(first, first + size))
        return data

    @property
    def pipeline(self) -> Group:
        """The group of ranks that hold the stages of one model."""
        _ = self.data
        assert self._pipeline is not None  # the pipeline group is created together with the data group
        return self._pipeline

    # ---- the model -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        if trainer is not None and trainer.progress.fn == "fit":
            if not getattr(module, "automatic_optimization", True):
                raise ConfigurationError(
                    f"{type(module).__name__} optimizes manually, and PipelineStrategy runs the backward passes of all "
                    "stages itself. Set automatic_optimization = True, or use another strategy."
                )
            if self.precision_plugin.scales_loss:
                raise ConfigurationError(
                    f"{type(self.precision_plugin).__name__} scales the loss, and PipelineStrategy does not. Write "
                    'precision="bf16-mixed".'
                )
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1 or any(isinstance(each, LBFGS) for each in self.optimizers):
            raise ConfigurationError(
                f"PipelineStrategy steps one optimizer that evaluates no closure, and configure_optimizers returned "
                f"{', '.join(type(each).__name__ for each in self.optimizers)}. Return one such as AdamW."
            )

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device=False)  # the complete module may not fit on the device
        self._forget_stages()
        self._stages, self._loss = stages.configured(module, self.num_stages, self.size)
        self._owners = owners = stages.owned_by(module, self._stages, self.size)
        here = stages.named(module)
        if any(here[name].is_meta for name, owner in owners.items() if owner == self.pipeline.index):
            raise ConfigurationError(
                f"{type(module).__name__} has stages of this process on the meta device: an earlier run has spread it "
                "over other processes, or configure_model made it without memory. Make a new module, with memory."
            )
        if module not in _SPREAD:
            self.share_from_rank_zero([*module.parameters(), *module.buffers()], self.world)
            stages.keep(module, owners, self.pipeline.index)
            _SPREAD.add(module)
            rank_zero_info(
                f"PipelineStrategy spreads {type(module).__name__} over {number_of(self.size, 'process')} in "
                f"{number_of(self.num_stages, 'stage')} "
                f'(schedule "{self.schedule}", {self.num_microbatches} micro-batches). '
                "Training calls the stages and the loss function, not training_step."
            )
        return stages.place_own(module, self.root_device) if move_to_device else module

    def teardown(self) -> None:
        self._schedules = {}
        module = self.lightning_module
        if module is not None and self.root_device != HOST:
            stages.place_own(module, HOST)
        # Hide the module from super(), because super() would move the module. The stages of other ranks must stay on
        # the meta device.
        with temporarily(vars(self), lightning_module=None):
            super().teardown()

    # ---- the step ------------------------------------------------------------------------------------------------

    def accumulating(self, model: nn.Module) -> Any:
        return nullcontext()  # gradients are exchanged only after the last batch of an optimizer step

    def bind_step(self, parts: StepParts) -> OwnStep | None:
        def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> tuple[Any, int]:
            if index == 0:
                parts.begin(size)
            parameters = [each for each in self.lightning_module.parameters() if not each.is_meta]
            held = [each.grad for each in parameters]  # the gradients of the earlier batches of this optimizer step
            for parameter in parameters:
                parameter.grad = None
            form, loss, weight = self._run_schedule(batch)
            gradients = [each.grad for each in parameters]
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient
            with nullcontext() if last else parts.accumulating():
                # share: the weight of this batch in the optimizer step. loss_of() may also rescale the earlier
                # gradients.
                share = parts.loss_of(form(torch.ones_like(loss), weight), index, last)
            if share is not None:
                _add(parameters, gradients, share.detach() / weight.clamp(min=torch.finfo(weight.dtype).tiny))
            if last:
                self._average(parameters)
                parts.before_step()
            return form(loss, weight), int(last and parts.optimizer_step())

        return step

    def _run_schedule(self, batch: Any) -> tuple[Callable[[Tensor, Tensor], Any], Tensor, Tensor]:
        """Run the forward and backward passes of one batch. The resulting gradients are sums over the micro-batches.

        Returns:
            Three values, on all ranks. First, a function of ``(loss, weight)`` that returns the same type as the user's
                loss function. Second, the mean loss. Third, the weight of this loss: 1 if the loss function returns no
                weights.
        """
        inputs, target = stages.split_batch(batch)
        pipeline = self.pipeline
        schedule, last = self._schedule_for(inputs, trains=True), self._rank_of_loss
        sums = schedule.train(inputs, target)
        if self._form is None:
            self._form = pipeline.broadcast(schedule.form, src=last)
        total, weight = pipeline.broadcast(sums, src=last)
        return self._form, total / weight.clamp(min=torch.finfo(weight.dtype).tiny), weight

    def _average(self, parameters: Sequence[Tensor]) -> None:
        """Replace gradients by their means over the ranks that hold the same stages and see different samples.

        A gradient that is ``None`` on all ranks stays ``None``, so that the optimizer skips the parameter.
        """
        if self.data.size == 1:
            return
        trained = [each for each in parameters if each.requires_grad or each.grad is not None]
        for bucket in map(Bucket, alike(trained)):
            bucket.flat = self.data.all_reduce(bucket.pack())
            bucket.unpack()

    def _schedule_for(self, inputs: tuple[Tensor, ...], trains: bool) -> stages.Schedule:
        """Return the schedule for inputs of these shapes. Different shapes need different schedules, because the ranks
        exchange tensors of fixed shapes.

        A schedule also determines which stages send gradients, so it changes when layers are frozen or thawed.
        """
        trained = stages.trained_stages(self._stages) if trains else ()
        key = trains, trained, tuple((tuple(each.shape), each.dtype) for each in inputs)
        if key not in self._schedules:
            numbers = range(self.pipeline.index, self.num_stages, self.size)
            own = {number: self._stages[number] for number in numbers}
            count = stages.microbatches(len(inputs[0]), self.num_microbatches, self.size)
            self._schedules[key] = stages.Schedule(
                self.schedule, own, self.num_stages, count, self._loss if trains else None, self.root_device,
                self.pipeline.handle, self.precision_plugin.forward_context, trained,
            )  # fmt: skip
        return self._schedules[key]

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def bind(self, name: str) -> Callable[..., Any]:
        method = super().bind(name)
        if name == "training_step":
            return method
        attributes = self.lightning_module.__dict__

        def step(*args: Any, **kwargs: Any) -> Any:
            # in a step, self(x) passes x through the stages of all ranks
            with temporarily(attributes, forward=self._forward):
                return method(*args, **kwargs)

        return step

    def _forward(self, *inputs: Any) -> Any:
        """Return the output of the last stage, on every rank of the pipeline."""
        if not inputs or not all(isinstance(each, Tensor) for each in inputs):
            raise ConfigurationError(
                f"{type(self.lightning_module).__name__} was called with "
                f"{', '.join(map(described, inputs)) or 'no arguments'}, but a pipeline passes tensors to its first "
                "stage. Pass tensors, without keywords."
            )
        output = self._schedule_for(inputs, trains=False).evaluate(inputs)
        return self.pipeline.broadcast(output, src=self._rank_of_loss)

    def explain(self, error: BaseException) -> Exception | None:
        """Explain torch's error about a step that uses a layer of another rank."""
        if isinstance(error, (RuntimeError, NotImplementedError)) and "meta" in str(error):
            return ConfigurationError(
                "A step used a layer that another process of the pipeline holds. Call self(x) in validation_step, "
                "test_step and predict_step: it passes x through all stages."
            )
        return None

    # ---- gradients -----------------------------------------------------------------------------------------------

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float,
        algorithm: ClipAlgorithm = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        if algorithm == "value":
            return super().clip_gradients(module, optimizer, clip_val, algorithm)
        if clip_val <= 0:
            return None
        parameters = parameters_of(optimizer)
        gradients = [each.grad for each in parameters if each.grad is not None]
        here = total_norm(gradients, norm_type) if gradients else torch.zeros((), device=self.root_device)
        # all ranks must exchange one dtype, although their gradients may have different dtypes
        kind = functools.reduce(torch.promote_types, (each.dtype for each in parameters), torch.float32)
        norms = self.pipeline.all_gather(here.to(kind))
        norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
        coefficient = clip_factor(norm, clip_val, norm_type, error_if_nonfinite)
        for gradient in gradients:
            gradient.mul_(coefficient)
        return norm

    def _own_buffers(self, module: nn.Module) -> list[Tensor]:
        return [buffer for buffer in super()._own_buffers(module) if not buffer.is_meta]

    # ---- state ---------------------------------------------------------------------------------------------------

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        state = module.state_dict()
        if 0 not in self.pipeline.ranks:
            return {}
        whole = {name: self._from_owner(value, self._owners.get(name)) for name, value in state.items()}
        return whole if self.is_global_zero else {}

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        own = module.state_dict(keep_vars=True)
        elsewhere = {name: value for name, value in own.items() if isinstance(value, Tensor) and value.is_meta}
        module.load_state_dict({name: elsewhere.get(name, value) for name, value in state.items()}, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if 0 not in self.pipeline.ranks:
            return {}
        state = optimizer.state_dict()
        there = stages.named(self.lightning_module)
        owners = {id(there[name]): owner for name, owner in self._owners.items()}
        found = {
            number: self._from_owner(state["state"].get(number), owners.get(id(parameter)))
            for number, parameter in enumerate(parameters_of(optimizer))
        }
        entries = {number: each for number, each in found.items() if each is not None}
        return {**state, "state": entries} if self.is_global_zero else {}

    def load_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[Any], module_state: Mapping[str, Any]
    ) -> None:
        load_states("optimizer", optimizers, states, check_optimizer_state, stages.load_own)

    def _from_owner(self, value: Any, owner: int | None) -> Any:
        """Return ``value`` of the rank with the index ``owner`` in the pipeline, in host memory. If ``owner`` is
        ``None``, return this rank's ``value``. All ranks of the pipeline must call this method.
        """
        if owner is None:
            return move_to_host(value)
        mine = self.pipeline.index == owner
        return self.pipeline.broadcast(move_to_host(value) if mine else None, src=self.pipeline.ranks[owner])


def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], factor: Tensor) -> None:
    """Add the gradients of one batch, multiplied by ``factor``, to the gradients of this step's earlier batches."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            gradient.mul_(factor)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
