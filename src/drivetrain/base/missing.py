"""Names of Lightning 2.6 that this version lacks, or that are elsewhere: for the message when one is asked for.

A test compares the table with Lightning's public names and with drivetrain's: what is neither here nor there fails it.
"""

from __future__ import annotations

_NOT_YET = ""
_STORES = dict.fromkeys(["AsyncCheckpointIO"], _NOT_YET)
_OWN_LOGGER = "Use WandbLogger, MLFlowLogger, TensorBoardLogger or CSVLogger, or write a Logger: see docs/own_parts.md."

MISSING: dict[str, dict[str, str]] = {
    "drivetrain": {
        "serve": _NOT_YET,
        "Fabric": "It is called Engine here: write drivetrain.Engine.",
        "fabric": "Its Fabric is called Engine here: write drivetrain.Engine.",
        "pytorch": "Write drivetrain where a program says lightning.pytorch.",
        "core": "Write drivetrain.module.",
        "utilities": "What users need of it is elsewhere, such as drivetrain.data.CombinedLoader; `drivetrain exec` "
        "runs programs that import from lightning.pytorch.utilities.",
        "demos": "`drivetrain exec` runs programs that import from lightning.pytorch.demos.",
        "overrides": "Write a strategy: see docs/own_strategy.md.",
    },
    "drivetrain.callbacks": {
        "progress": "Import the bar from drivetrain.callbacks.",
    },
    "drivetrain.loggers": {"LitLogger": _OWN_LOGGER},
    "drivetrain.cli": {
        "ArgsType": "Write list[str] | dict[str, Any] | None.",
        "LRSchedulerType": "Write type[torch.optim.lr_scheduler.LRScheduler].",
        "LRSchedulerTypeTuple": _NOT_YET,
        "LRSchedulerTypeUnion": _NOT_YET,
        "ModuleType": _NOT_YET,
        "instantiate_module": "Write instantiate_class.",
    },
    "drivetrain.checkpoints": _STORES,
    "drivetrain.plugins": _STORES,
    "drivetrain.plugins.io": _STORES,
}
"""By package and name, what to write instead; "" if nothing does its work yet."""


def is_known_to_be_missing(package: str, name: str) -> bool:
    """Return whether Lightning has ``name`` where drivetrain has ``package``, and this version lacks it."""
    return name in MISSING.get(package, {})


def why_missing(package: str, name: str) -> str | None:
    """Return what to say of such a name; ``None`` of any other."""
    if not is_known_to_be_missing(package, name):
        return None
    instead = MISSING[package][name]
    return f"this version of drivetrain does not have it{f'. {instead}' if instead else ' yet.'}"
