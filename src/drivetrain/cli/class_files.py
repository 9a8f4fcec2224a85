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
"""For each module that :func:`module_of` has imported, the path of the module's file as the user first wrote it."""


def module_of(file: str, folder: str = "") -> ModuleType:
    """Import a file as a module, and return the module. The file's folder is put on ``sys.path``, as with ``python
    file.py``.

    A relative path begins in ``folder``, by default in the working directory. The code below ``if __name__ ==
    "__main__"`` does not run.

    Raises:
        ConfigurationError: there is no such Python file.
    """
    path = Path(folder, file).resolve()
    name = re.sub(r"\W|^(?=\d)", "_", path.stem)
    for each in (name, f"{name}_{abs(hash(str(path)))}"):  # another file's module may already be called ``name``
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
    """Return the object at ``"package.module:Name"`` or ``"file.py:Name"``. A file is imported by :func:`module_of`.

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
    """If ``text`` has the form ``"file.py:Class"``, import the file, and return the class's import path. A prefix
    ``--option=`` is kept. Return any other text unchanged.

    Raises:
        ConfigurationError: there is no such file or class.
    """
    if (found := _PLACE.fullmatch(text)) is None:
        return text
    option, file, name = found.groups(default="")
    object_at(f"{file}:{name}", folder)
    return f"{option}{module_of(file, folder).__name__}.{name}"


def import_paths(value: Any, folder: str) -> Any:
    """Return the plain data ``value``, with each ``"file.py:Class"`` replaced by an import path."""
    if isinstance(value, dict):
        return {key: import_paths(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [import_paths(item, folder) for item in value]
    return import_path(value, folder) if isinstance(value, str) else value


def places(text: str, files: Mapping[str, str]) -> str:
    """Write classes in the YAML ``text`` as ``file.py:Class`` instead of as import paths. ``files`` contains the file
    of each module, as :data:`imported` does. Classes of other modules stay as they are.
    """

    def place(found: re.Match[str]) -> str:
        file = files.get(found[2])
        return found[0] if file is None else f"{found[1]}{file}:{found[3]}"

    return re.sub(r"^(.*\bclass_path: )(\w+)\.([\w.]+)$", place, text, flags=re.MULTILINE)
