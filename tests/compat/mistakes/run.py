"""Make every mistake, and write down the exception of each."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable

from tests.compat.mistakes import callbacks, data, fabric, module, parts, trainer
from tests.compat.mistakes.common import Mistakes

MISTAKES: Mistakes = {
    f"{group.__name__.rpartition('.')[2]}.{name}": mistake
    for group in (trainer, module, data, callbacks, parts, fabric)
    for name, mistake in group.MISTAKES.items()
}


def outcome(name: str) -> BaseException | None:
    """Make the mistake in a folder of its own, without output: the exception, or ``None``."""
    here, arguments, paths = os.getcwd(), sys.argv, list(sys.path)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.ExitStack() as quiet:
        warnings.simplefilter("ignore")
        quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        logging.disable(logging.WARNING)
        os.chdir(folder)
        try:
            MISTAKES[name]()
        except (Exception, SystemExit) as mistake:
            return mistake
        finally:
            os.chdir(here)
            sys.argv, sys.path[:] = arguments, paths
            logging.disable(logging.NOTSET)
    return None


def outcomes(names: Iterable[str] = MISTAKES) -> dict[str, list[str] | None]:
    """By mistake, the names of the exception's classes, the most derived first; ``None`` where there was none."""
    found = {name: outcome(name) for name in names}
    return {
        name: None if raised is None else [kind.__name__ for kind in type(raised).__mro__[:-2]]
        for name, raised in found.items()
    }
