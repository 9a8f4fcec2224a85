"""Plans of tensor parallelism: find the layers that a plan names, and split these layers over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from drivetrain.base.packages import dtensor, tensor_parallel
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.torch_private import own_parameters
from drivetrain.errors import ConfigurationError, described, did_you_mean, number_of


def declared_plan(root: nn.Module) -> dict[str, Any]:
    """Return the plan that a model and its submodules declare. The names in the plan are relative to ``root``.

    A model declares its plan as ``tp_plan``. Models of Hugging Face have ``_tp_plan`` and
    ``config.base_model_tp_plan``.
    """
    found: dict[str, Any] = {}
    for path, module in root.named_modules():
        plans = [getattr(module, "tp_plan", None), getattr(module, "_tp_plan", None)]
        base = getattr(module, "base_model_prefix", None)
        if isinstance(base, str) and not hasattr(module, base):  # the module itself is the base model
            plans.append(getattr(getattr(module, "config", None), "base_model_tp_plan", None))
        for plan in plans:
            for pattern, style in plan.items() if isinstance(plan, Mapping) else ():
                found.setdefault(f"{path}.{pattern}" if path else pattern, style)
    return found


def split(root: nn.Module, mesh: Any, plan: Mapping[str, Any]) -> str:
    """Split the layers of ``root`` over ``mesh``. Return a description such as "4 layers colwise (blocks.*.first)".

    Raises:
        ConfigurationError: the plan names no layer of ``root``, an unknown style, or a layer that torch cannot split;
            or the plan splits tied parameters differently.
    """
    layers, done, without = dict(root.named_modules()), [], []
    tied = _tied(root)
    frozen = [name for name, each in root.named_parameters(remove_duplicate=False) if not each.requires_grad]
    for pattern, given in plan.items():
        names = [name for name in layers if _matches(name, pattern)]
        if not names:
            without.append(pattern)
        for name in names:
            style = _style(given, pattern)
            _check_width(layers[name], name, style, mesh.size())
            try:
                tensor_parallel.parallelize_module(layers[name], mesh, style)
            except NotImplementedError as error:
                raise ConfigurationError(
                    f"The tp_plan splits {name} ({type(layers[name]).__name__}) {given!r}, and torch cannot: {error} "
                    "Leave the layer out of the plan, or give it a ParallelStyle of your own."
                ) from error
        if names:
            style_name = given if isinstance(given, str) else type(given).__name__
            done.append(f"{number_of(len(names), 'layer')} {style_name} ({pattern})")
    for pattern in without:
        known = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in layers if name}
        text = f"The tp_plan names {pattern!r}, and {type(root).__name__} has no such layer."
        if not done:
            raise ConfigurationError(f"{text} {did_you_mean(pattern, known)}")
        rank_zero_warn(f"{text} The other names were used. Leave it out of the plan.")
    _tie_again(tied)
    for name in frozen:  # torch 2.9 makes all new parameters trainable
        root.get_parameter(name).requires_grad_(False)
    return ", ".join(done)


def _check_width(layer: nn.Module, name: str, style: Any, ranks: int) -> None:
    """Check that all ranks get equal parts of a layer whose inputs are split.

    Raises:
        ConfigurationError: the parts differ in size, but torch assumes equal parts.
    """
    takes_parts = isinstance(style, tensor_parallel.RowwiseParallel) and all(
        each.is_shard() for each in style.input_layouts
    )
    if takes_parts and isinstance(layer, nn.Linear) and layer.in_features % ranks:
        raise ConfigurationError(
            f'The tp_plan splits {name} "rowwise", and {ranks} processes do not divide its {layer.in_features} inputs. '
            f'Make that number a multiple of {ranks}, or write "rowwise_rep", and "colwise_rep" for the layer whose '
            "outputs it gets."
        )


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _style(given: Any, pattern: str) -> Any:
    if isinstance(given, tensor_parallel.ParallelStyle):
        return given
    colwise, rowwise = tensor_parallel.ColwiseParallel, tensor_parallel.RowwiseParallel
    sequence, whole = tensor_parallel.SequenceParallel, dtensor.Replicate()
    known: dict[str, Any] = {
        "colwise": colwise(),
        "rowwise": rowwise(),
        "colwise_rep": colwise(output_layouts=whole),
        "colwise_gather_output": colwise(output_layouts=whole),
        "rowwise_rep": rowwise(input_layouts=whole),
        "rowwise_split_input": rowwise(input_layouts=whole),
        "embedding_rowwise": rowwise(input_layouts=whole),
        "sequence_parallel": sequence(),
        # a norm within each attention head; each rank has its own heads
        "replicated_with_grad_allreduce": sequence(sequence_dim=-2, use_local_output=True),
    }
    if not isinstance(given, str) or given not in known:
        shown = repr(given) if isinstance(given, str) else described(given)
        raise ConfigurationError(
            f"The tp_plan gives {pattern!r} the style {shown}, which is unknown. {did_you_mean(str(given), known)} A "
            "ParallelStyle of torch.distributed.tensor.parallel works, too."
        )
    return known[given]


def _tied(root: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the parameters that several layers share. Each parameter is a list of ``(path, layer, name)``, with one
    entry for each of these layers.
    """
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in root.named_modules():
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((f"{path}.{name}" if path else name, module, name))
    return [each for each in owners.values() if len(each) > 1]


def _tie_again(tied: list[list[tuple[str, nn.Module, str]]]) -> None:
    """Tie parameters again. The split has given each layer its own copy of a tied parameter.

    Raises:
        ConfigurationError: the plan splits tied parameters differently.
    """
    for owners in tied:
        (first, module, name), *others = owners
        parameter = own_parameters(module)[name]
        for other, its_module, its_name in others:
            its = own_parameters(its_module)[its_name]
            if getattr(its, "placements", None) != getattr(parameter, "placements", None):
                raise ConfigurationError(
                    f"{first} and {other} are one parameter, and the tp_plan splits them differently. Split both along "
                    'the same dimension: an embedding "embedding_rowwise" goes with a linear layer "colwise".'
                )
            own_parameters(its_module)[its_name] = parameter
