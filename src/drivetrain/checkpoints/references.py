"""Look up classes and functions by name in imported modules, without importing or calling anything."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from drivetrain.base.torch_private import FUNCTIONS_IN_C

# A library may call a class from a checkpoint with arguments from the checkpoint, as in optimizer_cls(**kwargs). If the
# class is subprocess.Popen, the file runs a program. The packages in _CLOSED are nearly always installed and contain
# dangerous functions. Of these packages, only the modules in _OPEN_MODULES, the names in _OPEN_NAMES and numpy's number
# types are allowed.
_CLOSED = frozenset({*sys.stdlib_module_names, "drivetrain", "numpy", "torch"})
_OPEN_MODULES = (
    "cmath", "collections", "datetime", "decimal", "fractions", "math", "pathlib", "uuid",
    FUNCTIONS_IN_C, "torch.distributions", "torch.nn", "torch.optim",
    "torch.utils.data.dataloader", "torch.utils.data.dataset", "torch.utils.data.sampler",
)  # fmt: skip
_OPEN_NAMES = frozenset(
    {"torch:Size", "torch:Tensor", "torch:device", "torch:dtype"}
    | {f"builtins:{kind.__name__}" for kind in (bool, bytearray, bytes, complex, float, int, object, range, str)}
    | {f"builtins:{kind.__name__}" for kind in (dict, frozenset, list, set, tuple)}
)


def find(name: str) -> Any:
    """Return the class or function with ``name``, such as "module:Outer.Inner"; ``None`` if no imported module defines
    ``name``. The lookup reads only dictionaries, because a property or ``__getattr__`` could import a module. If the
    module has imported the object from another module, the result is ``None``.
    """
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    if not isinstance(found, ModuleType):
        return None
    for part in qualname.split("."):
        if not (found is sys.modules[module] or _is_class(found)):
            return None
        found = vars(found).get(part)
    if not _is_class(found) and (type(found) not in (FunctionType, BuiltinFunctionType) or "." in qualname):
        return None
    return found if (found.__module__, found.__qualname__) == (module, qualname) else None


def find_open(name: str) -> Any:
    """Return the result of :func:`find`, or ``None`` if a call of the object could be dangerous."""
    found = find(name)
    return found if found is not None and _is_open(name, found) else None


def name_of(obj: Any) -> str | None:
    """Return the name with which :func:`find` finds the class or function ``obj``; ``None`` without a name."""
    name = f"{getattr(obj, '__module__', None)}:{getattr(obj, '__qualname__', None)}"
    return name if find(name) is obj else None


def _is_class(obj: Any) -> bool:
    # isinstance would read __class__, which can be a property that runs code
    return issubclass(type(obj), type)


def _is_open(name: str, found: Any) -> bool:
    module = name.partition(":")[0]
    if module.partition(".")[0] not in _CLOSED or name in _OPEN_NAMES:
        return True
    if module == "numpy":  # allow only numpy's number types, because memmap, for example, can write files
        return _is_class(found) and issubclass(found, sys.modules["numpy"].generic)
    return any(module == opened or module.startswith(f"{opened}.") for opened in _OPEN_MODULES)
