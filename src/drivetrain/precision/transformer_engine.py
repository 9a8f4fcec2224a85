"""Compute in 8-bit floats inside the layers of NVIDIA's TransformerEngine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from torch import nn

from drivetrain.base.packages import te, te_recipe
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.errors import ConfigurationError, check_installed, number_of
from drivetrain.precision._layers import exchange, listed, plain_layers
from drivetrain.precision.half import DefaultDtype, TruePrecision

_NAMES = {torch.bfloat16: "transformer-engine", torch.float16: "transformer-engine-float16"}
_MULTIPLE = 16  # both sizes of a weight must be multiples of this number


class TransformerEnginePrecision(TruePrecision):
    """Keeps weights in 16 bits. Layers of TransformerEngine compute matrix products in 8-bit floats.

    Needs NVIDIA's package TransformerEngine and a GPU that multiplies 8-bit floats (Ada, Hopper or later). drivetrain's
    tests use a stand-in for the package. The package itself has never been tested on such a GPU.

    Args:
        weights_dtype: ``torch.bfloat16`` ("transformer-engine") or ``torch.float16`` ("transformer-engine-float16").
        recipe: one of TransformerEngine's recipes, or arguments for TransformerEngine's ``DelayedScaling``; ``None``:
            TransformerEngine's default.
        replace_layers: replace ``Linear`` and ``LayerNorm`` with TransformerEngine's layers. ``None``: replace these
            layers only if the module has no layers of TransformerEngine.
        fallback_compute_dtype: the dtype in which all other layers compute; ``None``: ``weights_dtype``.

    Raises:
        ConfigurationError: the package is not installed, or ``weights_dtype`` is a different dtype.
    """

    _names: ClassVar = {name: {"weights_dtype": dtype} for dtype, name in _NAMES.items()}

    def __init__(
        self,
        *,
        weights_dtype: torch.dtype,
        recipe: Any = None,
        replace_layers: bool | None = None,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:
        if weights_dtype not in _NAMES:
            raise ConfigurationError(
                f"TransformerEnginePrecision(weights_dtype={weights_dtype}): write torch.bfloat16 or torch.float16."
            )
        name = _NAMES[weights_dtype]
        owner = f'TransformerEnginePrecision (precision="{name}"), beside an NVIDIA GPU that multiplies 8-bit floats,'
        check_installed(owner, "transformer_engine", install="'transformer_engine[pytorch]'")
        super().__init__(name, weights_dtype)
        self.fallback_compute_dtype = fallback_compute_dtype or weights_dtype
        self.replace_layers = replace_layers
        self._given_recipe = recipe

    @property
    def recipe(self) -> Any:
        """TransformerEngine's recipe; ``None``: TransformerEngine's default."""
        if not isinstance(self._given_recipe, Mapping):
            return self._given_recipe

        options = dict(self._given_recipe)
        if isinstance(options.get("fp8_format"), str):
            options["fp8_format"] = getattr(te_recipe.Format, options["fp8_format"])
        return te_recipe.DelayedScaling(**options)

    def convert_module(self, module: nn.Module) -> nn.Module:
        packages = {type(each).__module__.partition(".")[0] for each in module.modules()}
        if self.replace_layers or (self.replace_layers is None and "transformer_engine" not in packages):
            module = self._replace(module)
        return super().convert_module(module)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        new = hasattr(te, "autocast")  # since TransformerEngine 2.9
        engines = functools.partial(te.autocast if new else te.fp8_autocast, enabled=True)
        engines.keywords["recipe" if new else "fp8_recipe"] = self.recipe
        dtype = self.fallback_compute_dtype
        others = functools.partial(torch.autocast, self.device_type, dtype=dtype, cache_enabled=False)
        return _Together([functools.partial(DefaultDtype, self.dtype), others, engines])

    def _replace(self, module: nn.Module) -> nn.Module:
        linear = plain_layers(module, nn.Linear)
        made: dict[str, nn.Module] = {}
        for path, layer in linear.items():
            if not any(size % _MULTIPLE for size in layer.weight.shape):
                made[path] = te.Linear(
                    layer.in_features, layer.out_features, bias=layer.bias is not None, params_dtype=self.dtype,
                    device=layer.weight.device,
                )  # fmt: skip
                _copy(layer, made[path])
        left = linear.keys() - made.keys()
        for path, norm in plain_layers(module, nn.LayerNorm).items():
            if len(norm.normalized_shape) == 1 and norm.weight is not None and norm.bias is not None:
                made[path] = te.LayerNorm(norm.normalized_shape[0], eps=norm.eps).to(norm.weight.device, self.dtype)
                _copy(norm, made[path])
        rank_zero_info(
            f"TransformerEnginePrecision replaces {number_of(len(made), 'layer')} with TransformerEngine's"
            f"{f', but not {listed(left)}' if left else ''}."
        )
        return exchange(module, made)


class _Together:
    """A context that enters several contexts. The context can be used more than once.

    Args:
        makes: functions that create the contexts.
    """

    def __init__(self, makes: Sequence[Callable[[], AbstractContextManager[Any]]]) -> None:
        self._makes = makes
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makes:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


def _copy(old: nn.Module, new: nn.Module) -> None:
    """Copy the parameters of ``old`` to ``new``. Also let ``new`` load checkpoints that lack the extra state of
    TransformerEngine's layers.
    """
    with torch.no_grad():
        for name, parameter in old.named_parameters():
            target: Any = getattr(new, name)
            target.copy_(parameter)
            target.requires_grad = parameter.requires_grad
    new.register_load_state_dict_pre_hook(_keep_extra_state)  # type: ignore[no-untyped-call]


def _keep_extra_state(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if type(layer).get_extra_state is not nn.Module.get_extra_state:
        state_dict.setdefault(f"{prefix}_extra_state", layer.get_extra_state())
