"""Import the classes that a command line or a configuration names as ``file.py:Class``, such as ``train.py:Net``."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.errors import ConfigurationError, did_you_mean

_PLACE = re.compile(r"(--[\w.]+\+?=)?((?:[A-Za-z]:[\\/])?[^:\[\]{}'\"]+\.py):([A-Za-z_]\w*(?:\.\w+)*)")
imported: dict[str, str] = {}
"""The files that :func:`module_of` has imported, as the user wrote them, by the module's name."""


def module_of(file: str, folder: str = "") -> ModuleType:
    """Import a file as a module, and return the module. The file's folder is added to ``sys.path``, as by ``python
    file.py``.

    A relative path is relative to ``folder``, by default the working directory. The code below ``if __name__ ==
    "__main__"`` does not run.

    Raises:
        ConfigurationError: there is no such Python file.
    """
    path = Path(folder, file).resolve()
    name = re.sub(r"\W|^(?=\d)", "_", path.stem)
    for each in (name, f"{name}_{abs(hash(str(path)))}"):  # the second name is for a file whose name another module has
        if (known := sys.modules.get(each)) is None:
            break
        if getattr(known, "__file__", None) == str(path):
            imported.setdefault(each, file)
            return known
    spec = importlib.util.spec_from_file_location(each, path)
    if spec is None or spec.loader is None or not path.is_file():
        beside = [each.name for each in path.parent.glob("*.py")]
        raise ConfigurationError(f"There is no Python file {path}. {did_you_mean(path.name, beside)}")
    if str(path.parent) not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(path.parent))
    sys.modules[each] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[each]
        raise
    imported[each] = file
    return module


def object_at(place: str, folder: str = "") -> Any:
    """Return the object at ``"package.module:Name"`` or ``"file.py:Name"``. :func:`module_of` imports a file.

    Raises:
        ConfigurationError: there is no such file or name.
        ImportError: there is no such module.
    """
    where, _, name = place.rpartition(":")
    found: Any = module_of(where, folder) if where.endswith(".py") else importlib.import_module(where)
    for each in name.split("."):
        if not hasattr(found, each):
            own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
            raise ConfigurationError(f"{where} has no {name}. {did_you_mean(name, own)}")
        found = getattr(found, each)
    return found


def import_path(text: str, folder: str = "") -> str:
    """Import the file of a ``"file.py:Class"``, also after ``--option=``, and write the class's import path in its
    place. Return any other text unchanged.

    Raises:
        ConfigurationError: there is no such file or class.
    """
    if (found := _PLACE.fullmatch(text)) is None:
        return text
    option, file, name = found.groups(default="")
    object_at(f"{file}:{name}", folder)
    return f"{option}{module_of(file, folder).__name__}.{name}"


def import_paths(value: Any, folder: str) -> Any:
    """Apply :func:`import_path` to each text in the plain data ``value``."""
    if isinstance(value, dict):
        return {key: import_paths(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [import_paths(item, folder) for item in value]
    return import_path(value, folder) if isinstance(value, str) else value


def places(text: str, files: Mapping[str, str]) -> str:
    """Replace import paths of classes in the YAML ``text`` by ``file.py:Class``, for the modules in ``files``.
    ``files`` has the form of :data:`imported`.
    """

    def place(found: re.Match[str]) -> str:
        file = files.get(found[2])
        return found[0] if file is None else f"{found[1]}{file}:{found[3]}"

    return re.sub(r"^(.*\bclass_path: )(\w+)\.([\w.]+)$", place, text, flags=re.MULTILINE)
