"""Find the repeated blocks of a model. A plan measures the model with two blocks and with three blocks, and
extrapolates to all blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.base.torch_private import own_modules
from drivetrain.strategies.fsdp_blocks import find_blocks

FEWEST, FEW, MORE = 8, 2, 3
"""If a list has at least ``FEWEST`` blocks, the model is measured with ``FEW`` and with ``MORE`` of these blocks."""

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def paths(root: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of ``root`` by path."""
    names = {module: name for name, module in root.named_modules()}
    return {names[block]: block for block in find_blocks(root)}


def _lists(root: nn.Module) -> list[tuple[str, Any]]:
    """Return the path and the list for each list in ``root`` whose blocks are interchangeable."""
    found, inside = [], set[nn.Module]()
    for path, module in root.named_modules():
        children = list(module.children())
        if not isinstance(module, _LISTS) or module in inside or len(children) < 2:
            continue
        if len({_form(each) for each in children}) == 1 and any(True for _ in children[0].parameters()):
            found.append((path, module))
            inside |= set(module.modules())
    return found


def _form(block: nn.Module) -> tuple[Any, ...]:
    """Return a key. Blocks with the same key can replace each other. The key ignores attributes that contain a block's
    number.
    """
    tensors: list[tuple[str, Any]] = [*block.named_parameters(), *block.named_buffers()]
    parameters = tuple((name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors)
    plain = tuple(
        (path, type(module).__name__, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, float, str)) or (isinstance(value, int) and not _is_number(name))
    )
    return type(block), parameters, plain


def _is_number(name: str) -> bool:
    """Whether an attribute with this name contains a block's number."""
    return any(word in name for word in ("idx", "index", "layer_id", "layer_number", "depth"))


def lengths(root: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the paths and the lengths of the lists with at least ``FEWEST`` blocks."""
    return tuple((path, len(module)) for path, module in _lists(root) if len(module) >= FEWEST)


def cases(found: tuple[tuple[str, int], ...]) -> list[tuple[int, ...]]:
    """Return the lengths of all lists for each further measurement. A measurement gives one list ``MORE`` blocks, and
    every other list ``FEW`` blocks.
    """
    short = (FEW,) * len(found)
    return [(*short[:at], MORE, *short[at + 1 :]) for at in range(len(found))]


def shorten(root: nn.Module, to: tuple[int, ...] | None) -> tuple[tuple[str, int], ...]:
    """Remove all but the first blocks of each list. Return the lists' paths and original lengths."""
    found = lengths(root)
    for (path, _), length in zip(found, to or (), strict=False):
        module: Any = root.get_submodule(path)
        for name in list(own_modules(module))[length:]:
            del own_modules(module)[name]
    return found


def recompute(chosen: Iterable[nn.Module]) -> None:
    """Let the blocks recompute their activations in the backward pass."""
    for block in chosen:
        forward: Any = block.forward
        if not isinstance(forward, functools.partial):
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
