"""Python imports this file at startup, if PYTHONPATH contains this folder: see drivetrain/compat/children.py."""

import importlib.machinery
import importlib.util
import os
import sys


def _install() -> None:
    """Install drivetrain.compat with the parent process's arguments, unless drivetrain cannot be imported."""
    if "DRIVETRAIN_COMPAT" in os.environ and importlib.util.find_spec("drivetrain") is not None:
        from drivetrain import compat
        from drivetrain.compat import children

        compat.install(*children.inherited())


def _chain() -> None:
    """Run the next ``sitecustomize.py`` on ``sys.path``, which this file hides from Python."""
    here = os.path.dirname(os.path.abspath(__file__))
    before = [index for index, entry in enumerate(sys.path) if os.path.abspath(entry) == here]
    # only later entries: another installation of drivetrain may have run this file as its next sitecustomize.py
    path = sys.path[before[-1] + 1 :] if before else sys.path
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _install()
finally:
    _chain()
