"""Replace the devices, the machines and the other ranks of a planned job, because a plan runs without them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.accelerators.cpu import CPUAccelerator
from drivetrain.base import torch_private
from drivetrain.base.introspect import overrides
from drivetrain.base.torch_private import APPLY, own_buffers, own_parameters
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.forecast import torch_tools
from drivetrain.plan import Machine, Plan, resolve
from drivetrain.settings import Settings
from drivetrain.strategies import agreement
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.group import TorchGroup
from drivetrain.strategies.parallel import ParallelStrategy
from drivetrain.strategies.pipeline import PipelineStrategy
from drivetrain.strategies.strategy import Strategy


@dataclass
class Job:
    """The planned job, and the rank that this process plays in the job.

    Attributes:
        devices: the number of ranks.
        per_node: the number of ranks per machine.
        rank: the rank that this process plays.
        on_host: whether the devices are CPUs.
    """

    devices: int
    per_node: int
    rank: int = 0
    on_host: bool = False

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return self.devices // self.per_node


class PlannedAccelerator(CPUAccelerator):
    """Stands for the planned devices, which this machine may not have. Fake tensors on the planned devices have the
    device type "cpu".
    """

    auto_priority: int | None = None  # type: ignore[assignment]  # accelerator="auto" never chooses it

    @classmethod
    def joins_auto(cls) -> bool:
        return False

    def total_memory(self, device: torch.device) -> int | None:
        return None


class PlannedEnvironment(ClusterEnvironment):
    """Describes the ranks of a planned job. No other rank is started."""

    def __init__(self, job: Job) -> None:
        super().__init__({})
        self._job = job

    def world_size(self) -> int:
        return self._job.devices

    def global_rank(self) -> int:
        return self._job.rank

    def local_rank(self) -> int:
        return self._job.rank % self._job.per_node

    def node_rank(self) -> int:
        return self._job.rank // self._job.per_node

    def nodes_meant(self, num_nodes: int) -> int:
        return self._job.nodes

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept all settings, because the command line has set them."""


def planned(job: Job, strategy: str | None = None) -> Callable[[Settings], Plan]:
    """Return a function that replaces :func:`drivetrain.plan.resolve`. The function resolves the Trainer's arguments
    for the devices of ``job``. If ``strategy`` is given, ``strategy`` replaces the program's strategy.
    """
    other = strategy

    def resolved(settings: Settings) -> Plan:
        strategy = other or settings.strategy
        if isinstance(strategy, Strategy):
            strategy.own_parts = replace(strategy.own_parts, accelerator=None, environment=None, devices=())
            strategy.parallel_devices = ()
        given = settings.plugins if isinstance(settings.plugins, (list, tuple)) else [settings.plugins]
        kept: list[Any] = [each for each in given if each is not None and not isinstance(each, ClusterEnvironment)]
        environment: Any = PlannedEnvironment(job)
        chosen: Any = "ddp" if strategy == "auto" and job.devices > 1 else strategy
        changed = replace(
            settings, accelerator=PlannedAccelerator(), devices=job.per_node, num_nodes=job.nodes,
            plugins=[*kept, environment] if job.devices > 1 else kept, strategy=chosen,
        )  # fmt: skip
        plan = resolve(changed, Machine(None, has_tensorboard=False))
        if job.devices > 1 and not plan.strategy_class.facts.is_distributed:
            raise ConfigurationError(
                f"{plan.strategy_class.__name__} trains on one device, and the plan is for {job.devices}. Write "
                'strategy="ddp" in the program, or --devices 1.'
            )
        return plan

    return resolved


def refused_strategy(strategy: Strategy) -> str | None:
    """Return why a run with ``strategy`` cannot be planned, or ``None`` if it can be planned."""
    facts = strategy.facts
    if facts.drives_all_devices:
        why = "trains on all devices in one process"
    elif facts.honoured_hooks and overrides(strategy, "bind_step", PipelineStrategy):
        why = "runs the steps itself"
    elif facts.accelerators or overrides(strategy, "_meet", ParallelStrategy):
        why = "does not exchange through torch's process groups"
    else:
        return None
    return f'{type(strategy).__name__} {why}, which is not planned yet. Write strategy="ddp" or "fsdp" for the plan.'


def stand_in_for_ranks(job: Job) -> None:
    """Patch drivetrain in this process. Collectives then behave as if all ranks of ``job`` had passed this rank's
    values.
    """
    strategies, groups = cast("Any", ParallelStrategy), cast("Any", TorchGroup)

    def meet(strategy: Any) -> None:
        torch_tools.join_fake_ranks(job.rank, job.devices, strategy.timeout)

    strategies._meet = meet
    groups._exchange, groups.store = _exchange, None
    groups._check_other_groups = lambda group, ranks: None
    cast("Any", agreement)._gathered = lambda world, text: [text] * world.size
    torch_tools.keep_meshes_real()
    stand_in_for_ddp()


def stand_in_for_ddp() -> None:
    """Patch torch's DDP in this process, because DDP's constructor compares and broadcasts values, and fake tensors
    have no values.
    """
    torch_private.start_ddp_alone()
    wrap, assign = DDPStrategy._wrapped, torch_private.assign_buckets

    def assigned(parameters: list[Tensor], limits: list[int], *sparse: Any) -> Any:
        if not ARRIVED:
            return assign(parameters, limits, *sparse)
        places = {id(each): at for at, each in enumerate(parameters)}
        order = [places[each] for each in ARRIVED if each in places]
        order += [at for at in places.values() if at not in set(order)]
        buckets, sizes = assign([parameters[at] for at in order], _limits, [sparse[0][at] for at in order])
        return [[order[at] for at in bucket] for bucket in reversed(buckets)], list(reversed(sizes))

    _limits: list[int] = []

    def wrapped(strategy: DDPStrategy, module: nn.Module) -> Any:
        cap = strategy.ddp_arguments.get("bucket_cap_mb")
        first = torch_private.first_bucket_bytes if cap is None else int(cap * 2**20)
        _limits[:] = [first, int((25 if cap is None else cap) * 2**20)]
        model = wrap(strategy, module)
        if strategy.comm[1] is None:  # torch's default hook needs the result of a real exchange
            hook: Any = _mean
            hook.__signature__ = inspect.signature(_mean, eval_str=True)  # DDP checks the hook's annotations
            model.register_comm_hook(strategy.data, hook)
        return model

    cast("Any", DDPStrategy)._wrapped = wrapped
    setattr(*torch_private.where("assign_buckets"), assigned)


ARRIVED: list[int] = []
"""The ids of the parameters, in the order in which the first window computes their gradients. In the first window DDP
exchanges all gradients in one bucket, and afterwards divides them into buckets in this order. To get these buckets, a
plan wraps the model in DDP again.
"""


def _mean(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]  # torch has no types
    buffer, done = bucket.buffer(), torch.futures.Future[Tensor]()
    dist.all_reduce(buffer, group=group.handle)
    done.set_result(buffer)
    return done


def _exchange(group: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of drivetrain's collective ``function`` if every rank passes this rank's value."""
    return ANSWERS[function.__name__](len(group.ranks), *args)


ANSWERS: dict[str, Callable[..., Any]] = {
    "gather_objects": lambda size, value: [value] * size,
    "all_gather": lambda size, tensor, sync_grads: tensor.unsqueeze(0).expand(size, *tensor.shape).contiguous(),
    "gather_keyed": lambda size, names, values: values.detach().unsqueeze(0).expand(size, -1),
    "reduce_keyed": lambda size, names, sums, most: (sums * size, most),
    "reduce": lambda size, tensor, op: tensor,
    "broadcast": lambda size, value, source: value,
    "reduce_boolean_decision": lambda size, decision, every: decision,
    "barrier": lambda size, name: None,
}
"""For each function of strategies/collectives.py, the result if all ``size`` ranks pass the same value."""


def parameters_become_fake(mode: Any) -> None:
    """Patch torch in this process, so that parameters and buffers become fake tensors when a module registers them.

    A layer's constructor allocates memory and registers the parameters before it writes to the memory. With this patch,
    the constructor then initializes fake tensors. A model can therefore be larger than this machine's memory.
    """
    module = cast("Any", nn.Module)
    register_parameter, register_buffer = module.register_parameter, module.register_buffer

    def faked(tensor: Any) -> Any:
        if (
            not isinstance(tensor, Tensor)
            or tensor.is_meta
            or torch_tools.is_fake(tensor)
            or type(tensor) not in (Tensor, nn.Parameter)
        ):
            return tensor
        if not hasattr(tensor, _STAND_IN):  # a tensor that several modules register gets one replacement
            setattr(tensor, _STAND_IN, torch_tools.alike(mode, tensor))
        return getattr(tensor, _STAND_IN)

    def parameter(own: nn.Module, name: str, value: Any) -> None:
        register_parameter(own, name, faked(value))

    def buffer(own: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
        register_buffer(own, name, faked(tensor), persistent)

    module.register_parameter, module.register_buffer = parameter, buffer
    setattr(module, APPLY, _apply)


def drop_values(mode: Any, module: nn.Module) -> None:
    """Replace all real parameters and buffers by fake tensors."""
    dropped: dict[Any, Any] = {}
    for each in module.modules():
        for own in (own_parameters(each), own_buffers(each)):
            for name, tensor in own.items():
                if tensor is not None and not torch_tools.is_fake(tensor):
                    own[name] = dropped.setdefault(tensor, torch_tools.alike(mode, tensor))
    setattr(nn.Module, APPLY, _apply)


def _apply(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """Replaces ``nn.Module._apply``, which cannot swap a fake parameter if there is a weak reference to the
    parameter.
    """
    changed: dict[int, nn.Parameter] = {}
    for each in module.modules() if recurse else [module]:
        for name, parameter in own_parameters(each).items():
            if parameter is None:
                continue
            if id(parameter) not in changed:
                with torch.no_grad():
                    new = fn(parameter)
                same = new is parameter or (new.dtype, new.shape) == (parameter.dtype, parameter.shape)
                changed[id(parameter)] = parameter if same else nn.Parameter(new, parameter.requires_grad)
            own_parameters(each)[name] = changed[id(parameter)]
        for name, buffer in own_buffers(each).items():
            own_buffers(each)[name] = None if buffer is None else fn(buffer)
    return module


_STAND_IN = "_drivetrain_stand_in"


def device_numbers(ranks: Sequence[int]) -> tuple[int, int]:
    """Return the number of ranks in a group, and the difference between the numbers of two consecutive ranks."""
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


def wrap_again(owner: Any, module: nn.Module) -> None:
    """Wrap the module of a DDPStrategy in DDP again."""
    owner.model = owner._wrapped(module)
