"""Read the Engine's arguments that ``drivetrain run`` exports to the program that it starts."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.settings import Settings

COMMAND_LINE_PREFIX = "DRIVETRAIN_RUN_"
"""The prefix of environment variables: ``drivetrain run --precision=bf16-mixed`` sets ``DRIVETRAIN_RUN_PRECISION``."""


def from_command_line(**chosen: Any) -> dict[str, Any]:
    """Return the Engine's arguments ``chosen``, with values of ``drivetrain run`` in place of default values.

    Raises:
        ConfigurationError: the program and the command line set an argument to different values.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, value in chosen.items():
        text = os.environ.get(COMMAND_LINE_PREFIX + name.upper())
        if text is None:
            continue
        if value != defaults[name] and str(value) != text:
            raise ConfigurationError(
                f"The program says Engine({name}={value!r}), and its command line --{name.replace('_', '-')}={text}. "
                "Leave it out of one of them."
            )
        chosen[name] = int(text) if name in ("num_nodes", "devices") and text.lstrip("-").isdigit() else text
    return chosen
