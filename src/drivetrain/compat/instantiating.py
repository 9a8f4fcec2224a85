"""Lightning's ``pytorch.cli``: build an object from hyperparameters that LightningCLI has saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from drivetrain.cli.class_paths import class_at
from drivetrain.cli.from_checkpoint import CLASS_PATH, INSTANTIATOR, options_below, parser_of
from drivetrain.errors import ConfigurationError

ModuleType = TypeVar("ModuleType")


def instantiate_module(class_type: type[ModuleType], config: Mapping[str, Any]) -> ModuleType:
    """Return an object of ``class_type``, or of the subclass that ``config`` names. ``config`` has the arguments.

    Pass only data that you trust, because this function imports and calls every class that ``config`` names.
    ``load_from_checkpoint`` does not call this function.

    Args:
        class_type: the class.
        config: arguments by name. A dictionary with ``class_path`` and ``init_args`` describes an object. The optional
            entry ``_class_path`` is the path of a subclass.

    Raises:
        ConfigurationError: ``_class_path`` does not name a subclass of ``class_type``.
    """
    values = {name: value for name, value in config.items() if name != INSTANTIATOR}
    path = values.pop(CLASS_PATH, None)
    cls = class_type if path is None else class_at(path)
    if not (isinstance(cls, type) and issubclass(cls, class_type)):
        raise ConfigurationError(
            f"instantiate_module got {CLASS_PATH}={path!r}, which is no subclass of {class_type.__name__}. Write the "
            "path of one, or leave it out."
        )
    parser = parser_of(cls)
    options = options_below(parser, "module")  # entries with other names are passed as ``**kwargs``
    parsed = parser.parse_object({"module": {name: value for name, value in values.items() if name in options}})
    made = parser.instantiate(parsed).get("module")
    others = {name: value for name, value in values.items() if name not in options}
    return cls(**{**({} if made is None else vars(made)), **others})
