"""Names that modules had in earlier versions, for the pickles and checkpoints that hold them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

_PLACES = {
    "base": ("introspect", "lazy", "rank_zero", "registry", "seed", "tree"),
    "engine": ("engine", "no_init", "ranks", "snapshots", "wrappers"),
    "logbook": ("logbook",),
    "module": (
        "datamodule", "export", "hooks", "hparams", "loading", "losses", "migration", "module", "optimizers",
    ),
    "trainer": ("attach", "checkpoint", "job", "switches", "trainer"),
}  # fmt: skip
MOVED = {
    **{f"drivetrain.{name}": f"drivetrain.{folder}.{name}" for folder, names in _PLACES.items() for name in names},
    "drivetrain.logged": "drivetrain.logbook.entry",
    "drivetrain.view": "drivetrain.trainer.properties",
    "drivetrain.view_limits": "drivetrain.trainer.limits",
    "drivetrain.view_loops": "drivetrain.trainer.loop_views",
}
"""By earlier name, the module that holds the same classes and functions now."""


class MovedModules:  # importlib.abc, which has the base classes, is slow to import
    """Import hook: finds modules of this package under their earlier names, after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, cast("Loader", self)) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give back the module's own specification; it has been executed under its own name."""
        assert module.__spec__ is not None  # import has just set it
        module.__spec__ = module.__spec__.loader_state


def find_moved_modules() -> None:
    """Let ``import`` find the modules under their earlier names."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
