"""Fine-tuning: freeze layers before training, and thaw them in a later epoch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import entry, expect, number
from drivetrain.base.torch_private import LAST_RATES, BatchNorm, own_buffers, own_parameters, schedulers_in
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.engine.wrappers import unwrapped
from drivetrain.errors import CheckpointError, MissingAttributeError, check_count, is_number, wrong_value
from drivetrain.strategies.optimizer_states import parameter_names, plain_name

Modules: TypeAlias = nn.Module | Iterable[Any]
"""A module, or an iterable of modules, which may be nested."""


def multiplicative(epoch: int) -> float:
    """Return 2.0 in every epoch, so that the learning rate doubles."""
    return 2.0


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze layers before training and thaw them later.

    Override :meth:`freeze_before_training` and :meth:`finetune_function`. In ``configure_optimizers``, pass only
    parameters that require gradients to the optimizer::

        class Thaw(BaseFinetuning):
            def freeze_before_training(self, pl_module):
                self.freeze(pl_module.backbone)

            def finetune_function(self, pl_module, epoch, optimizer):
                if epoch == 10:
                    self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)

    A checkpoint contains the names of the frozen parameters, and the names of the parameters in each group of an
    optimizer. A resumed run restores the frozen parameters and the groups, even in the middle of an epoch. Schedulers
    change the learning rate of an added group in proportion to the learning rate of the optimizer's first group.
    """

    needs_every_rank = True
    changes_in_validation = False

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[str, Any] = {}
        self._restored: Mapping[str, Any] | None = None
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        self._restarting = False

    # ---- for subclasses ------------------------------------------------------------------------------------------

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Freeze layers. Called before ``configure_optimizers``."""
        raise NotImplementedError(f"{type(self).__name__} must override freeze_before_training.")

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Thaw layers. Called for each optimizer when an epoch begins."""
        raise NotImplementedError(f"{type(self).__name__} must override finetune_function.")

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return each module and submodule that has parameters or buffers of its own, or that has no children. No
        module is returned twice.
        """
        if isinstance(modules, nn.Module):
            found = list(modules.modules())
        else:
            found = [each for module in modules for each in BaseFinetuning.flatten_modules(module)]
        return [
            each
            for each in dict.fromkeys(found)
            if own_parameters(each) or own_buffers(each) or next(each.children(), None) is None
        ]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Generator[nn.Parameter, None, None]:
        """Yield the parameters whose ``requires_grad`` has the given value. With ``train_bn=False``, skip batch norm
        layers.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, BatchNorm):
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad == requires_grad:
                        yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Set ``requires_grad=True`` on all parameters, and let batch norm layers update their statistics."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of ``module``, but not the parameters of its submodules. If ``module`` is a batch norm
        layer, also freeze its statistics.
        """
        _set_trainable(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters. With ``train_bn``, batch norm layers stay trainable."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, train_bn and isinstance(module, BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that ``optimizer`` does not have yet. Warn about parameters that ``optimizer`` has."""
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        given = list(dict.fromkeys(params))
        new = [each for each in given if id(each) not in known]
        if len(new) < len(given):
            rank_zero_warn(
                f"{len(given) - len(new)} of the {len(given)} parameters to be added are already in "
                f"{type(optimizer).__name__}, and keep their learning rate. Let configure_optimizers pass only "
                "parameters whose requires_grad is True."
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Thaw ``modules``, and add their parameters to ``optimizer`` as one group.

        Args:
            modules: the modules to thaw.
            optimizer: the optimizer that will train them.
            lr: the learning rate; ``None`` divides the learning rate of the optimizer's first group by
                ``initial_denom_lr``.
            initial_denom_lr: only used if ``lr`` is ``None``.
            train_bn: also thaw the batch norm layers.
        """
        found = [
            each for each in BaseFinetuning.flatten_modules(modules) if train_bn or not isinstance(each, BatchNorm)
        ]
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        parameters = [each for module in found for each in module.parameters(recurse=False)]
        parameters = [each for each in parameters if not each.requires_grad or id(each) not in known]
        for module in found:
            _set_trainable(module, True)
        new = BaseFinetuning.filter_on_optimizer(optimizer, parameters)
        if new:
            rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
            optimizer.add_param_group({"params": new, "lr": rate})

    # ---- for subclasses that store the groups themselves: private names that libraries use -----------------------

    @staticmethod
    def _apply_mapping_to_param_groups(param_groups: list[dict[str, Any]], mapping: Mapping[Any, Any]) -> list[Any]:
        """Return copies of the groups, with each entry of "params" replaced by ``mapping[entry]``. ``mapping`` maps
        parameters to names, or names to parameters.
        """
        return [{**group, "params": [mapping[each] for each in group["params"]]} for group in param_groups]

    def _store(
        self,
        pl_module: LightningModule,
        opt_idx: int,
        num_param_groups: int,
        current_param_groups: list[dict[str, Any]],
    ) -> None:
        """Record the groups of optimizer ``opt_idx``, with names in place of parameters. If groups of this optimizer
        are recorded already, skip its first ``num_param_groups`` groups.
        """
        names = {parameter: plain_name(name) for name, parameter in pl_module.named_parameters()}
        known = self._internal_optimizer_metadata.get(opt_idx)
        new = current_param_groups if known is None else current_param_groups[num_param_groups:]
        kept = self._apply_mapping_to_param_groups(new, names)
        self._internal_optimizer_metadata.setdefault(opt_idx, []).extend(kept)

    # ---- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._state, self._restored = {}, None
            self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the frozen parameters and the parameter groups of a checkpoint."""
        if self._restarting:  # an override of load_state_dict has set this flag and _internal_optimizer_metadata
            named = _named(pl_module)
            for index, groups in self._internal_optimizer_metadata.items():
                there = len((optimizer := trainer.optimizers[index]).param_groups)
                optimizer.param_groups = self._apply_mapping_to_param_groups(groups, named)
                _extend_schedulers(trainer, optimizer, there)
            self._restarting = False
        if self._restored is not None:
            _restore(pl_module, trainer, self._restored)
            self._restored = None
        self._state = _described(pl_module, trainer.optimizers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """For each optimizer, call :meth:`finetune_function`, which thaws the layers of this epoch."""
        for optimizer in trainer.optimizers:
            groups = len(optimizer.param_groups)
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            _extend_schedulers(trainer, optimizer, groups)
        self._state = _described(pl_module, trainer.optimizers)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "groups" in state_dict:  # a state of Lightning has the groups under "internal_optimizer_metadata" instead
            expect(state_dict, dict.fromkeys(("groups", "frozen", "frozen_statistics"), list))
            self._restored = state_dict
        elif "internal_optimizer_metadata" in state_dict:
            groups = entry(state_dict, "internal_optimizer_metadata", Mapping)
            self._restored = {"groups": [groups[index] for index in sorted(groups)]}


class BackboneFinetuning(BaseFinetuning):
    """Freezes ``pl_module.backbone`` until a given epoch. From then on, the backbone has a separate learning rate,
    which ``lambda_func`` changes in each epoch.

    Args:
        unfreeze_backbone_at_epoch: the epoch, counted from 0, in which the backbone is thawed.
        lambda_func: in each later epoch the backbone's learning rate is multiplied by ``lambda_func(epoch + 1)``.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a fraction of the learning rate of the
            optimizer's first group.
        backbone_initial_lr: the backbone's first learning rate; if it is given, ``backbone_initial_ratio_lr`` has no
            effect.
        should_align: in the epochs after the thaw, limit the backbone's learning rate to the learning rate of the
            optimizer's first group.
        initial_denom_lr: accepted for compatibility and ignored.
        train_bn: train the batch norm layers of the backbone from the beginning.
        verbose: log the learning rates of the backbone and of the first group when an epoch begins.
        rounding: the number of decimals of the logged learning rates.

    Raises:
        ConfigurationError: an argument is invalid; or the module of a fit has no ``backbone``.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        check_count("BackboneFinetuning", "unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, otherwise=10)
        rates = {"backbone_initial_ratio_lr": backbone_initial_ratio_lr}
        if backbone_initial_lr is not None:
            rates["backbone_initial_lr"] = backbone_initial_lr
        for name, value in rates.items():
            if not is_number(value) or value <= 0:
                raise wrong_value("BackboneFinetuning", name, value, "a positive number", f"{name}=0.1")
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.previous_backbone_lr = None
            if not isinstance(getattr(pl_module, "backbone", None), nn.Module):
                raise MissingAttributeError(
                    f"BackboneFinetuning freezes pl_module.backbone, and {type(pl_module).__name__} has no module of "
                    "that name. Name its backbone so, or subclass BaseFinetuning."
                )
        super().setup(trainer, pl_module, stage)

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Thaw the backbone in epoch ``unfreeze_backbone_at_epoch``, and raise its learning rate in later epochs."""
        rate = float(optimizer.param_groups[0]["lr"])
        before = self.previous_backbone_lr
        if epoch == self.unfreeze_backbone_at_epoch:
            given = self.backbone_initial_lr
            own = given if given is not None else rate * self.backbone_initial_ratio_lr
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, own, train_bn=self.train_bn)
        elif epoch > self.unfreeze_backbone_at_epoch and before is not None:
            own = self.lambda_func(epoch + 1) * before
            own = rate if self.should_align and own > rate else own
            optimizer.param_groups[-1]["lr"] = own
        else:
            return
        self.previous_backbone_lr = float(own)
        if self.verbose:
            rank_zero_info(
                f"Epoch {epoch}: the learning rate is {round(rate, self.rounding)}, and the backbone's is "
                f"{round(float(own), self.rounding)}."
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        rate = state_dict.get("previous_backbone_lr")
        self.previous_backbone_lr = None if rate is None else float(number(rate, "['previous_backbone_lr']"))


def _set_trainable(module: nn.Module, trainable: bool) -> None:
    if isinstance(module, BatchNorm):
        module.track_running_stats = trainable
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = trainable


# ---- frozen parameters and groups ------------------------------------------------------------------------------------


def _described(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return the callback's state for a resumed run. The options of the groups are not in this state, because the
    optimizers' own states contain them.
    """
    return {
        "groups": [[{"params": names} for names in parameter_names(module, each)] for each in optimizers],
        "frozen": [plain_name(name) for name, each in module.named_parameters() if not each.requires_grad],
        "frozen_statistics": [
            plain_name(name)
            for name, each in module.named_modules()
            if isinstance(each, BatchNorm) and not each.track_running_stats and each.running_mean is not None
        ],
    }


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name. If torch's pruning has renamed a parameter, both its names are keys, because the
    checkpoint may contain either name.
    """
    named = {plain_name(name): each for name, each in module.named_parameters(remove_duplicate=False)}
    masks = {plain_name(name) for name, _ in module.named_buffers() if name.endswith("_mask")}
    stems = {name: name.removesuffix("_orig") for name in named}
    return named | {stem: named[name] for name, stem in stems.items() if f"{stem}_mask" in masks}


def _restore(module: nn.Module, trainer: Any, state: Mapping[str, Any]) -> None:
    named = _named(module)
    if "frozen" in state:
        frozen = {id(named[name]) for name in state["frozen"] if name in named}
        for parameter in named.values():
            parameter.requires_grad = id(parameter) not in frozen
        for name, each in module.named_modules():
            if isinstance(each, BatchNorm) and each.running_mean is not None:
                each.track_running_stats = plain_name(name) not in state["frozen_statistics"]
    for optimizer, groups in zip(trainer.optimizers, state["groups"], strict=False):
        there = len(optimizer.param_groups)
        for group in groups[there:]:
            names = entry(group, "params", list, "['groups']")
            if missing := [name for name in names if name not in named]:
                raise CheckpointError(
                    f"When the checkpoint was saved, {missing[0]} was fine-tuned, and {type(module).__name__} has no "
                    "such parameter. Build the module as it was trained."
                )
            parameters = [named[name] for name in names]
            if "frozen" not in state:  # a checkpoint of Lightning contains only the groups
                for parameter in parameters:
                    parameter.requires_grad = True
            options = {key: value for key, value in group.items() if key != "params"}
            optimizer.add_param_group({"params": parameters, **options})
        _extend_schedulers(trainer, optimizer, there)


# ---- schedulers ------------------------------------------------------------------------------------------------------


def _extend_schedulers(trainer: Any, optimizer: Optimizer, before: int) -> None:
    """Let the schedulers of ``optimizer`` handle its new groups, which follow the first ``before`` groups.

    torch's schedulers keep lists with one entry per group, and raise an error if the lengths differ.
    """
    groups = optimizer.param_groups
    if len(groups) <= before:
        return
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for group in groups[before:]:
        ratio = float(group["lr"]) / float(groups[0]["lr"]) if groups[0]["lr"] else 1.0
        for key, value in groups[0].items():  # copy the entries that schedulers added to the first group
            if key not in group and key != "name":
                group[key] = value * ratio if key.endswith("lr") and is_number(value) else value
        for scheduler in schedulers:
            _extend(scheduler, optimizer, before, ratio)
        before += 1


def _extend(scheduler: Any, optimizer: Optimizer, before: int, ratio: float) -> None:
    for inner in schedulers_in(scheduler):
        _extend(inner, optimizer, before, ratio)
    if unwrapped(getattr(scheduler, "optimizer", None)) is not optimizer:
        return
    for name in ("base_lrs", "max_lrs", "min_lrs", LAST_RATES, "lr_lambdas"):
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) == before:
            values.append(values[0] if name == "lr_lambdas" else values[0] * ratio)
