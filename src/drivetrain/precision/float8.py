"""Linear layers that torchao computes in 8-bit floats. All other layers compute as in bf16-mixed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drivetrain.base.packages import torchao_float8, torchao_float8_linear
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.errors import ConfigurationError, check_installed, check_known, number_of
from drivetrain.precision._layers import keep_hooks, listed, plain_layers
from drivetrain.precision.precision import Autocast

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_MULTIPLE = 16  # 8-bit matrix products need weights whose sizes are multiples of this number


class Float8Precision(Autocast):
    """Computes the matrix products of linear layers in 8-bit floats ("float8"). Needs the package ``torchao``.

    torchao's ``convert_to_float8_training`` replaces the layers before the model is sharded or wrapped. The parameters
    stay float32 and keep their names. Checkpoints are therefore the same as with other precisions.

    Args:
        recipe: the scaling of numbers. "tensorwise" is the fastest, "rowwise" is more accurate, and
            "rowwise_with_gw_hp" is the most accurate. Can also be a ``Float8LinearConfig`` of torchao.
        module_filter_fn: a function of ``(layer, path)`` that returns whether to convert this linear layer; ``None``:
            convert all linear layers. Layers with a size that is not a multiple of 16, subclasses of ``Linear`` and
            layers that share their weight are never converted.
        emulate: round numbers to 8-bit floats, but multiply in wider types; ``None``: only if the device cannot
            multiply 8-bit floats.
        fsdp_all_gather: with FSDP, gather the weights of these layers in 8 bits; possible only with "tensorwise".
        autocast: the dtype of all other operations under ``torch.autocast``; ``None``: the dtype of the parameters.

    Raises:
        ConfigurationError: torchao is not installed, or the recipe is unknown.
    """

    _names = ("float8",)

    def __init__(
        self,
        recipe: Any = "tensorwise",
        module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
        emulate: bool | None = None,
        fsdp_all_gather: bool = False,
        autocast: torch.dtype | None = torch.bfloat16,
    ) -> None:
        check_installed('Float8Precision (precision="float8")', "torchao")
        if isinstance(recipe, str):
            check_known("Float8Precision", recipe, "recipe", _RECIPES)
        if fsdp_all_gather and recipe in _RECIPES[1:]:
            raise ConfigurationError(
                f"Float8Precision({recipe!r}, fsdp_all_gather=True): FSDP gathers weights in 8 bits only with "
                'one scale for each tensor. Write recipe="tensorwise", or leave fsdp_all_gather out.'
            )
        self.name = "float8"
        self.computes_in = autocast
        self._recipe, self._filter, self._emulate = recipe, module_filter_fn, emulate
        self._fsdp_all_gather = fsdp_all_gather

    def convert_module(self, module: nn.Module) -> nn.Module:
        found = plain_layers(module, nn.Linear)
        fits = {path for path, each in found.items() if not any(size % _MULTIPLE for size in each.weight.shape)}
        chosen = {path for path in fits if self._filter is None or self._filter(found[path], path)}
        if not chosen:
            # if there are layers of this class, an earlier run has converted the module
            if not any(isinstance(each, torchao_float8_linear.Float8Linear) for each in module.modules()):
                rank_zero_warn(
                    f"Float8Precision converts no layer of {type(module).__name__}, so nothing computes in 8 bits: "
                    f'{_why_none(found, fits)}. Write precision="bf16-mixed", or change the model.'
                )
            return module
        config = self._config()
        module = torchao_float8.convert_to_float8_training(
            module, module_filter_fn=lambda _, path: path in chosen, config=config
        )
        for path in chosen:
            keep_hooks(found[path], module.get_submodule(path))
        left = found.keys() - chosen
        rank_zero_info(
            f"Float8Precision computes {number_of(len(chosen), 'linear layer')} in 8 bits"
            f"{', which is emulated here' * config.emulate}{f', and not {listed(left)}' if left else ''}."
        )
        return module

    def _config(self) -> Any:
        own = isinstance(self._recipe, str)
        config: Any = torchao_float8.Float8LinearConfig.from_recipe_name(self._recipe) if own else self._recipe
        changes: dict[str, Any] = {"enable_fsdp_float8_all_gather": True} if self._fsdp_all_gather else {}
        if self._emulate is not None:
            changes["emulate"] = self._emulate
        elif not config.emulate and not _multiplies(self.device_type, config):
            changes["emulate"] = True
        return dataclasses.replace(config, **changes)


@functools.cache
def _multiplies(device_type: str, config: Any) -> bool:
    """Run a small layer, and return whether this device type supports ``config``."""
    plain = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
    kind: dict[str, Any] = {"device": device_type, "dtype": torch.bfloat16}
    with torch.enable_grad():
        # skip_init draws no random numbers
        layer = nn.utils.skip_init(nn.Linear, _MULTIPLE, _MULTIPLE, **kind)  # type: ignore[no-untyped-call]
        for parameter in layer.parameters():
            nn.init.ones_(parameter)
        layer = torchao_float8.convert_to_float8_training(layer, config=plain)
        rows = torch.ones(_MULTIPLE, _MULTIPLE, **kind, requires_grad=True)
        try:
            layer(rows).sum().backward()
        except (RuntimeError, NotImplementedError, ValueError, AssertionError):
            return False
    return True


def _why_none(found: dict[str, nn.Linear], fits: set[str]) -> str:
    if not found:
        return "it has no torch.nn.Linear layer with a weight of its own"
    if not fits:
        return f"no size of {listed(found)} is a multiple of {_MULTIPLE} on both sides"
    return "module_filter_fn selects none"
