"""The checks for precisions."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.callback import Callback
from drivetrain.engine.engine import Engine
from drivetrain.precision.precision import Precision
from drivetrain.testing._regression import QUIET, Saves, Small, data, plain_loop, whole
from drivetrain.testing.checks import Part, Skipped, is_true, same
from drivetrain.trainer.trainer import Trainer

SETTINGS = ("accelerator", "tolerance")

_BATCHES, _TOLERANCE, _OF_16_BITS = 4, 1e-4, 0.05


class Descends(Small):
    """A module that SGD trains. Gradients of the wrong size would change SGD's steps, but not AdamW's steps."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def try_it(part: Part) -> None:
    """Check that a precision can be created."""
    part.make()


def _trainer(part: Part, precision: Any, epochs: int = 2, **arguments: Any) -> Trainer:
    return Trainer(
        plugins=[precision], accelerator=part.settings.get("accelerator", "cpu"), devices=1, max_epochs=epochs,
        default_root_dir=part.folder, **QUIET, **arguments,
    )  # fmt: skip


def _loader(batches: int = _BATCHES) -> DataLoader[Any]:
    return DataLoader(data(batches), batch_size=8)


def _fit(
    part: Part, precision: Any, epochs: int = 2, batches: int = _BATCHES, ckpt_path: Any = None, **arguments: Any
) -> tuple[Descends, Trainer]:
    module, trainer = Descends(), _trainer(part, precision, epochs, **arguments)
    trainer.fit(module, _loader(batches), ckpt_path=ckpt_path)
    return module, trainer


def _tolerance(part: Part, precision: Any) -> float:
    exact = {type(precision).computes_in, precision.computes_in} <= {None, torch.float32, torch.float64}
    return float(part.settings.get("tolerance", _TOLERANCE if exact and "16" not in precision.name else _OF_16_BITS))


def _near(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    found, expected = found.double().cpu(), expected.double()
    difference, size = float((found - expected).norm()), float(expected.norm())
    is_true(difference <= tolerance * (size + 1e-2), f"{what} differ by {difference:.3g}, and their norm is {size:.3g}")


def _compare(part: Part, module: Descends, expected: dict[str, Any], precision: Any) -> None:
    tolerance = _tolerance(part, precision)
    same(len(module.gradients), expected["steps"], "optimizer steps")
    for step, (found, right) in enumerate(zip(module.gradients, expected["gradients"], strict=True)):
        for name, gradient in right.items():
            _near(found[name], gradient, tolerance * 2, f"gradients of {name} before step {step}")
    for name, value in whole(dict(module.named_parameters())).items():
        _near(value, expected["weights"][name], tolerance, f"weights of {name} after the fit")


def _plain(**arguments: Any) -> dict[str, Any]:
    return plain_loop(lambda kind: Descends(kind).double(), batches_per_epoch=_BATCHES, **arguments)


def it_declares_itself(part: Part) -> None:
    """name is a str, computes_in is a dtype or None, scales_loss and packs_weights are bools. An unpickled copy has the
    same values.
    """
    precision = part.make()
    is_true(isinstance(precision.name, str) and precision.name, f"name is {precision.name!r}")
    is_true(isinstance(precision.computes_in, (torch.dtype, type(None))), f"computes_in is {precision.computes_in!r}")
    for name in ("scales_loss", "packs_weights"):
        same(type(getattr(precision, name)), bool, f"type of {name}")
    twin = pickle.loads(pickle.dumps(precision))
    same((twin.name, twin.computes_in), (precision.name, precision.computes_in), "name and computes_in of the copy")


def it_trains_near_64_bits(part: Part) -> None:
    """The gradients that hooks see and the trained weights equal those of a plain loop in 64 bits, within the
    tolerance.
    """
    precision = part.make()
    module, trainer = _fit(part, precision)
    _compare(part, module, _plain(), precision)
    same(trainer.global_step, 2 * _BATCHES, "global_step")
    _near(torch.stack(module.losses), _plain()["losses"], _tolerance(part, precision), "losses")


def it_accumulates(part: Part) -> None:
    """With accumulate_grad_batches, the gradient of an optimizer step is the mean of the batches' gradients."""
    precision = part.make()
    module, _ = _fit(part, precision, accumulate_grad_batches=2)
    _compare(part, module, _plain(accumulate=2), precision)


def it_clips_unscaled_gradients(part: Part) -> None:
    """Clipping by norm and by value works as in a plain loop in 64 bits, although the loss may be scaled."""
    for algorithm, limit in (("norm", 0.05), ("value", 0.01)):
        precision = part.make()
        module, _ = _fit(part, precision, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
        _compare(part, module, _plain(clip=(algorithm, limit)), precision)


def it_evaluates_near_64_bits(part: Part) -> None:
    """The validation loss and the predictions are those of the trained weights, within the tolerance."""
    precision = part.make()
    module, trainer = _fit(part, precision)
    found = torch.tensor(trainer.validate(module, _loader(), verbose=False)[0]["loss"])
    predictions = torch.cat([each.detach() for each in trainer.predict(module, _loader()) or []])
    plain = Descends().double()
    plain.load_state_dict({name: each.double().cpu() for name, each in module.state_dict().items()})
    x, y, _ = (each.double() for each in data(_BATCHES).tensors)
    with torch.no_grad():
        _near(found, F.mse_loss(plain(x), y), _tolerance(part, precision), "validation losses")
        _near(predictions, plain(x), _tolerance(part, precision), "predictions")


def it_converts_only_floats(part: Part) -> None:
    """convert_input does not change integers, bools, texts and the structure of a batch. It only rounds floats."""
    precision = part.make()
    integers = torch.tensor([2**40 + 1, 3])
    batch: Any = {"x": torch.linspace(0, 1, 5), "labels": [integers, torch.tensor([True])], "text": "a", "n": 3}
    found = precision.convert_input(copy.copy(batch))
    same(list(found), list(batch), "keys of the batch")
    same((found["text"], found["n"]), ("a", 3), "text and number in the batch")
    for one, other in zip(found["labels"], batch["labels"], strict=True):
        same((one.dtype, one.tolist()), (other.dtype, other.tolist()), "labels")
    _near(found["x"], torch.linspace(0, 1, 5), _OF_16_BITS, "floats in the batch")


def a_module_keeps_its_parameters(part: Part) -> None:
    """convert_module does not change names, shapes, requires_grad, tied weights and integer buffers."""
    precision = part.make()
    if precision.packs_weights:
        raise Skipped("packs_weights is True")
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    module[2].weight = module[0].weight
    module[0].bias.requires_grad_(False)

    def described(module: nn.Module) -> dict[str, Any]:
        return {name: (each.shape, each.requires_grad) for name, each in module.named_parameters()}

    before = described(module)
    found = precision.convert_module(module)
    same(described(found), before, "names, shapes and requires_grad of parameters")
    is_true(found[2].weight is found[0].weight, "tied weights are two parameters")
    same(found[1].num_batches_tracked.dtype, torch.int64, "dtype of a buffer of integers")


def its_contexts_leave_nothing(part: Part) -> None:
    """Each context of the precision restores torch's default dtype and autocast at its end, even after an exception."""
    precision, before = part.make(), _state()
    names = ("forward_context", "tensor_init_context", "module_init_context", "train_step_context", "val_step_context")
    for name in (*names, "test_step_context", "predict_step_context"):
        for fails in (False, True):
            context = getattr(precision, name)()
            try:
                if context is not None:
                    with context:
                        torch.ones(2) @ torch.ones(2)
                        if fails:
                            raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            same(_state(), before, f"default dtype and autocast after {name}()")


def _state() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()


def it_leaves_torch_as_it_was(part: Part) -> None:
    """A fit does not change torch's default dtype and autocast, even if it ends with an exception."""
    before, precision = _state(), part.make()
    _fit(part, precision, epochs=1)
    same(_state(), before, "default dtype and autocast after a fit")
    with contextlib.suppress(ZeroDivisionError):
        _trainer(part, precision).fit(Descends("failing"), _loader())
    same(_state(), before, "default dtype and autocast after a fit that has failed")


def a_second_run_has_the_same_numbers(part: Part) -> None:
    """A precision object that another Trainer has used gives the same weights as a new object."""
    precision = part.make()
    first, _ = _fit(part, precision)
    second, _ = _fit(part, precision)
    _equal(second, first, "the second fit")


def it_resumes_exactly(part: Part) -> None:
    """A fit that resumes from a checkpoint ends with the weights of an uninterrupted fit, bit for bit, and with the
    same state_dict of the precision.
    """
    file, kept = part.folder / "half.ckpt", (_KeepsState(), _KeepsState())
    uninterrupted, _ = _fit(part, part.make(), callbacks=[Saves(file, _BATCHES), kept[0]])
    resumed, _ = _fit(part, part.make(), ckpt_path=file, callbacks=[kept[1]])
    _equal(resumed, uninterrupted, "the resumed fit")
    torch.testing.assert_close(kept[1].state, kept[0].state, rtol=0, atol=0, msg=lambda text: f"state_dict: {text}")


class _KeepsState(Callback):
    """A callback that copies the state of the precision at the end of a fit."""

    state: Any = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        self.state = copy.deepcopy(strategy.precision_plugin.state_dict(trainer.lightning_module, strategy.optimizers))


def _equal(found: nn.Module, expected: nn.Module, what: str) -> None:
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        is_true(torch.equal(one, other), f"{what} has other weights of {name}")


def a_loop_of_ones_own_trains_with_it(part: Part) -> None:
    """In a loop that uses an Engine, the weights equal those of a plain loop in 64 bits, within the tolerance."""
    for limit in (0.05, None):  # also without clipping, because clipping would hide that a gradient is still scaled
        precision: Precision = part.make()
        engine = Engine(plugins=[precision], accelerator=part.settings.get("accelerator", "cpu"), devices=1)
        module = Descends()
        model, optimizer = engine.setup(module, module.configure_optimizers())
        for _ in range(2):
            for x, y, _ in engine.setup_dataloaders(_loader()):
                output = model(x)
                engine.backward(F.mse_loss(output, y.to(output.dtype)))
                if limit is not None:
                    engine.clip_gradients(model, optimizer, max_norm=limit)
                optimizer.step()
                optimizer.zero_grad()
        expected = _plain(clip=limit and ("norm", limit))["weights"]
        for name, value in whole(dict(module.named_parameters())).items():
            what = f"weights of {name} after clipping" if limit else f"weights of {name}"
            _near(value, expected[name], _tolerance(part, precision), what)
