"""``Trainer(compile=...)``: forms, numbers, checkpoints, recompiles, and what it refuses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule
from drivetrain.base.compiled import context_of
from drivetrain.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recording:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).tanh()


class Net(LightningModule):
    """Six equal blocks; its steps log and read counters that change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss * 0 if self.global_step > 900 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class MadeLate(Net):
    """Its blocks are made in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            torch.manual_seed(2)
            self.blocks = nn.Sequential(*(Block() for _ in range(6)))


@pytest.fixture
def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), torch.randn(1, generator=generator)) for _ in range(24)]
    return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


@pytest.fixture
def make_trainer(make_trainer: Any) -> Any:
    return lambda **arguments: make_trainer(**{"limit_val_batches": 0, **arguments})


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


FORMS = {
    "whole": {},
    "blocks": {"blocks": True},
    "class": {"blocks": Block},
    "names": {"blocks": ["Block", "Linear"]},
}


@pytest.mark.parametrize(
    ("form", "arguments"),
    [
        *((form, {}) for form in FORMS),
        ("whole", {"accumulate_grad_batches": 2}),
        ("blocks", {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
    ],
    ids=[*FORMS, "whole-accumulated", "blocks-16"],
)
def test_weights_and_logs_are_those_of_the_uncompiled_model(
    form: str, arguments: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    plain, module, backend = Net(), Net(), Recording()
    expected = make_trainer(max_epochs=3, limit_val_batches=1.0, **arguments)
    expected.fit(plain, loader, loader)
    trainer = make_trainer(
        max_epochs=3, limit_val_batches=1.0, compile={**FORMS[form], "backend": backend}, **arguments
    )
    trainer.fit(module, loader, loader)
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-5, atol=1e-6)
    assert trainer.callback_metrics.keys() == expected.callback_metrics.keys()
    assert list(module.state_dict()) == list(plain.state_dict())
    graphs = backend.graphs
    assert 1 <= graphs <= 16  # and not again in every step, nor for each of the equal blocks
    assert trainer.test(module, loader, verbose=False)[0].keys() == {"val_loss"}
    trainer.validate(module, loader, verbose=False)
    assert backend.graphs <= graphs + 6  # a test follows without compiling blocks again


def test_equal_blocks_are_compiled_once(loader: DataLoader[Any], make_trainer: Any, caplog: Any) -> None:
    module, backend = Net(), Recording()
    with caplog.at_level("INFO"):
        make_trainer(max_epochs=3, compile={"blocks": True, "backend": backend}).fit(module, loader)
    assert backend.graphs == 1
    assert "6 x Block (blocks.0 ... blocks.5) run compiled" in caplog.text
    assert all(context_of(block) is not None for block in module.blocks)
    assert context_of(module) is None
    assert context_of(module.head) is None


def test_another_fit_of_the_same_model_compiles_nothing_again(loader: DataLoader[Any], make_trainer: Any) -> None:
    module, backend = Net(), Recording()
    for _ in range(3):
        make_trainer(compile={"blocks": "Block", "backend": backend}).fit(module, loader)
    assert backend.graphs == 1


def test_true_and_blocks_need_no_dictionary(loader: DataLoader[Any], make_trainer: Any, monkeypatch: Any) -> None:
    """With torch's own default backend: the calls are counted, as compiling takes seconds."""
    asked: list[Any] = []
    real = torch.compile

    @functools.wraps(real)
    def counted(model: Any, **given: Any) -> Any:
        asked.append(given)
        return real(model, backend="eager")

    monkeypatch.setattr(torch, "compile", counted)
    for form in (True, "blocks", Block, ["Block"], {"mode": "default"}):
        make_trainer(compile=form).fit(Net(), loader)
    assert asked == [{}, {}, {}, {}, {"mode": "default"}]


def test_layers_made_in_configure_model_are_compiled(loader: DataLoader[Any], make_trainer: Any) -> None:
    module, backend = MadeLate(), Recording()
    make_trainer(compile={"blocks": True, "backend": backend}).fit(module, loader)
    assert backend.graphs == 1
    assert context_of(module.blocks[0]) is not None


@pytest.mark.parametrize("form", ["whole", "blocks"])
@pytest.mark.parametrize("saves", [True, False], ids=["compiled_saves", "compiled_loads"])
def test_checkpoints_are_exchanged_with_the_uncompiled(
    form: str, saves: bool, loader: DataLoader[Any], make_trainer: Any, tmp_path: Any
) -> None:
    compiles = {"compile": {**FORMS[form], "backend": "eager"}}
    first, second = (compiles, {}) if saves else ({}, compiles)
    trainer = make_trainer(max_epochs=2, **first)
    trainer.fit(Net(), loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt")["state_dict"]
    assert list(state) == list(Net().state_dict())
    resumed, expected = Net(), Net()
    make_trainer(max_epochs=4, **second).fit(resumed, loader, ckpt_path=tmp_path / "a.ckpt")
    make_trainer(max_epochs=4).fit(expected, loader)
    torch.testing.assert_close(weights(resumed), weights(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(weights(Net.load_from_checkpoint(tmp_path / "a.ckpt")), weights(trainer.lightning_module))


def test_another_form_replaces_what_an_earlier_trainer_compiled(loader: DataLoader[Any], make_trainer: Any) -> None:
    module = Net()
    make_trainer(compile={"backend": "eager"}).fit(module, loader)
    assert context_of(module) is not None
    make_trainer(compile={"backend": "eager", "blocks": True}).fit(module, loader)
    assert context_of(module) is None
    assert context_of(module.blocks[0]) is not None


def test_a_copy_runs_its_own_layers(loader: DataLoader[Any], make_trainer: Any) -> None:
    module = Net()
    make_trainer(compile={"backend": "eager", "blocks": True}).fit(module, loader)
    twin, x = copy.deepcopy(module), torch.ones(1, 4)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), torch.zeros(1, 1))
    assert not torch.equal(module(x), twin(x))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "names no layers.*Write compile=True for the whole model"),
        ([], "compile is True, layers or arguments"),
        (0, "compile is True, layers or arguments"),
        ("max-autotune", r'is a mode of torch.compile.*Write compile=\{"mode": "max-autotune"\}'),
        ("inductor", r'is a backend of torch.compile.*Write compile=\{"backend": "inductor"\}'),
        ("not a name", "cannot be the name of a class"),
        ([Block, 3], "holds an int: 3, which is no class of layers"),
        (int, "which is no class of layers"),
        ({"moed": "default"}, "compile takes no 'moed'. Did you mean 'mode'"),
        ({"backend": "indutcor"}, "has no backend 'indutcor'. Did you mean 'inductor'"),
        ({"mode": "fast"}, "has no mode 'fast'. Known: .*max-autotune"),
        ({"fullgraph": 1}, "fullgraph is True or False"),
        ({"dynamic": "yes"}, "dynamic is True, False or None"),
        ({"options": 3}, "options is a dictionary"),
        ({"mode": "default", "options": {"a": 1}}, "a mode or options, not both"),
        ({"blocks": 7}, "names no layers"),
        ({"disable": True}, "Leave compile out"),
    ],
)
def test_other_forms_are_refused_by_the_constructor(value: Any, message: str, make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(compile=value)


def test_a_class_that_the_model_does_not_have_is_named(loader: DataLoader[Any], make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match="compile matches no layer of Net: Blok.*Did you mean 'Block'"):
        make_trainer(compile={"blocks": "Blok", "backend": "eager"}).fit(Net(), loader)


def test_a_model_without_repeated_layers_is_named(loader: DataLoader[Any], make_trainer: Any) -> None:
    class Single(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.head = nn.Identity()
            self.blocks = nn.Linear(4, 1)

    with pytest.raises(ConfigurationError, match="Single has no repeated layers. Name the classes"):
        make_trainer(compile={"blocks": True, "backend": "eager"}).fit(Single(), loader)


def test_a_model_that_the_user_compiled_is_not_compiled_twice(loader: DataLoader[Any], make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match="Leave one of them out"):
        make_trainer(compile={"backend": "eager"}).fit(torch.compile(Net(), backend="eager"), loader)


def test_without_a_compiler_the_error_names_it_before_training(
    loader: DataLoader[Any], make_trainer: Any, monkeypatch: Any
) -> None:
    from torch._inductor import config, cpp_builder

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="needs a C\\+\\+ compiler.*no-such-compiler.*aot_eager"):
            make_trainer(compile=True).fit(Net(), loader)
        make_trainer(compile={"backend": "eager"}).fit(Net(), loader)  # the control: this one needs none
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


def test_strategies_that_cannot_compile_say_why(loader: DataLoader[Any], make_trainer: Any) -> None:
    from drivetrain.strategies import PipelineStrategy

    trainer = make_trainer(strategy=PipelineStrategy(), compile={"backend": "eager"})
    with pytest.raises(ConfigurationError, match="does not work with PipelineStrategy: It runs the stages"):
        trainer.fit(Net(), loader)


def test_without_compile_nothing_is_compiled(loader: DataLoader[Any], make_trainer: Any) -> None:
    """Negative control."""
    module = Net()
    make_trainer(compile=False).fit(module, loader)
    assert all(each._compiled_call_impl is None for each in module.modules())
