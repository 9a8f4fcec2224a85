"""Lightning's ``utilities.migration`` and ``utilities.upgrade_checkpoint``: convert checkpoints of earlier versions."""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.compat.earlier_checkpoints import migrate
from drivetrain.compat.table import LATEST
from drivetrain.compat.user_warnings import PossibleUserWarning
from drivetrain.compat.versions import numbers_of

_VERSION = LATEST.version
_KEY, _EARLIER_KEY = "pytorch-lightning_version", "legacy_pytorch-lightning_version"
_LAST_CHANGE = "2.0.0"  # the last version with a new layout
_ROOTS = ("lightning.pytorch", "pytorch_lightning")


def migrate_checkpoint(
    checkpoint: dict[str, Any], target_version: str | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Convert a checkpoint of an earlier Lightning version to drivetrain's layout. ``checkpoint`` is changed in place.

    Args:
        checkpoint: the content of the file; its entry for the version is set to 2.6.
        target_version: the Lightning version whose layout is wanted. Below 2.0, nothing is converted.

    Returns:
        ``checkpoint``, and the names of the functions that have converted it, by version.

    Raises:
        KeyError: the checkpoint has no version.
    """
    version = checkpoint[_KEY]
    if numbers_of(version) > numbers_of(_VERSION):
        rank_zero_warn(
            f"The checkpoint was written by Lightning {version}, which is newer than {_VERSION}. It is left as it is.",
            category=PossibleUserWarning,
        )
        return checkpoint, {}
    applied: dict[str, list[str]] = {}
    if numbers_of(version) < numbers_of(_LAST_CHANGE) <= numbers_of(target_version or _VERSION):
        migrated = migrate(checkpoint)
        if migrated is not checkpoint:
            checkpoint.clear()
            checkpoint.update(migrated)
        applied[_LAST_CHANGE] = [migrate.__name__]
    if version != _VERSION:
        checkpoint.setdefault(_EARLIER_KEY, version)
        checkpoint[_KEY] = _VERSION
    return checkpoint, applied


def _pl_migrate_checkpoint(checkpoint: dict[str, Any], checkpoint_path: Any = None) -> dict[str, Any]:
    """Return a checkpoint of an earlier Lightning version in drivetrain's layout."""
    return migrate(checkpoint)


class pl_legacy_patch:
    """Context in which ``torch.load`` can read checkpoints that refer to functions of Lightning 1.x that were removed
    later.
    """

    _lock = threading.Lock()

    def __enter__(self) -> pl_legacy_patch:
        self._lock.acquire()
        holder = ModuleType("argparse_utils", "Checkpoints from before 1.3 look here for a default of --gpus.")
        holder._gpus_arg_default = _default_of_gpus  # type: ignore[attr-defined]
        self._modules = [f"{root}.utilities.{name}" for root in _ROOTS for name in ("argparse", "argparse_utils")]
        self._before = {name: sys.modules.get(name) for name in self._modules}
        sys.modules.update(dict.fromkeys(self._modules, holder))
        return self

    def __exit__(self, *error: object) -> None:
        for name, before in self._before.items():
            if before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = before
        self._lock.release()


def _default_of_gpus(value: Any) -> Any:  # not a local function, because upgraded checkpoints refer to it by name
    return value


# ---- the program -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Upgrade the checkpoints on the command line. The original of ``a.ckpt`` is kept as ``a.bak``."""
    parser = argparse.ArgumentParser("upgrade_checkpoint", description="Upgrade checkpoints of Lightning in place.")
    parser.add_argument("path", help="a checkpoint, or a folder with checkpoints, also in its subfolders")
    parser.add_argument("--extension", "-e", default=".ckpt", help="how the names of checkpoints in a folder end")
    parser.add_argument("--map-to-cpu", action="store_true", help="read tensors of a GPU to host memory")
    given = parser.parse_args()
    path, ending = Path(given.path).absolute(), f".{given.extension.removeprefix('.')}"
    if not path.exists():
        sys.exit(f"There is nothing at {path}. Pass the path of a checkpoint, or of a folder with checkpoints.")
    found = [path] if path.is_file() else sorted(path.rglob(f"*{ending}"))
    if not found:
        sys.exit(f"There is no file that ends with {ending} in {path}. Pass --extension with the ending of yours.")
    for file in found:
        _upgrade(file, "cpu" if given.map_to_cpu else None)
    print(f"Upgraded {len(found)} checkpoints to {_VERSION}; the original of each is beside it, as .bak.")


def _upgrade(file: Path, location: str | None) -> None:
    store = TorchCheckpointIO()
    with pl_legacy_patch():
        checkpoint = store.load_checkpoint(file, location)
    if _KEY not in checkpoint:
        sys.exit(f"{file} contains no version of Lightning, so it is not a checkpoint of a Trainer. Leave it out.")
    kept = file.with_suffix(".bak")
    if not kept.exists():  # an earlier upgrade has kept the original
        shutil.copyfile(file, kept)
    store.save_checkpoint(migrate_checkpoint(checkpoint)[0], file)
