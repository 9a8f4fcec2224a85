"""Lightning's ``pytorch.cli``: build an object from hyperparameters that LightningCLI has saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from drivetrain.cli.class_paths import class_at
from drivetrain.cli.from_checkpoint import CLASS_PATH, INSTANTIATOR, options_below, parser_of
from drivetrain.errors import ConfigurationError

ModuleType = TypeVar("ModuleType")


def instantiate_module(class_type: type[ModuleType], config: Mapping[str, Any]) -> ModuleType:
    """Return an object of ``class_type``, or of the subclass named in ``config``, with the arguments in ``config``.

    This function imports and calls what ``config`` names: use it only for data that you trust. ``load_from_checkpoint``
    does not call this function.

    Args:
        class_type: the class.
        config: arguments as on the command line, with objects as ``class_path`` and ``init_args``; the entry
            ``_class_path``, if there is one, is the path of a subclass.

    Raises:
        ConfigurationError: the class that ``_class_path`` names is not a subclass of ``class_type``.
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
    options = options_below(parser, "module")  # other names are from ``**kwargs``
    parsed = parser.parse_object({"module": {name: value for name, value in values.items() if name in options}})
    made = parser.instantiate(parsed).get("module")
    return cls(**{**values, **({} if made is None else vars(made))})
