"""Functions for precisions that replace layers of a module with layers of another package."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from torch import nn

from drivetrain.base.torch_private import copy_hooks, own_parameters
from drivetrain.errors import first_of

Layer = TypeVar("Layer", bound=nn.Module)
_MOST = 4  # listed() shows at most this many names


def plain_layers(module: nn.Module, kind: type[Layer], ignored: Collection[str] = ()) -> dict[str, Layer]:
    """Return the layers of ``module`` whose class is exactly ``kind``, as a dictionary from path to layer. The path of
    ``module`` itself is "".

    Layers of a subclass are left out, because a subclass may have its own forward pass. Layers that share their weight
    are left out, because such layers cannot be replaced one by one. Layers in ``ignored`` and their children are also
    left out.
    """
    owners: dict[int, int] = {}
    for each in module.modules():
        for parameter in own_parameters(each).values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {
        path: each
        for path, each in module.named_modules()
        if type(each) is kind
        and not any(path == name or path.startswith(f"{name}.") for name in ignored)
        and all(owners[id(parameter)] == 1 for parameter in each.parameters())
    }


def exchange(module: nn.Module, made: Mapping[str, nn.Module]) -> nn.Module:
    """Replace the layer at each path in ``made`` by the new layer. Each new layer gets the hooks and the ``training``
    flag of the layer that it replaces. Return the module.
    """
    for path, new in made.items():
        keep_hooks(module.get_submodule(path), new)
        if not path:
            return new
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, new)
    return module


def keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Copy the forward and backward hooks and the ``training`` flag of ``old`` to ``new``."""
    copy_hooks(old, new)
    new.training = old.training


def listed(names: Collection[str]) -> str:
    """Return a text such as "a, b, c, d and 3 more"."""
    return first_of(sorted(names), _MOST)
