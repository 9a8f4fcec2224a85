"""The complete model on every device; gradients are averaged during the backward pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST, Accelerator
from drivetrain.base.compiled import compiled_method
from drivetrain.base.registry import Entry, first_line
from drivetrain.base.torch_private import exchange_after_first_pass, make_static, rebuild_buckets
from drivetrain.checkpoints.io import CheckpointIO
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, unknown_argument
from drivetrain.launchers.launcher import LauncherRegistry
from drivetrain.precision.precision import Precision
from drivetrain.strategies.alone import Alone, alone, whole_here
from drivetrain.strategies.batchnorm import TorchSyncBatchNorm
from drivetrain.strategies.layer_sync import LayerSync
from drivetrain.strategies.model_averaging import ModelAveraging, model_averaging
from drivetrain.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy, until_thawed
from drivetrain.strategies.peers import some
from drivetrain.strategies.placement import optimizer_to
from drivetrain.strategies.strategy import Strategy, StrategyRegistry

if TYPE_CHECKING:
    from typing_extensions import Unpack

# the beginning of torch's error about an unfinished reduction
_UNFINISHED = "Expected to have finished reduction in the prior iteration"

_BATCHED = "batched_grad_copy"
_MANY, _SMALL = 12, 300_000  # _BATCHED is faster for models with >= _MANY parameters and <= _SMALL elements


class DDPArguments(TypedDict, total=False):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``, for type checkers and for the command line."""

    dim: int
    broadcast_buffers: bool
    init_sync: bool
    process_group: Any
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[float] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


class DDPStrategy(ParallelStrategy):
    """``torch.nn.parallel.DistributedDataParallel`` around the model while it is trained.

    Evaluation and prediction call the model without this wrapper, so the ranks then communicate only in the user's
    code.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as for :class:`ParallelStrategy`.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: the exchange of gradients; see torch's communication hooks.
        model_averaging_period: the number of optimizer steps after which parameters are averaged over all ranks.
            Requires ``ddp_comm_hook=post_localSGD_hook`` and a ``PostLocalSGDState``. In the first
            ``start_localSGD_iter`` steps, gradients are averaged over all ranks. In later steps, gradients are averaged
            only over the ``subgroup`` of the state (``None``: the ranks of each machine). Between two averages, the
            ranks' parameters differ. Each rank evaluates with its own parameters. A checkpoint contains only rank 0's
            parameters and optimizer state, and all ranks resume from rank 0's state.
        start_method: the launcher that starts the processes if no cluster has started them: "popen" runs the program
            again; "spawn", "fork" and "forkserver" pass this process's objects to new processes; "ray" passes these
            objects to actors of a Ray cluster.
        ddp_arguments: further arguments of DistributedDataParallel's constructor, such as ``find_unused_parameters``,
            ``static_graph`` or ``gradient_as_bucket_view``.

    Raises:
        ConfigurationError: ``start_method`` is unknown, or the arguments for model averaging do not fit together.
    """

    synchronises_batchnorm = True
    facts = ParallelStrategy.facts.but(local_passes="drivetrain.strategies.local_passes:of_ddp")

    wrapper: type[DistributedDataParallel] = DistributedDataParallel
    """The class that wraps the module. A subclass of this strategy can set a different class."""

    _averaging: ModelAveraging | None = None

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
        start_method: str = "popen",
        **ddp_arguments: Unpack[DDPArguments],
    ) -> None:
        if unknown := {key: value for key, value in ddp_arguments.items() if key not in _arguments_of_ddp()}:
            owner = f"DDPStrategy, with the DistributedDataParallel of torch {torch.__version__},"
            raise unknown_argument(
                owner, unknown, inspect.signature(DDPStrategy).parameters.keys() | _arguments_of_ddp()
            )
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.process_group_backend, self.timeout = process_group_backend, timeout
        LauncherRegistry.of(start_method, "DDPStrategy")
        self._averaging = model_averaging(model_averaging_period, ddp_comm_state, ddp_comm_hook)
        self.ddp_arguments = ddp_arguments
        self.comm = (ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        self.facts = self.facts.but(start_method=start_method, refuses={**self.facts.refuses, **self._refused()})
        self._wraps = True
        self._sync: LayerSync | None = None  # the layer synchronisation of the running fit
        self._averaged: set[int] = set()  # the id() of each parameter that DDP averages
        self._frozen: list[nn.Parameter] = []  # parameters that DDP does not average

    def _refused(self) -> dict[str, str]:
        name = type(self).__name__
        if self.comm[1] is not None:
            refused = {"split_on_oom": f"exchanges gradients itself, and {name} has a ddp_comm_hook."}
            if self.comm[0] is not None:
                refused["replay_every"] = (
                    f"computes gradients again, and {name} has a ddp_comm_state that this changes."
                )
            if self._averaging is not None:
                refused["replica_check_every"] = "lets their parameters differ between two averages."
            return refused
        if self.ddp_arguments.get("static_graph"):
            return {"split_on_oom": f"exchanges gradients itself, which static_graph=True of {name} rules out."}
        return {}

    def agreed_options(self) -> dict[str, Any]:
        state, hook, wrapper = self.comm
        names = {"ddp_comm_state": type(state), "ddp_comm_hook": hook, "ddp_comm_wrapper": wrapper}
        averages = {"model_averaging_period": None if self._averaging is None else self._averaging.period}
        return {**super().agreed_options(), **names, **averages, **self.ddp_arguments}

    def setup(self, trainer: Any) -> None:
        self._wraps = trainer is None or trainer.progress.fn == "fit"
        asked = trainer is not None and (trainer.settings.sync_batchnorm or self.layer_sync is not None)
        self._sync = (self.layer_sync or TorchSyncBatchNorm()) if asked and self._wraps else None
        super().setup(trainer)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        # nothing to average: each rank has a different part of the model
        if self.world.size > self.data.size == 1:
            return module
        if not (self._wraps and any(parameter.requires_grad for parameter in module.parameters())):
            self.share_from_rank_zero([*module.parameters(), *module.buffers()])
            return module
        if self._sync is not None:
            self._sync.group = self.data.handle
            module = self._sync.apply(module)
        return self._wrapped(module)

    def _wrapped(self, module: nn.Module) -> DistributedDataParallel:
        self._averaged = _trained(module)
        self._frozen = [each for each in module.parameters() if not each.requires_grad]
        group = {} if self.data is self._plain_world else {"process_group": self.data.handle}
        arguments = {**group, **self._batched_copies(module), **self.ddp_arguments, "static_graph": False}
        wrapped = self.wrapper(module, **arguments)
        if self.ddp_arguments.get("static_graph"):
            _static_from_first_exchange(wrapped)
        if self._averaging is not None:
            self._averaging.make_subgroup(self.num_processes)
            self._averaging.trained |= self._averaged
        state, hook, wrapper = self.comm
        if hook is not None:
            wrapped.register_comm_hook(state, hook if wrapper is None else wrapper(hook))
        return wrapped

    def _batched_copies(self, module: nn.Module) -> dict[str, Any]:
        """Return ``{"batched_grad_copy": True}`` if this argument makes DDP faster and changes no result, else ``{}``.

        With this argument, DDP copies and divides all gradients of a bucket at once. DDP then divides by the number of
        ranks instead of multiplying by the inverse. The results are equal, bit for bit, if the number of ranks is a
        power of two. The speed was measured only on the host and with default arguments of DDP.
        """
        size = self.data.size
        fits = self.root_device == HOST and self.wrapper is DistributedDataParallel and size & (size - 1) == 0
        is_plain = self.comm[1] is None and self.ddp_arguments.keys() <= {"find_unused_parameters"}
        if not (fits and is_plain and len(self._averaged) >= _MANY and _BATCHED in _arguments_of_ddp()):
            return {}
        numbers = sum(each.numel() for each in module.parameters() if each.requires_grad)
        return {_BATCHED: True} if numbers <= _SMALL else {}

    def on_validation_start(self) -> None:
        if isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers:
            super().on_validation_start()

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the part of the state that only this rank has. Return ``{}`` if DDP broadcasts rank 0's buffers in
        each forward pass.
        """
        given = (self.ddp_arguments.get(name) for name in ("forward_sync_buffers", "broadcast_buffers"))
        return {} if next((each for each in given if each is not None), True) else super().rank_state(module)

    def bind(self, name: str) -> Callable[..., Any]:
        if name != "training_step":
            return compiled_method(self.lightning_module, name)
        self._wrap_again()
        step, model = super().bind(name), self.model
        if not isinstance(model, DistributedDataParallel):
            return step
        step = step if self.lightning_module.automatic_optimization else _by_hand(step, model)
        return until_thawed(step, self._frozen, lambda: self.bind(name))

    def _wrap_again(self) -> None:
        """Wrap the module again if parameters have been thawed or frozen since the last wrapping.

        Between two batches of one optimizer step, the module is wrapped again only if a parameter was thawed. The new
        wrapper also includes parameters that were just frozen, because their gradients from earlier batches must be
        averaged.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel) or (trained := _trained(model)) == self._averaged:
            return
        in_window = not model.require_forward_param_sync and self.lightning_module.automatic_optimization
        if in_window and not trained - self._averaged:
            return
        frozen = [each for each in model.parameters() if in_window and id(each) in self._averaged - trained]
        for parameter in frozen:  # so that the new wrapper also averages the gradients of frozen parameters
            parameter.requires_grad_(True)
        self.model = self._wrapped(self.lightning_module)
        if in_window:
            self._continue_window()
        for parameter in frozen:
            parameter.requires_grad_(False)
        if self.driver.rebind is not None:
            self.driver.rebind()  # let the loop use the new wrapper

    def _continue_window(self) -> None:
        """Let a new wrapper average all gradients of the current optimizer step, even those of parameters that only
        earlier batches have used.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            return
        model.require_forward_param_sync = False  # the next pass broadcasts no buffers, as after no_sync()
        if model.find_unused_parameters:
            held = [each for each in model.parameters() if each.requires_grad and each.grad is not None]
            with model.no_sync():
                torch.autograd.backward(held, [torch.zeros_like(each) for each in held])

    def load_open_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        super().load_open_gradients(gradients)
        self._continue_window()

    def on_train_end(self) -> None:
        """Check that the last backward pass reached all parameters. DDP itself checks this only in the next forward
        pass.
        """
        if isinstance(model := self.model, DistributedDataParallel):
            rebuild_buckets(model)

    def explain(self, error: BaseException) -> Exception | None:
        """Return an explanation if the last backward pass has not reached all parameters. The explanation names these
        parameters, for example those that were frozen in the middle of an epoch.
        """
        model = self.model
        misses = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
        if misses and isinstance(error, RuntimeError) and _UNFINISHED in str(error):
            return ConfigurationError(self._without_gradient())
        return None

    def _without_gradient(self) -> str:
        named = dict(self.lightning_module.named_parameters())
        without = [name for name, parameter in named.items() if parameter.requires_grad and parameter.grad is None]
        frozen = [name for name, each in named.items() if id(each) in self._averaged and not each.requires_grad]
        own = [name for name, start in _starts(installed=True).items() if start == self.facts.start_method]
        cure = f'strategy="{own[0] if own else "ddp"}_find_unused_parameters_true"'
        if frozen and not without:
            return (
                f"{some(frozen)}: frozen in the middle of an epoch, and DDP waits for the gradients of all parameters "
                f"that were trained when it began. Freeze them in on_train_epoch_start, or write {cure}."
            )
        return (
            f"The loss of the last batch did not depend on {some(without) if without else 'every parameter'}, and DDP "
            "waits for the gradients of all. Use them in every batch, freeze them with requires_grad_(False), or write "
            f"{cure}. [DT1042]"
        )

    @contextmanager
    def manual_backward_context(self, loss: torch.Tensor) -> Iterator[None]:
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        model.require_backward_grad_sync = True
        if self.ddp_arguments.get("static_graph") and not model.static_graph:
            make_static(model)
        found = [loss] if model.find_unused_parameters and not model.static_graph else []
        model.reducer.prepare_for_backward(found)
        yield
        # if True, the next forward pass would prepare the reducer for a backward pass
        model.require_backward_grad_sync = False
        exchange_after_first_pass(model)

    # ---- optimizers ----------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the run. The setter also registers hooks: on sharded optimizers, and for model
        averaging.
        """
        # stored in the instance's dictionary, because pickle copies the dictionary to another process
        return self.__dict__["optimizers"]

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self.__dict__["optimizers"] = optimizers
        for optimizer in filter(_is_sharded, optimizers):
            # A ZeroRedundancyOptimizer also keeps the loaded state in its own ``state``. torch never updates this
            # second copy. For the parameters of other ranks, the second copy has None.
            optimizer.register_load_state_dict_post_hook(lambda each: each.state.clear())
        if self._averaging is not None and not self._outlived:
            self._averaging.attach(optimizers)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint; every rank must call this method.

        For a ``ZeroRedundancyOptimizer``, rank 0 returns the complete state of the inner optimizer, in host memory. All
        other ranks return ``{}``.
        """
        if not _is_sharded(optimizer):
            return super().optimizer_state(optimizer)
        self._consolidate(optimizer, 0)
        return super().optimizer_state(optimizer) if self.global_rank == 0 else {}

    def _consolidate(self, sharded: Any, rank: int) -> None:
        sharded.consolidate_state_dict(to=rank)
        if self.accelerator is not None:
            self.accelerator.synchronize(self.root_device)  # the optimizer's copies to the host are asynchronous

    def whole_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that a process outside the job can use. On the first rank of each machine, the returned
        optimizer has the complete state. Every rank must call this method.
        """
        if not _is_sharded(optimizer):
            return optimizer
        sharded: Any = optimizer
        whole: Optimizer = type(sharded.optim)([dict(group) for group in sharded.param_groups], **sharded.defaults)
        for rank, local_rank in enumerate(self.world.gather_objects(self.local_rank)):
            if local_rank == 0:
                self._consolidate(sharded, rank)
                if rank == self.global_rank:
                    whole.load_state_dict(sharded.state_dict())
        return whole

    def alone(self) -> AbstractContextManager[Alone]:
        return alone(self, whole_here(self, DDPStrategy))

    def teardown(self) -> None:
        self.model, self._frozen = self.lightning_module, []  # drop the wrapper, which exists only during the run
        if self._sync is not None and self.model is not None:
            self.model = self._sync.revert(self.model)
        if self._averaging is not None:
            self._averaging.detach()
        if self.root_device != HOST:
            for sharded in filter(_is_sharded, self.optimizers):
                optimizer_to(sharded.optim, HOST)  # type: ignore[attr-defined]
        super().teardown()

    def repeat_batch(self, repeats: bool) -> None:
        if self._sync is not None:
            self._sync.count_batches(self.lightning_module, not repeats)

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if any(each.requires_grad for each in self._frozen):
            self._wrap_again()
        own = self.model
        if isinstance(own, DistributedDataParallel) and next(own.parameters()) is next(model.parameters()):
            model = own  # this wrapper has replaced ``model``
        return model.no_sync()


def _starts(installed: bool) -> dict[str, str]:
    """Return the start method for each registered name of this strategy, such as "ddp_spawn". Each launcher, and each
    alias of a launcher, adds a name.
    """
    endings = LauncherRegistry.endings(installed).items()
    return {f"ddp_{ending}" if ending else "ddp": start for ending, start in endings}


def _entries(installed: bool) -> dict[str, Entry[Strategy]]:
    forms: dict[str, dict[str, Any]] = {"": {}} | {
        f"_find_unused_parameters_{str(unused).lower()}": {"find_unused_parameters": unused} for unused in (True, False)
    }
    line = first_line(DDPStrategy)
    return {
        name + form: Entry(name + form, DDPStrategy, line, {"start_method": start, **arguments})
        for name, start in _starts(installed).items()
        for form, arguments in forms.items()
    }


StrategyRegistry.derive(_entries)


def _static_from_first_exchange(model: DistributedDataParallel) -> None:
    """Make the graph of ``model`` static before the first pass that exchanges gradients.

    torch must record the graph in this pass. If the graph were already static, torch would record an earlier pass that
    only accumulates gradients. torch would then silently skip exchanges (pytorch#187732).
    """

    def look(*_: Any) -> None:
        if model.require_backward_grad_sync and torch.is_grad_enabled():
            hook.remove()
            make_static(model)

    hook = model.register_forward_pre_hook(look)


def _by_hand(step: Callable[..., Any], model: DistributedDataParallel) -> Callable[..., Any]:
    """Return ``step`` for manual optimization. Its forward passes do not prepare an exchange, because
    ``manual_backward_context`` does so before each backward pass.
    """

    def step_by_hand(*args: Any, **kwargs: Any) -> Any:
        model.require_forward_param_sync = True
        with model.no_sync():
            return step(*args, **kwargs)

    return step_by_hand


@functools.cache
def _arguments_of_ddp() -> frozenset[str]:
    """Return the names of the options that DistributedDataParallel has in the installed torch."""
    return frozenset(inspect.signature(DistributedDataParallel).parameters) - {"module"}


def _trained(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def _is_sharded(optimizer: Optimizer) -> bool:
    """Whether each rank has only a part of the optimizer's state (``ZeroRedundancyOptimizer``)."""
    return hasattr(optimizer, "consolidate_state_dict")
