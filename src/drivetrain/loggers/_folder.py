"""What loggers that write to a local folder share: where a run lives, and its hyperparameters in plain text."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.errors import ConfigurationError, NotSupportedError, wrong_value
from drivetrain.loggers.logger import Logger

_VERSION = re.compile(r"version_(\d+)")


class FolderLogger(Logger):
    """A logger whose run lives in ``<save_dir>/<name>/version_<n>``.

    Args:
        save_dir: the root folder; ``~`` and environment variables are expanded.
        name: the experiment's folder below it; empty or ``None`` for none.
        version: a number, a folder name to be taken as it is, or ``None`` for the number after the highest one
            there. The number is chosen when somebody first asks for it; nothing is created by asking.
        prefix: put before every name, joined by a hyphen.

    Raises:
        ConfigurationError: ``save_dir`` is a remote address, or one of the two is of another type.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
    ) -> None:
        if not isinstance(save_dir, (str, os.PathLike)):
            raise wrong_value(type(self).__name__, "save_dir", save_dir, "a path", 'save_dir="runs"')
        folder = os.fspath(save_dir)
        if "://" in folder:
            raise NotSupportedError(
                f"{type(self).__name__} writes to a local file system, and save_dir={folder!r} is not a path on one. "
                "Pass a local folder, and copy it when the run has ended."
            )
        if version is not None and (isinstance(version, bool) or not isinstance(version, (int, str))):
            raise ConfigurationError(
                f"{type(self).__name__} got version={version!r}. Pass a number, a folder name, or None for the next "
                "free number."
            )
        self._save_dir = os.path.expanduser(os.path.expandvars(folder))
        self._name = name or ""
        self._version = version
        self._prefix = f"{prefix}-" if prefix else ""
        self.hparams: dict[str, Any] = {}
        self._hparams_written = True

    @property
    def save_dir(self) -> str:
        """The root folder that was given."""
        return self._save_dir

    @property
    def name(self) -> str:
        """The experiment's folder name; empty if runs lie in ``save_dir`` itself."""
        return self._name

    @property
    def root_dir(self) -> str:
        """The folder that holds all runs of the experiment."""
        return os.path.join(self._save_dir, self._name) if self._name else self._save_dir

    @property
    def version(self) -> int | str:
        """Which run this is. Asking for it settles it."""
        if self._version is None:
            self._version = _next_version(self.root_dir)
        return self._version

    def agree_on_run(self, broadcast: Callable[[Any], Any]) -> None:
        self._version = broadcast(self.version)

    @property
    def log_dir(self) -> str:
        """This run's own folder; it comes into being with the first thing written."""
        version = self.version
        return os.path.join(self.root_dir, version if isinstance(version, str) else f"version_{version}")

    def _named(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._prefix}{name}": value for name, value in metrics.items()}

    def _keep_hparams(self, params: Any) -> None:
        self.hparams.update(params if isinstance(params, Mapping) else vars(params))  # vars: an argparse.Namespace
        self._hparams_written = False

    def _write_hparams(self) -> None:
        """Bring ``hparams.yaml`` up to date."""
        if self._hparams_written:
            return
        os.makedirs(self.log_dir, exist_ok=True)
        lines = [f"{_flow(str(key))}: {_flow(value)}\n" for key, value in self.hparams.items()]
        write_atomically(os.path.join(self.log_dir, "hparams.yaml"), ("".join(lines) or "{}\n").encode())
        self._hparams_written = True


def write_atomically(path: str, content: bytes) -> None:
    """Replace the file at ``path``: a reader, or a crash, finds the old content or the new, never a part."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def _next_version(root_dir: str) -> int:
    try:
        names = os.listdir(root_dir)
    except FileNotFoundError:
        return 0
    taken = [int(match[1]) for name in names if (match := _VERSION.fullmatch(name))]
    return max(taken, default=-1) + 1


def _flow(value: Any) -> str:
    """``value`` as YAML in flow style, which is JSON except for floats; what YAML has no word for, as its ``str``."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        if not math.isfinite(number):
            return ".nan" if math.isnan(number) else (".inf" if number > 0 else "-.inf")
        text = repr(number)  # YAML readers take 1e-05 for a word: a float must have its point
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)
