"""Save the hyperparameters of a module or a data module in a checkpoint, and construct an object from a checkpoint."""

from __future__ import annotations

import ast
import csv
import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from drivetrain import parity
from drivetrain.base import files
from drivetrain.base.configs import is_config
from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import yaml
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import expect, naming, restoring, shown_error
from drivetrain.base.supplied import in_our_layout, supplied
from drivetrain.checkpoints.file import TorchCheckpointIO, name_of
from drivetrain.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    DrivetrainError,
    WrongTypeError,
    check_installed,
    did_you_mean,
    shown,
)
from drivetrain.module.hparams import AttributeDict, described_hyperparameters
from drivetrain.module.trainable import TrainableModule, is_strict

if TYPE_CHECKING:
    from typing_extensions import Self

    _class_only = classmethod
else:

    class _class_only(classmethod):
        """A class method that raises if it is called on an instance."""

        def __get__(self, instance, owner=None):
            bound = super().__get__(None, owner or type(instance))
            if instance is None:
                return bound
            name, cls = bound.__name__, type(instance).__name__

            # raise when the method is called, not when the attribute is read, because inspect reads all attributes
            def refuse(*args, **kwargs):
                raise _CalledOnInstance(
                    f"{name} was called on an instance of {cls}, and it returns a new one and leaves this one as it "
                    f"is. Call it on the class: model = {cls}.{name}(...)."
                )

            return refuse


with on_first_use:
    from drivetrain.base import configs, remote
    from drivetrain.checkpoints import plain
    from drivetrain.module import frozen


# These parts of a checkpoint must not contain functions. torch's load_state_dict for optimizers and schedulers sets the
# entries as attributes, and some attributes are called.
PARTS_WITHOUT_REFERENCES = frozenset({"optimizer_states", "lr_schedulers"})
HYPERPARAMETERS = frozenset({"hyper_parameters", "datamodule_hyper_parameters"})
_CONFIG = "omegaconf"  # the value of ``hparams_type`` if an OmegaConf configuration is stored as plain data
_PARTS_OF_A_RUN = PARTS_WITHOUT_REFERENCES | HYPERPARAMETERS | {"callbacks", "loops", "restart", "rng"}


class _CalledOnInstance(ConfigurationError, TypeError):
    """A class method was called on an instance. The error is also a TypeError, which Python raises for wrong calls."""


class LoadableMixin:
    """Gives a module or a data module :meth:`load_from_checkpoint`."""

    CHECKPOINT_HYPER_PARAMS_KEY: ClassVar[str] = "hyper_parameters"
    """The checkpoint's key for the hyperparameters. ``on_save_checkpoint`` can add hyperparameters."""

    CHECKPOINT_HYPER_PARAMS_NAME: ClassVar[str] = "hparams_name"
    """The checkpoint's key for the name of the argument whose items are the hyperparameters. The name is "kwargs" if
    each hyperparameter is a separate argument.
    """

    CHECKPOINT_HYPER_PARAMS_TYPE: ClassVar[str] = "hparams_type"
    """The key under which Lightning's checkpoints name the class of the hyperparameters. drivetrain does not read that
    class.
    """

    @_class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Construct an object from the hyperparameters in the checkpoint, and load its state.

        A module's ``configure_model`` and ``on_load_checkpoint`` are called before its weights are loaded. A file
        without hyperparameters is valid. For a module, a file with a plain state dict is also valid.

        Args:
            checkpoint_path: the path of a checkpoint that the Trainer wrote, or a file object that reads the bytes of
                such a checkpoint.
            map_location: the device onto which the weights are read, as for ``torch.load``. The module is also moved to
                this device. ``None``: the weights are read to the host, and the module is not moved.
            hparams_file: hyperparameters that replace those in the checkpoint: a ``.yaml`` file, or a ``.csv`` file
                with a key and a value in each row.
            strict: whether the names of weights in the checkpoint must be exactly those in the module; ``None``: the
                module's ``strict_loading``.
            weights_only: ``None`` or True: only plain data is read. False: the complete file is unpickled, which can
                run code. Write False only for files that you trust.
            **kwargs: arguments of ``__init__``, which override the file's hyperparameters. If the hyperparameters were
                saved as one object, a name that is no argument of ``__init__`` replaces an item of that object.

        Raises:
            CheckpointError: the file cannot be read, or its weights do not fit.
            ConfigurationError: this method was called on an instance, the file of hyperparameters cannot be read, a
                required argument of ``__init__`` is missing, or the checkpoint contains only a description of this
                argument.
        """
        is_module = issubclass(cls, nn.Module)
        location = "cpu" if map_location is None else map_location
        source = name_of(checkpoint_path)
        prefix = "" if is_module else "datamodule_"
        with naming(source):
            checkpoint = _read(checkpoint_path, location, is_module, weights_only)
            saved, name = _hparams_in(checkpoint, prefix)
        if hparams_file is not None:
            saved.update(_read_hparams(hparams_file))
        kept: dict[str, Any] | None = None
        if "_instantiator" in saved and not is_config(saved):  # saved by a run of LightningCLI
            kept = {**saved, **kwargs}
            with naming(source):
                cls, saved = class_and_arguments(cls, saved, kwargs)
        arguments = _arguments(cls, saved, name, kwargs)
        with nullcontext() if kept is None else described_hyperparameters(cls, kept):
            loaded: Any = _build(cls, arguments, set(arguments) - set(kwargs), source)
        if is_module:
            cure = _cure_of_misfit(cls, arguments, saved)
            _restore_module(loaded, checkpoint, strict, map_location is not None, source, cure)
        elif (state := checkpoint.get(cls.__qualname__)) is not None:
            with naming(source), restoring(f"the datamodule {cls.__name__}"):
                loaded.load_state_dict(state)
        return loaded


@supplied
def class_and_arguments(cls: type, saved: dict[str, Any], given: Collection[str]) -> tuple[type, dict[str, Any]]:
    """From hyperparameters that LightningCLI has saved, return the class to construct and the constructor's arguments.

    Args:
        cls: the class whose ``load_from_checkpoint`` was called.
        saved: the hyperparameters.
        given: the names of arguments that the caller passes.

    Raises:
        CheckpointError: the hyperparameters name a class that is not allowed, or do not fit the class.
    """
    return cls, saved


def raw_hparams(obj: Any, prefix: str = "") -> dict[str, Any]:
    """Return a checkpoint's entries for the hyperparameters of ``obj``, not yet encoded; {} if there are none.

    Args:
        obj: a module or a data module.
        prefix: the prefix of all keys: "" for a module, "datamodule_" for a data module.

    Returns:
        ``{"hparams_name": ..., "hyper_parameters": {...}}``. Hyperparameters that are modules are left out, because
        their weights are in the ``state_dict``. If the hyperparameters are an OmegaConf configuration, there is also an
        entry ``"hparams_type"``.
    """
    hparams: Any = obj.__dict__.get("_hparams", {})
    if is_config(hparams):
        name, values = obj._hparams_name or "kwargs", configs.as_plain(hparams, resolve=False)
        kept = {"hparams_name": name, "hyper_parameters": values, "hparams_type": _CONFIG}
        return {f"{prefix}{key}": value for key, value in kept.items()}
    keeps_modules = parity.current().pickle
    values = {key: value for key, value in hparams.items() if keeps_modules or not isinstance(value, nn.Module)}
    if not values:
        return {}
    return {f"{prefix}hparams_name": obj._hparams_name or "kwargs", f"{prefix}hyper_parameters": values}


def encode_hparams(obj: Any, values: Any) -> Any:
    """Return the hyperparameters of ``obj`` as plain data, which can be loaded without running code.

    Values that are not plain data are replaced by descriptions. One warning names all replaced values. Later calls do
    not warn about these values again.
    """
    noted: list[str] = []
    encoded = plain.encode(values, "", describe=True, noted=noted)
    known: list[str] = obj.__dict__.get("_described_hparams", [])
    if fresh := [place for place in noted if place not in known]:
        obj.__dict__["_described_hparams"] = [*known, *fresh]
        rank_zero_warn(
            f"Checkpoints keep only a description of these hyperparameters of {type(obj).__name__}: "
            f"{', '.join(fresh)}. Pass them when you load one: "
            f"{type(obj).__name__}.load_from_checkpoint(path, {_name_at(fresh[0])}=...)."
        )
    return encoded


def decode_parts(checkpoint: Mapping[str, Any], quiet: Collection[str] = HYPERPARAMETERS) -> dict[str, Any]:
    """Return the checkpoint with its values decoded.

    Args:
        checkpoint: the checkpoint as the store (CheckpointIO) has read it.
        quiet: the keys of parts that the caller does not use. The function does not warn if these parts contain only
            the description of an object.

    Raises:
        CheckpointError: a value is damaged, or was stored by a newer version of drivetrain.
    """
    noted: list[str] = []
    decoded = {
        key: plain.decode(part, str(key), [] if key in quiet else noted, references=key not in PARTS_WITHOUT_REFERENCES)
        for key, part in checkpoint.items()
    }
    plain.warn_of_descriptions(noted)
    return decoded


def _name_at(place: str) -> str:
    """Return the name of the hyperparameter in a text such as "conf['root'][0] (module.Class)"."""
    return place.partition(" ")[0].partition("[")[0].partition(".")[0]


def _hparams_in(checkpoint: Mapping[str, Any], prefix: str) -> tuple[Any, str | None]:
    """Return a checkpoint's hyperparameters (a dictionary or an OmegaConf configuration), and its ``hparams_name``.

    Raises:
        CheckpointError: the hyperparameters are not a dictionary whose keys are strings.
    """
    with restoring(f"'{prefix}hyper_parameters'"):
        keys = [f"{prefix}hyper_parameters", *([] if prefix else ["hparams", "module_arguments"])]  # before 0.9
        found = next((checkpoint[key] for key in keys if key in checkpoint), None)
        saved = expect(found, (Mapping, None, {str: object})) or {}
    with restoring(f"'{prefix}hparams_name'"):
        name: str | None = expect(checkpoint.get(f"{prefix}hparams_name"), (str, None))
    if checkpoint.get(f"{prefix}hparams_type") == _CONFIG:
        return configs.restored((dict(saved), None, None)), name
    return dict(saved), name


def hyperparameters_in(path: str) -> Mapping[str, Any]:
    """From the checkpoint ``path``, return the module's hyperparameters that are plain data. If the hyperparameters
    were saved as the items of one object, return {}.
    """
    with naming(path):
        saved, name = _hparams_in(_read(path, "cpu", True, None), "")
    if name not in (None, "kwargs") or is_config(saved):
        return {}
    return {key: value for key, value in saved.items() if next(plain.descriptions(value), None) is None}


def _build(cls: type, arguments: dict[str, Any], from_file: Collection[str], source: str) -> Any:
    """Return an object of ``cls``.

    Raises:
        CheckpointError: ``__init__`` raised an exception, and at least one argument came from the checkpoint.
    """
    try:
        return cls(**arguments)
    except DrivetrainError:
        raise
    except Exception as error:
        if not from_file:
            raise
        given = ", ".join(f"{key}={shown(arguments[key])}" for key in sorted(from_file))
        raise CheckpointError(
            f"{source}: {cls.__name__}.__init__ raised {type(error).__name__}: {shown_error(error)}. It got "
            f"hyperparameters of the checkpoint, {given}. "
            f"Pass what is wrong: {cls.__name__}.load_from_checkpoint(path, {next(iter(from_file))}=...)."
        ) from error


def _read(path: str | Path | IO[bytes], location: Any, is_module: bool, weights_only: bool | None) -> dict[str, Any]:
    checkpoint: Any = TorchCheckpointIO().load_checkpoint(path, location, weights_only)
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(
            f"{name_of(path)} holds a {type(checkpoint).__name__} and no dictionary. Use a file that a Trainer wrote."
        )
    if is_module and "state_dict" not in checkpoint:
        # A plain state dict contains only tensors and the extra state of modules.
        if not all(isinstance(value, Tensor) or str(key).endswith("_extra_state") for key, value in checkpoint.items()):
            raise CheckpointError(
                f"{name_of(path)} has no 'state_dict', only {sorted(map(str, checkpoint))}. "
                "Use a file that a Trainer wrote."
            )
        return {"state_dict": checkpoint}
    decoded = decode_parts(checkpoint, quiet=_PARTS_OF_A_RUN)
    with restoring("the layout"):
        found: dict[str, Any] = in_our_layout(decoded)
    return found


def _cure_of_misfit(cls: type, arguments: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return the last sentence of the error for weights that do not fit. It names the hyperparameters with which
    ``cls`` was constructed.
    """
    parameters = list(_parameters_of(cls)[0])
    if not parameters:
        return "Call load_from_checkpoint on the class that was trained, and build the module as it was trained"
    example = f"{cls.__name__}.load_from_checkpoint(path, {parameters[0]}=...)"
    if saved:
        given = ", ".join(f"{name}={shown(value)}" for name, value in arguments.items())
        return (
            f"{cls.__name__} was built with the hyperparameters {given or 'of its defaults'}. If it was trained with "
            f"others, pass them: {example}. Build the module as it was trained"
        )
    return (
        f"The checkpoint holds no hyperparameters: call self.save_hyperparameters() in __init__ for the next time, and "
        f"pass them now: {example}. Build the module as it was trained"
    )


def _restore_module(
    module: Any, checkpoint: dict[str, Any], strict: bool | None, move: bool, source: str, cure: str
) -> None:
    name = type(module).__name__
    chosen = next((each for each in type(module).__mro__ if "strict_loading" in vars(each)), TrainableModule)
    sets = chosen is not TrainableModule or "strict_loading" in vars(module)
    sets = sets and module.strict_loading is not None  # with None, the argument ``strict`` decides
    if strict is not None and sets and strict != module.strict_loading:
        raise ConfigurationError(
            f"load_from_checkpoint(strict={strict!r}) contradicts {name}.strict_loading, which is "
            f"{module.strict_loading!r}. Leave strict out, or change strict_loading."
        )
    what = f"the weights of {name}"
    with naming(source), restoring(what):
        weights: Mapping[str, Any] = expect(checkpoint["state_dict"], Mapping)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    if move and (first := next((value for value in weights.values() if isinstance(value, Tensor)), None)) is not None:
        module.to(first.device)
    with naming(source), restoring(what):
        try:
            strict = is_strict(module) if strict is None else strict
            if "frozen_weights" in checkpoint:
                strict = frozen.check_base(module, checkpoint, strict)
            result = module.load_state_dict(checkpoint["state_dict"], strict=strict)
        except RuntimeError as error:
            raise CheckpointMismatchError(
                f"The checkpoint does not fit {type(module).__name__}: {error} "
                f"{cure}; for missing or unexpected names only, pass strict=False. [DT1032]"
            ) from error
    # an override of load_state_dict may return None
    missing, unexpected = result if isinstance(result, tuple) else ((), ())
    if missing and weights and len(unexpected) == len(weights):  # with strict=False
        rank_zero_warn(
            f"{source}: the module {type(module).__name__} has no parameter of any name in it (the first is "
            f"{next(iter(weights))!r}), so its weights are still those of __init__. Load it with the class that it was "
            "saved from, or rename the entries in on_load_checkpoint."
        )


def _arguments(cls: type, saved: Any, name: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for the constructor of ``cls``: the entries of ``saved`` and ``given`` that
    ``__init__`` accepts.

    Args:
        saved: the hyperparameters.
        name: the name of the argument whose items are the hyperparameters; "kwargs" if each is a separate argument.
        given: the caller's arguments, which take precedence.
    """
    parameters, takes_any = _parameters_of(cls)

    described: dict[str, Any] = {}
    if not is_config(saved):  # an OmegaConf configuration contains no descriptions
        described = {
            key: each for key, value in saved.items() if (each := next(plain.descriptions(value), None)) is not None
        }
        saved = {key: value for key, value in saved.items() if key not in described}
    lost = [key for key in described if key not in given]
    if name is not None and name != "kwargs" and name in parameters:
        changed = {key: value for key, value in given.items() if key not in parameters and not takes_any}
        whole: Any = AttributeDict()
        if is_config(saved):
            whole = configs.merged(saved, changed)
        else:
            whole.update(saved, **changed)
        arguments = {name: whole} if saved or changed else {}
        arguments.update({key: value for key, value in given.items() if key not in changed})
        lost = [] if name in given else lost
    else:
        arguments = {key: value for key, value in {**saved, **given}.items() if takes_any or key in parameters}
        lost = [key for key in lost if takes_any or key in parameters]
        for key in given:
            if key not in arguments:
                rank_zero_warn(
                    f"{cls.__name__}.load_from_checkpoint got {key}=..., which {cls.__name__}.__init__ does not take, "
                    f"so it is left out. {did_you_mean(key, parameters)}"
                )
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in arguments:
            why = "neither the checkpoint nor the caller gives it"
            if key in described:
                why = f"the caller does not give it and the checkpoint has only {described[key]!r}"
            raise WrongTypeError(
                f"{cls.__name__}.__init__ needs {key!r}, and {why}. "
                f"Write {cls.__name__}.load_from_checkpoint(path, {key}=...), and self.save_hyperparameters() in "
                "__init__ for the next time. [DT1039]"
            )
    if lost:
        rank_zero_warn(
            f"{cls.__name__} is built without these hyperparameters, of which the checkpoint has only descriptions: "
            f"{', '.join(f'{key} {described[key]!r}' for key in lost)}. Import the module that defines a class or a "
            f"function before, or pass them: {cls.__name__}.load_from_checkpoint(path, {lost[0]}=...)."
        )
    return arguments


def _parameters_of(cls: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters of ``__init__`` by name, and whether ``__init__`` of a user's class has ``**kwargs``."""
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    found = dict(list(inspect.signature(owner.__init__).parameters.items())[1:])  # type: ignore[misc]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    # In classes of this package, *args and **kwargs are no hyperparameters, but are passed to the next class in the
    # MRO.
    takes_any = not owner.__module__.startswith("drivetrain.") and any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found.values()
    )
    return {name: parameter for name, parameter in found.items() if parameter.kind not in variadic}, takes_any


def _read_hparams(file: str | Path) -> dict[str, Any]:
    """Return the hyperparameters in a ``.yaml`` or ``.csv`` file."""
    if files.is_remote(file):
        try:
            with remote.fetched(file) as local:
                return _read_hparams(local)
        except OSError as error:
            raise ConfigurationError(f"hparams_file={str(file)!r} could not be read: {error}.") from error
    path = Path(files.spelled(file))
    if not path.is_file():
        raise ConfigurationError(f"There is no file {path} for hparams_file. Check the path.")
    if path.suffix.lower() in (".yaml", ".yml"):
        return _read_yaml(path)
    if path.suffix.lower() == ".csv":
        with open(path, newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.reader(stream) if row]
        if any(len(row) != 2 for row in rows):
            raise ConfigurationError(
                f"hparams_file={str(path)!r} has a row that is not a key and a value. Write one pair in each row."
            )
        return {key: literal(value) for key, value in rows if (key, value) != ("key", "value")}  # except the header
    raise ConfigurationError(f"hparams_file={str(path)!r} is of an unknown kind. Pass a .yaml or a .csv file.")


def _read_yaml(path: Path) -> dict[str, Any]:
    check_installed(f"hparams_file={str(path)!r}", "yaml", install="pyyaml")
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"hparams_file={str(path)!r} is no YAML of plain data: {error}. Write numbers, texts, lists and mappings."
        ) from error
    if not isinstance(loaded or {}, dict):
        raise ConfigurationError(f"hparams_file={str(path)!r} holds a {type(loaded).__name__}. Write a mapping.")
    return loaded or {}


def literal(val: str) -> Any:
    """Return the number, bool or other Python literal in ``val``. Return any other text unchanged."""
    try:
        return ast.literal_eval(val)
    except (ValueError, SyntaxError):
        return val
