"""Linear layers with weights that bitsandbytes packs into 4 or 8 bits. All other operations run under autocast."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.base import torch_private
from drivetrain.base.packages import bnb
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.errors import ConfigurationError, check_installed, check_known, number_of
from drivetrain.precision._layers import exchange, listed, plain_layers
from drivetrain.precision.precision import Autocast

_MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")


class BitsandbytesPrecision(Autocast):
    """Packs the weights of linear layers into 4 or 8 bits. Needs the package ``bitsandbytes``.

    This saves memory when a large model is evaluated, or when only its adapters are trained. The packed weights are
    frozen. All other parameters are trained, and keep their dtype. The mode "int8-training" instead trains the weights,
    and packs the weights again for each matrix product. A checkpoint contains packed weights in the format of
    bitsandbytes. Both packed and plain weights can be loaded. Plain weights are packed during loading.

    Args:
        mode: "nf4" and "fp4" pack weights into 4 bits; "nf4-dq" and "fp4-dq" also pack the scales of the weights;
            "int8" packs weights into 8 bits; "int8-training": see above.
        dtype: the dtype of matrix products and of all other operations, under ``torch.autocast``. ``None``: float16 for
            the 8-bit modes, otherwise bfloat16.
        ignore_modules: paths of layers that are not replaced, such as ``{"head"}``. Subclasses of ``Linear`` and layers
            that share their weight are never replaced.

    Raises:
        ConfigurationError: bitsandbytes is not installed, or the mode is unknown.
    """

    packs_weights = True

    def __init__(
        self, mode: str = "nf4", dtype: torch.dtype | None = None, ignore_modules: Collection[str] | None = None
    ) -> None:
        check_installed(f'BitsandbytesPrecision("{mode}")', "bitsandbytes")
        check_known("BitsandbytesPrecision", mode, "mode", _MODES)
        if isinstance(ignore_modules, str):
            raise ConfigurationError(
                f"BitsandbytesPrecision(ignore_modules={ignore_modules!r}) is a text. Write {{{ignore_modules!r}}}."
            )
        self.mode, self.name = mode, f"bitsandbytes-{mode}"
        self.packs_weights = mode != "int8-training"
        self.computes_in = dtype or (torch.float16 if mode.startswith("int8") else torch.bfloat16)
        self.ignore_modules = frozenset(ignore_modules or ())

    def convert_module(self, module: nn.Module) -> nn.Module:
        four, eight = _layer_classes()
        there = [each for each in module.modules() if isinstance(each, (four.__base__, eight.__base__))]
        if there:
            # if the layers have drivetrain's own classes, an earlier run has already packed the weights
            if not any(isinstance(each, (four, eight)) for each in there):
                rank_zero_info(
                    f"{type(module).__name__} has {number_of(len(there), 'layer')} of bitsandbytes itself, "
                    "so BitsandbytesPrecision packs no others."
                )
            return module
        found = plain_layers(module, nn.Linear, self.ignore_modules)
        if not found:
            raise ConfigurationError(
                f"BitsandbytesPrecision packs linear layers, and {type(module).__name__} has none that it can pack. "
                "Leave the precision out, or name fewer layers in ignore_modules."
            )
        made = {path: self._packed(layer) for path, layer in found.items()}
        module = exchange(module, made)
        trained = sum(each.requires_grad for each in module.parameters())
        frozen = "; their weights are frozen" if self.packs_weights else ""
        rank_zero_info(
            f"BitsandbytesPrecision packs {number_of(len(made), 'linear layer')} ({self.mode}): "
            f"{listed(made)}{frozen}. {number_of(trained, 'parameter')} of the module can be trained."
        )
        return module

    def _packed(self, layer: nn.Linear) -> nn.Module:
        four, eight = _layer_classes()
        new: Any
        sizes, device = (layer.in_features, layer.out_features), layer.weight.device
        if self.mode.startswith("int8"):
            new = eight(*sizes, bias=False, has_fp16_weights=not self.packs_weights, device="meta")
            new.compute_dtype = self.computes_in
        else:
            kind, _, dq = self.mode.partition("-")
            new = four(
                *sizes, bias=False, compute_dtype=self.computes_in, compress_statistics=bool(dq), quant_type=kind,
                device="meta",
            )  # fmt: skip
        new.bias = layer.bias
        if self.packs_weights:
            new.pack(_as_on_first_rank(layer.weight.detach()), device)
        else:
            new.weight = layer.weight
        return new


def _as_on_first_rank(weight: Tensor) -> Tensor:
    """Return the first rank's ``weight`` on every rank. All ranks must pack equal values, because packed weights cannot
    be broadcast.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not weight.is_meta:
        weight = weight.clone()
        dist.broadcast(weight, 0)
    return weight


@functools.cache
def _layer_classes() -> tuple[Any, Any]:
    """Return subclasses of bitsandbytes' layers. These subclasses also load plain weights from checkpoints, and do not
    change the dtype of the bias.
    """

    class Linear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
        weight: Any

        def pack(self, weight: Tensor, device: torch.device) -> None:
            old = self.weight
            self.weight = bnb.nn.Params4bit(
                weight, requires_grad=False, compress_statistics=old.compress_statistics, quant_type=old.quant_type,
                quant_storage=old.quant_storage, module=self,
            ).to(device)  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            # The forward method of bitsandbytes would change the dtype of the bias. On some CPUs, it would also change
            # the format of the packed weight.
            found: Tensor = bnb.matmul_4bit(x.to(self.compute_dtype), self.weight, quant_state=self.weight.quant_state)
            return found if self.bias is None else found + self.bias.to(found.dtype)

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
            start = f"{prefix}weight."
            scales = {name[len(start) :]: each for name, each in state_dict.items() if name.startswith(start)}
            weight = state_dict.get(f"{prefix}weight")
            if scales:
                device = self.weight.device
                self.weight = bnb.nn.Params4bit.from_prequantized(weight, scales, device=device, module=self)
            _load_rest(self, weight, bool(scales), state_dict, prefix, *others)

    class Linear8bit(bnb.nn.Linear8bitLt):  # type: ignore[misc]
        weight: Any

        def pack(self, weight: Tensor, device: torch.device) -> None:
            self.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False).to(device)
            self.state.reset_grads()
            self.state.CB = self.state.SCB = None

        def forward(self, x: Tensor) -> Tensor:
            state = self.state
            # On CPUs, bitsandbytes multiplies by unpacked weights if is_training is set. The backward pass on CPUs
            # needs this. Otherwise, bitsandbytes also packs the inputs. On CPUs with AVX512, it then calls
            # torch._int_mm, which leaves some results uninitialized (pytorch#195066).
            state.is_training = self.training or state.has_fp16_weights or x.is_cpu
            if state.has_fp16_weights:
                if hasattr(self.weight, "placements"):  # the weight is sharded over processes
                    raise ConfigurationError(
                        f'BitsandbytesPrecision("int8-training") cannot pack the weight of shape '
                        f"{tuple(self.weight.shape)} that tensor parallelism has split. Leave the layer out of the "
                        "tp_plan, or name it in ignore_modules."
                    )
                state.CB = None  # bitsandbytes would otherwise reuse the packed weight of an earlier step
            if getattr(self.weight, "CB", None) is not None:
                self.init_8bit_state()
            # on CPUs, the backward pass needs 2-D inputs in compute_dtype
            rows = x.reshape(-1, x.shape[-1]).to(self.compute_dtype)
            found: Tensor = bnb.matmul(rows, self.weight, state=state).view(*x.shape[:-1], -1)
            if not state.has_fp16_weights:
                self.weight.data = state.CB
            return found if self.bias is None else found + self.bias.to(found.dtype)

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
            if self.state.has_fp16_weights:
                super()._load_from_state_dict(state_dict, prefix, *others)
                return
            weight, scales = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}SCB")
            if scales is not None:
                device = self.weight.device
                codes = weight.to(device)
                self.weight = bnb.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales.to(device))
            _load_rest(self, weight, scales is not None, state_dict, prefix, *others)

    return Linear4bit, Linear8bit


def _load_rest(layer: Any, weight: Tensor | None, is_packed: bool, state_dict: Any, prefix: str, *others: Any) -> None:
    """Load the bias of ``layer`` from ``state_dict``. If ``weight`` is not packed, pack it and store it in ``layer``.
    ``others`` are further arguments of torch's ``_load_from_state_dict``.
    """
    *_, missing, _, errors = others
    expected = (layer.out_features, layer.in_features)
    if weight is not None and not is_packed:
        if tuple(weight.shape) == expected and weight.is_floating_point():
            device = layer.weight.device
            layer.pack(weight, torch.device("cpu") if device.type == "meta" else device)
        else:
            errors.append(
                f"{prefix}weight in the checkpoint is a {weight.dtype} tensor of shape {tuple(weight.shape)}, but the "
                f"layer packs a floating-point tensor of shape {expected}."
            )
    bias = {name: each for name, each in state_dict.items() if name == f"{prefix}bias"}
    torch_private.load_own_entries(layer, bias, prefix, *others)
    if weight is not None and f"{prefix}weight" in missing:
        missing.remove(f"{prefix}weight")
