"""Find the layers that FSDP gathers one at a time (blocks), and the layers that recompute their activations in the
backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from drivetrain.base.introspect import positional_arity
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.torch_private import CLASSES_OF_POLICY, FSDP_STATE, FUNCTION_OF_POLICY
from drivetrain.errors import ConfigurationError, described, did_you_mean, first_of, number_of

Policy = Callable[..., Any] | Collection[type[nn.Module] | str] | type[nn.Module] | str
"""A selection of layers: classes, class names, a function ``policy(module) -> bool``, or a policy of torch's FSDP."""

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)  # never blocks: FSDP gathers a block when its forward is called


def find_blocks(root: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``root`` if the user gives no policy: the blocks that the model declares, or else its
    repeated layers.

    A model declares blocks in ``_no_split_modules``, a list of class names, as models of Hugging Face do. Repeated
    layers are layers of the same class in one ``ModuleList``, ``Sequential`` or ``ModuleDict``. If there are no such
    layers, children of the same class in any module count as repeated layers. If a repeated layer contains repeated
    layers, only the outer layer is a block.
    """
    declared = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    if declared and (found := [each for each in _below(root) if type(each).__name__ in declared]):
        return outermost(found)
    containers = (nn.Sequential, *_WITHOUT_FORWARD)
    for kinds in (containers, (nn.Module,)):
        repeated = [each for parent in root.modules() if isinstance(parent, kinds) for each in _repeated(parent)]
        if repeated:
            return outermost(repeated)
    return []


def _repeated(parent: nn.Module) -> list[nn.Module]:
    """Return the children whose class occurs at least twice. If several classes occur at least twice, return only the
    children of the class with the most parameters.
    """
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for child in parent.children():
        if not isinstance(child, _WITHOUT_FORWARD):
            by_class.setdefault(type(child), []).append(child)
    repeated = [children for children in by_class.values() if len(children) > 1 and any(map(_size, children))]
    return max(repeated, key=lambda children: sum(map(_size, children)), default=[])


def matching(root: nn.Module, policy: Policy, argument: str) -> list[nn.Module]:
    """Return the modules that a policy selects. ``root`` may be among these modules.

    Args:
        root: the model.
        policy: classes, class names, or a function; also torch's ``ModuleWrapPolicy``, ``CustomPolicy``,
            ``size_based_auto_wrap_policy`` and other functions of ``(module, recurse, nonwrapped_numel)``.
        argument: the constructor's argument, for messages.

    Raises:
        ConfigurationError: the policy selects nothing, or ``policy`` is not a policy.
    """
    classes = getattr(policy, CLASSES_OF_POLICY, policy)  # torch's ModuleWrapPolicy
    function: Any = getattr(policy, FUNCTION_OF_POLICY, policy)  # torch's CustomPolicy
    if isinstance(classes, (type, str)):
        classes = {classes}
    asked = list(classes) if isinstance(classes, Collection) else []
    wrong = [each for each in asked if not isinstance(each, (str, type))]
    if not isinstance(classes, Collection) and not callable(function):
        wrong = [policy]
    if wrong:
        raise ConfigurationError(f"{argument} got {described(wrong[0])}. {_WRITE.format(argument)}")
    if isinstance(classes, Collection):
        found = [each for each in root.modules() if any(_is_a(each, kind) for kind in asked)]
    else:
        found = _by_function(root, function)
    without = [each for each in asked if not any(_is_a(module, each) for module in found)]
    names = sorted(getattr(each, "__name__", each) for each in without)
    unused = ", ".join(names)
    there = {class_name(module) for module in root.modules()}
    if not found:
        unused = unused or "its function"
        raise ConfigurationError(
            f"{argument} matches no layer of {class_name(root)}: {unused} selects none. "
            f"{did_you_mean(unused, there)} Name the classes of layers that are there."
        )
    if unused:
        rank_zero_warn(
            f"{argument} names {unused}, and {class_name(root)} has no such layer. "
            f"{did_you_mean(names[0], there)} Leave that name out."
        )
    return found


def _is_a(module: nn.Module, kind: type | str) -> bool:
    return class_name(module) == kind if isinstance(kind, str) else isinstance(module, kind)


_WRITE = "Write {0}={{Block}}, the classes of the layers, or a function of a module that returns True or False."


def class_name(module: nn.Module) -> str:
    """Return the class name in the user's code, without the prefix that FSDP adds."""
    kind = type(module)
    return (kind.__mro__[2] if hasattr(module, FSDP_STATE) else kind).__name__


def _by_function(root: nn.Module, function: Callable[..., Any]) -> list[nn.Module]:
    if positional_arity(function) > 1 or isinstance(function, functools.partial):
        found: list[nn.Module] = []
        _by_size(root, function, found, root)
        return found
    return [module for module in root.modules() if function(module)]


def _by_size(module: nn.Module, function: Callable[..., Any], found: list[nn.Module], root: nn.Module) -> int:
    """Append to ``found`` the modules that a policy ``(module, recurse, nonwrapped_numel)`` selects, inner modules
    first. Return the number of elements in these modules.
    """
    size = _size(module)
    if not function(module=module, recurse=True, nonwrapped_numel=size):
        return 0
    wrapped = sum(_by_size(child, function, found, root) for child in module.children())
    if module is root or not function(module=module, recurse=False, nonwrapped_numel=size - wrapped):
        return wrapped
    found.append(module)
    return size


def apart_from_tied(root: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with a module outside the block. A warning names the other blocks.

    Sharding two blocks with a shared parameter would silently turn the shared parameter into two parameters.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    names, kept, tied = names_of(root), list[nn.Module](), list[str]()
    for block in blocks:
        inside = set(block.modules())
        shared = [
            owner
            for name, parameter in block.named_parameters(remove_duplicate=False)
            for owner in owners[id(parameter)]
            if owner not in inside
        ]
        if shared and block is not root:
            tied.append(f"{names[block]} (with {names[shared[0]]})")
        else:
            kept.append(block)
    if tied:
        rank_zero_warn(
            f"FSDP keeps parameters that are tied to each other in one block, so these layers stay with the rest of "
            f"the model: {first_of(tied, 5)}. Leave them out "
            "of auto_wrap_policy, or name a layer that contains both."
        )
    return kept


def make_contiguous(root: nn.Module) -> None:
    """Give all parameters torch's default memory format, which ``fully_shard`` requires."""
    others = {name: each for name, each in root.named_parameters() if not each.is_contiguous()}
    for parameter in others.values():
        parameter.data = parameter.data.contiguous()
    if others:
        names = list(others)
        rank_zero_info(
            f"FSDP makes {number_of(len(names), 'parameter')} contiguous ({', '.join(names[:3])}"
            f"{', ...' * (len(names) > 3)}), because torch shards no others: a memory format such as channels_last is "
            "lost."
        )


def names_of(root: nn.Module) -> dict[nn.Module, str]:
    """Return the path of each module in ``root``, and the class name for ``root`` itself."""
    return {module: name or class_name(module) for name, module in root.named_modules()}


def summary(root: nn.Module, blocks: list[nn.Module]) -> str:
    """Return a text such as "12 x Block (net.layers.0 ... net.layers.11) and the rest of Net"."""
    names, by_class = names_of(root), dict[str, list[str]]()
    for block in blocks:
        if block is not root:
            by_class.setdefault(class_name(block), []).append(names[block])
    kinds = [
        f"{len(paths)} x {kind} ({paths[0] if len(paths) == 1 else f'{paths[0]} ... {paths[-1]}'})"
        for kind, paths in by_class.items()
    ]
    return ", ".join([*kinds, f"the rest of {class_name(root)}" if kinds else f"all of {class_name(root)} in one"])


def _below(root: nn.Module) -> Iterator[nn.Module]:
    return (each for each in root.modules() if each is not root)


def outermost(found: list[nn.Module]) -> list[nn.Module]:
    """Return the modules in ``found`` that are not inside another module in ``found``."""
    inside = {child for each in found for child in _below(each)}
    return [each for each in dict.fromkeys(found) if each not in inside]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
