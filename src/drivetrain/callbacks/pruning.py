"""Prune weights during training, with the functions of torch.nn.utils.prune."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.restoring import entry
from drivetrain.base.torch_private import own_buffers, own_parameters
from drivetrain.base.tree import is_dtensor
from drivetrain.callback import KeepsWeights, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, NotSupportedError, check_choice, is_count, is_number, wrong_value

Place = tuple[nn.Module, str]
"""A module, and the name of one of its parameters."""

_KEY = "pruning"
_METHODS: dict[str, Any] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}


class ModelPruning(KeepsWeights):
    """Uses ``torch.nn.utils.prune`` to set a part of the weights to zero at the end of each epoch.

    During training, a pruned ``weight`` is computed from the parameter ``weight_orig`` and the buffer ``weight_mask``.
    With ``make_pruning_permanent``, the module has its ordinary parameter ``weight`` again after training. With this
    option, the "state_dict" of each checkpoint fits a module that was never pruned. For a resumed run, the checkpoint's
    entry "pruning" contains the original weights and the masks.

    Args:
        pruning_fn: a function of ``torch.nn.utils.prune`` by name, such as "l1_unstructured", or a class of your own
            that extends ``BasePruningMethod``.
        parameters_to_prune: pairs of a module and the name of one of its parameters; empty or ``None`` means all
            parameters with a name in ``parameter_names``.
        parameter_names: "weight" and "bias", or one of them.
        use_global_unstructured: choose the values to prune from all parameters together, instead of from each parameter
            separately.
        amount: how many values each pruning sets to zero: a fraction of the remaining values, a number of values, or a
            function that gets the epoch and returns one of these.
        apply_pruning: whether to prune, or a function that gets the epoch and returns whether to prune.
        make_pruning_permanent: at the end of training, write the zeros into the weights, and remove the masks.
        use_lottery_ticket_hypothesis: after each pruning, reset the values that are not pruned to their values before
            training. A function gets the epoch and returns whether to reset.
        resample_parameters: with ``use_lottery_ticket_hypothesis``, reset to newly drawn values instead.
        pruning_dim: for structured methods: the dimension along which slices are pruned.
        pruning_norm: for "ln_structured": the order of the norm by which slices are chosen.
        verbose: 1 logs how many values are pruned; 2 also logs this number for each parameter.
        prune_on_train_epoch_end: False prunes at the end of each validation instead.

    Raises:
        ConfigurationError: an argument is invalid, or nothing can be pruned.
        NotSupportedError: the strategy shards the parameters.
    """

    PARAMETER_NAMES = ("weight", "bias")

    needs_every_rank = True
    changes_in_validation = True

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Sequence[Place] | None = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        super().__init__()
        self._names = tuple(parameter_names or self.PARAMETER_NAMES)
        if wrong := [name for name in self._names if name not in self.PARAMETER_NAMES]:
            raise wrong_value("ModelPruning", "parameter_names", wrong, '"weight" and "bias"', '["weight"]')
        self.pruning_fn = _method_of(pruning_fn)
        unstructured = self.pruning_fn.PRUNING_TYPE == "unstructured"
        if use_global_unstructured and not unstructured:
            raise ConfigurationError(
                f"ModelPruning(pruning_fn={pruning_fn!r}) prunes by structure, which cannot be done over all "
                "parameters together. Write use_global_unstructured=False."
            )
        if not unstructured and pruning_dim is None:
            raise ConfigurationError(f"ModelPruning(pruning_fn={pruning_fn!r}) needs pruning_dim, such as 0.")
        if pruning_fn == "ln_structured" and pruning_norm is None:
            raise ConfigurationError('ModelPruning(pruning_fn="ln_structured") needs pruning_norm, such as 2.')
        is_amount = is_count(amount) or (is_number(amount) and 0 <= float(amount) <= 1)  # type: ignore[arg-type]
        if not callable(amount) and not is_amount:
            raise wrong_value("ModelPruning", "amount", amount, "a fraction, a number or a function", "amount=0.5")
        check_choice("ModelPruning", "verbose", verbose, (0, 1, 2))
        self._given, self._global, self.amount, self._applies = (
            list(parameters_to_prune or ()), use_global_unstructured, amount, apply_pruning,
        )  # fmt: skip
        self._permanent, self._lottery, self._resamples = (
            make_pruning_permanent, use_lottery_ticket_hypothesis, resample_parameters,
        )  # fmt: skip
        options = {"dim": pruning_dim, "n": pruning_norm if pruning_fn == "ln_structured" else None}
        self._options = {name: value for name, value in options.items() if value is not None and not unstructured}
        self._verbose = verbose
        self.idle_hooks = frozenset({"on_validation_epoch_end" if prune_on_train_epoch_end else "on_train_epoch_end"})
        self._places: list[Place] = []
        self._initial: list[torch.Tensor] = []
        # from a checkpoint, until on_fit_start: the pruned weights that the last forward pass before the save used
        self._used: dict[str, torch.Tensor | None] = {}

    def filter_parameters_to_prune(self, parameters_to_prune: Sequence[Place] = ()) -> Sequence[Place]:
        """Return the pairs of module and name to prune. Override this method to choose other parameters."""
        return parameters_to_prune

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._used = {}
        given = self._given or [
            (module, name) for module in pl_module.modules() for name in self._names if _has_parameter(module, name)
        ]
        known = set(pl_module.modules())
        places = list(self.filter_parameters_to_prune(given))
        if not places:
            raise ConfigurationError(f"{type(pl_module).__name__} has no parameter to prune. Pass parameters_to_prune.")
        for place in places:
            if not (isinstance(place, Sequence) and len(place) == 2 and place[0] in known and _has_parameter(*place)):
                expected = f"pairs of a module and a name, and {type(pl_module).__name__} has no such parameter"
                raise wrong_value("ModelPruning", "parameters_to_prune", place, expected, '[(model.layer, "weight")]')
        self._initial = [own_parameters(module)[name].detach().clone() for module, name in places]
        total = sum(each.numel() for each in self._initial)
        if is_count(self.amount) and int(self.amount) > total:  # type: ignore[arg-type]
            raise ConfigurationError(
                f"ModelPruning(amount={self.amount}) is a number of values, and the parameters to prune have {total}. "
                "Write a smaller number, or a fraction such as amount=0.5."
            )
        self._places = places

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(is_dtensor(each) for each in pl_module.parameters()):
            raise NotSupportedError(
                'ModelPruning needs complete parameters, and this strategy shards them. Use strategy="ddp".'
            )
        # torch's pruning functions read the pruned weight, an attribute that no state dict contains
        for name, used in self._used.items():
            module, parameter = _place_of(pl_module, name)
            orig, mask = getattr(module, f"{parameter}_orig").detach(), getattr(module, f"{parameter}_mask")
            setattr(module, parameter, orig * mask if used is None else used.to(orig.device))
        self._used = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._prune(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.progress.fn == "fit" and not trainer.sanity_checking:
            self._prune(trainer)

    def _prune(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not (self._applies(epoch) if callable(self._applies) else self._applies) or not amount:
            return
        self.apply_pruning(amount)
        # masks may be random, so all ranks use the mask of rank 0
        if trainer.world_size > 1:
            for module, name in self._places:
                mask = getattr(module, f"{name}_mask")
                mask.copy_(trainer.strategy.broadcast(mask))
        if self._lottery(epoch) if callable(self._lottery) else self._lottery:
            self.apply_lottery_ticket_hypothesis()
        with torch.no_grad():
            for module, name in self._places:  # torch would update it only in the next forward pass
                getattr(module, name).copy_(getattr(module, f"{name}_orig") * getattr(module, f"{name}_mask"))

    def apply_pruning(self, amount: int | float) -> None:
        """Prune ``amount`` of the remaining values. If ``verbose`` is not 0, log how many values are pruned."""
        before = [_counts(place) for place in self._places] if self._verbose else []
        if self._global:
            prune.global_unstructured(self._places, pruning_method=self.pruning_fn, amount=amount)
        for module, name in () if self._global else self._places:
            self.pruning_fn.apply(module, name, amount=amount, **self._options)
        if self._verbose:
            self._report(before, amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the parameters to their values before training. With ``resample_parameters``, draw new values."""
        fresh: dict[nn.Module, nn.Module] = {}
        for (module, name), initial in zip(self._places, self._initial, strict=True):
            if self._resamples and hasattr(module, "reset_parameters"):
                if module not in fresh:
                    fresh[module] = other = copy.deepcopy(module)
                    _make_plain(other)
                    other.reset_parameters()  # type: ignore[operator]
                initial = getattr(fresh[module], name)
            with torch.no_grad():
                getattr(module, f"{name}_orig").copy_(initial)

    def _report(self, before: list[tuple[int, int]], amount: int | float) -> None:
        after = [_counts(place) for place in self._places]
        rows = [
            (f"{module!r}.{name}", was, now, size)
            for (module, name), (was, _), (now, size) in zip(self._places, before, after, strict=True)
        ]
        total = ("all parameters", *(sum(each) for each in list(zip(*rows, strict=True))[1:]))
        for what, was, now, size in [total, *(rows if self._verbose == 2 else ())]:
            parts = " -> ".join(f"{zeros}/{size} ({zeros / max(size, 1):.2%})" for zeros in (was, now))
            rank_zero_info(f"ModelPruning with {self.pruning_fn.__name__}, amount={amount}, of {what}. Pruned: {parts}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With ``make_pruning_permanent``, write the zeros into the weights, and remove the masks."""
        if self._permanent:
            self.make_pruning_permanent(pl_module)

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Write zeros into the pruned weights of ``module``, and remove the masks."""
        for each in module.modules():
            _make_plain(each)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_weights(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the original weights and the masks into the checkpoint's entry "pruning". With
        ``make_pruning_permanent``, put the pruned weights into the checkpoint's "state_dict".
        """
        weights = checkpoint["state_dict"]
        pruned = [name.removesuffix("_mask") for name in weights if name.endswith("_mask")]
        pruned = [name for name in pruned if f"{name}_orig" in weights]
        if not pruned and not self._lottery:
            return
        parts = {name: {part: weights[f"{name}_{part}"] for part in ("orig", "mask")} for name in pruned}
        # "used" is the pruned weight of the last forward pass; an optimizer step may have followed
        for name, each in parts.items():
            each["used"] = getattr(*_place_of(pl_module, name)).detach()
        checkpoint[_KEY] = {"parts": parts, "initial": list(self._initial)}
        if self._permanent:
            plain: dict[str, Any] = {}
            for name, value in weights.items():
                stem = name.rpartition("_")[0]
                if stem not in parts:
                    plain[name] = value
                elif name.endswith("_orig"):
                    plain[stem] = value.detach() * parts[stem]["mask"]
            checkpoint["state_dict"] = plain

    def load_weights(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any], fitting: bool
    ) -> None:
        """In a fit, restore the original weights and the masks. In an evaluation, load the pruned weights without
        masks.
        """
        if _KEY not in checkpoint:
            return
        saved = entry(checkpoint, _KEY, Mapping)
        parts, weights = entry(saved, "parts", Mapping), dict(checkpoint["state_dict"])
        for name, each in parts.items():
            if not fitting:
                for part in ("orig", "mask"):
                    weights.pop(f"{name}_{part}", None)
                weights[name] = each["orig"] * each["mask"]
                continue
            module, parameter = _place_of(pl_module, name)
            prune.custom_from_mask(module, parameter, each["mask"].to(getattr(module, parameter).device))  # type: ignore[no-untyped-call]
            weights.pop(name, None)
            weights |= {f"{name}_orig": each["orig"], f"{name}_mask": each["mask"]}
            self._used[name] = each.get("used")
        checkpoint["state_dict"] = weights
        if fitting and (initial := entry(saved, "initial", list)):
            self._initial = list(initial)


def _method_of(pruning_fn: Any) -> Any:
    if isinstance(pruning_fn, str) and pruning_fn in _METHODS:
        return _METHODS[pruning_fn]
    if isinstance(pruning_fn, type) and issubclass(pruning_fn, prune.BasePruningMethod):
        return pruning_fn
    raise ConfigurationError(
        f"ModelPruning(pruning_fn={pruning_fn!r}): write one of {', '.join(map(repr, _METHODS))}, or pass a class that "
        "extends torch.nn.utils.prune.BasePruningMethod."
    )


def _place_of(module: nn.Module, name: str) -> Place:
    """Split a key of the state dict of ``module``: return the submodule, and the name of its parameter."""
    path, _, parameter = name.rpartition(".")
    return module.get_submodule(path), parameter


def _has_parameter(module: nn.Module, name: str) -> bool:
    """Return whether ``name`` is a parameter of ``module`` itself. The pruned tensor that torch computes is not a
    parameter.
    """
    return isinstance(own_parameters(module).get(name), nn.Parameter)


def _counts(place: Place) -> tuple[int, int]:
    """Return the number of a parameter's pruned values, and the number of all its values."""
    module, name = place
    mask = getattr(module, f"{name}_mask", None)
    return (0, getattr(module, name).numel()) if mask is None else (int((mask == 0).sum()), mask.numel())


def _make_plain(module: nn.Module) -> None:
    for name in [key.removesuffix("_orig") for key in own_parameters(module) if key.endswith("_orig")]:
        if f"{name}_mask" in own_buffers(module):
            prune.remove(module, name)  # type: ignore[no-untyped-call]
