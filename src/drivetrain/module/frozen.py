"""Checkpoints without frozen weights: find the frozen weights, and check that the module that loads a checkpoint has
equal ones.

For each frozen parameter, such a checkpoint contains a fingerprint: the parameter's shape and dtype, and a digest of
its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.compiled import plain_names
from drivetrain.base.memory import content_of
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.restoring import expect, restoring
from drivetrain.base.torch_private import version_of
from drivetrain.base.tree import is_dtensor
from drivetrain.errors import CheckpointError, CheckpointMismatchError

FINGERPRINTS = "frozen_weights"
"""The checkpoint's key for a dictionary from the names of the frozen parameters to their fingerprints."""

_KNOWN: WeakKeyDictionary[nn.Module, dict[str, tuple[Any, dict[str, Any]]]] = WeakKeyDictionary()


def frozen_parameters(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the frozen parameters, by their names in a state dict.

    A parameter in an optimizer is not frozen, even if its ``requires_grad`` is now False.
    """
    stepped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    named = plain_names(dict(module.named_parameters(remove_duplicate=False)))
    trained = {id(each) for each in named.values() if each.requires_grad or id(each) in stepped}
    return {name: each for name, each in named.items() if id(each) not in trained}


def without_frozen(
    module: nn.Module, state: Mapping[str, Any], optimizers: Iterable[Optimizer]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dictionaries: ``state`` without the frozen parameters of ``module``, and the fingerprints of these
    parameters.

    Raises:
        CheckpointError: ``state`` contains shards.
    """
    frozen = {name: each for name, each in frozen_parameters(module, optimizers).items() if name in state}
    if module not in _KNOWN:
        _say_what_stays(module, frozen)
    known = _KNOWN.setdefault(module, {})
    fingerprints: dict[str, Any] = {}
    for name, parameter in frozen.items():
        value = state[name]
        if is_dtensor(value) or value.is_meta:
            raise CheckpointError(
                f"Trainer(save_trainable_only=True) needs complete weights, and this process has a shard of {name}. "
                'Write FSDPStrategy(state_dict_type="full"), or leave save_trainable_only out.'
            )
        # the digest is computed once for each parameter, not at every save
        key = (id(parameter), version_of(parameter))
        if name not in known or known[name][0] != key:
            known[name] = key, fingerprint(value)
        fingerprints[name] = known[name][1]
    return {name: value for name, value in state.items() if name not in frozen}, fingerprints


def _say_what_stays(module: nn.Module, frozen: Collection[str]) -> None:
    """Log the parameters that require no gradient, but are saved because an optimizer has them."""
    named = plain_names(dict(module.named_parameters(remove_duplicate=False)))
    stay = [name for name, each in named.items() if not each.requires_grad and name not in frozen]
    if stay:
        rank_zero_info(
            f"save_trainable_only: checkpoints hold {len(stay)} parameters that require no gradient, such as "
            f"{stay[0]}, because an optimizer has them. To leave them out, pass it only those that require a gradient."
        )


def fingerprint(tensor: Tensor) -> dict[str, Any]:
    """Return the shape of ``tensor``, its dtype, and a digest of its bytes."""
    host = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(content_of(host)).hexdigest()
    return {"shape": list(host.shape), "dtype": str(host.dtype).removeprefix("torch."), "sha256": digest}


def check_base(module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> bool:
    """Check that ``module`` has the frozen weights with which the checkpoint's weights were trained.

    Args:
        module: a module whose frozen weights are already loaded.
        checkpoint: any checkpoint.
        strict: whether the checkpoint and the module must have equal names of trainable weights.

    Returns:
        The argument ``strict`` for ``load_state_dict``. It is False if the checkpoint contains only trainable weights,
        because torch would report the frozen weights as missing.

    Raises:
        CheckpointError: a frozen weight differs, or, if ``strict``, the names of the trainable weights differ.
    """
    if FINGERPRINTS not in checkpoint:
        return strict
    with restoring(repr(FINGERPRINTS)):
        expected: Mapping[str, Any] = expect(checkpoint[FINGERPRINTS], {str: Mapping})
    own: dict[str, Any] = plain_names(dict(module.named_parameters(remove_duplicate=False)))
    differ = [text for name, each in expected.items() if (text := _difference(name, own.get(name), each))]
    if differ:
        more = f" ({len(differ)} of its {len(expected)} frozen parameters differ)" if len(expected) > 1 else ""
        raise CheckpointError(
            f"The checkpoint holds trainable weights only, and {type(module).__name__} has another base than the one "
            f"that they were trained on: {differ[0]}{more}. Load the same base in __init__ or configure_model, in the "
            f"same type of numbers. To use them on another base, remove {FINGERPRINTS!r} from the checkpoint in "
            "on_load_checkpoint, and set strict_loading = False."
        )
    if strict:
        _check_names(module, checkpoint["state_dict"], expected)
    return False


def _difference(name: str, parameter: Any, expected: Mapping[str, Any]) -> str:
    """Return how a frozen parameter differs from its fingerprint; "" if there is no difference."""
    if parameter is None:
        return f"there is no parameter {name}"
    shape, dtype = list(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    if shape != list(expected.get("shape", ())):
        return f"{name} has the shape {tuple(shape)}, and had {tuple(expected.get('shape', ()))}"
    if dtype != expected.get("dtype"):
        return f"{name} is of type {dtype}, and was of {expected.get('dtype')}"
    if parameter.is_meta:
        return f"{name} has no values: it is on the meta device"
    with torch.no_grad():
        found = fingerprint(parameter.full_tensor() if is_dtensor(parameter) else parameter)["sha256"]
    if found != expected.get("sha256"):
        return f"{name} has other values (sha256 {found[:12]}, and had {str(expected.get('sha256'))[:12]})"
    return ""


def _check_names(module: nn.Module, state: Mapping[str, Any], frozen: Collection[str]) -> None:
    there, own = set(plain_names(dict(state))), set(plain_names(module.state_dict())) - set(frozen)
    missing, unexpected = sorted(own - there), sorted(there - own - set(frozen))
    if missing or unexpected:
        parts = [
            f"{what} {', '.join(names[:5])}" for what, names in (("lacks", missing), ("has also", unexpected)) if names
        ]
        raise CheckpointMismatchError(
            f"The checkpoint does not fit {type(module).__name__}: it {' and '.join(parts)}. Build the module as "
            "it was trained, or set strict_loading = False on it."
        )
