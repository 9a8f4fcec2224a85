"""Rewrites only the paths of Lightning's classes in a YAML configuration of LightningCLI."""

from __future__ import annotations

import re

from drivetrain.errors import ConfigurationError
from drivetrain.legacy.migrate.names import Names
from drivetrain.legacy.migrate.source import Remark

_VALUE = re.compile(
    r"""(?P<before>(?:^|[:\-]\s|[\[{,])[ \t]*(?P<quote>["']?))(?P<path>[a-z_]\w*(?:\.\w+)+)(?P=quote)"""
    r"(?=[ \t]*(?:[#,\]}\r\n]|\Z))",
    re.MULTILINE,
)
"""A value that is only a dotted path, for example after "class_path:" or "logger:", or in a list."""


class Configuration:
    """A YAML file with rewritten paths of classes, and the remarks about the file; the rest of the text is unchanged.

    Args:
        name: the file's name in messages.
        content: the bytes of the file.
        generation: as in :func:`drivetrain.legacy.migrate.program.migrate`.

    Raises:
        ConfigurationError: the file is not text in UTF-8.
    """

    def __init__(self, name: str, content: bytes, generation: str = "") -> None:
        self.name, self.remarks = name, list[Remark]()
        self._names = Names("" if generation == "2" else generation)
        try:
            self.text = content.decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{name}: it cannot be read as UTF-8: {error}. Mend it first.") from None
        self._result = _VALUE.sub(self._rewritten, self.text)

    def result(self) -> str:
        """Return the rewritten text."""
        return self._result

    def content(self) -> bytes:
        return self._result.encode()

    def _rewritten(self, found: re.Match[str]) -> str:
        path = found["path"]
        module, _, name = path.rpartition(".")
        if not self._names.belongs(path):
            return found[0]
        line, today = self.text.count("\n", 0, found.start("path")) + 1, self._names.find(module, name)
        if today is None:
            self.remarks.append(Remark(line, f"left: {self._names.why_missing(module, name)}", True))
            return found[0]
        now = f"{today.home}.{today.name}"
        self.remarks.append(Remark(line, f"{path} -> {now}", False))
        return f"{found['before']}{now}{found['quote']}"
