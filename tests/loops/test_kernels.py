"""Kernels of optimizers: chosen where they are faster, with the same numbers unless others were asked for."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from drivetrain import LightningModule, Trainer
from drivetrain.loops import direct, kernels

ADAM = sys.modules[optim.Adam.__module__]
MANY = 16


def parameters(count: int = MANY, size: int = 5, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=dtype)) for _ in range(count)]


def sharing_memory() -> list[nn.Parameter]:
    found = parameters()
    return [*found, nn.Parameter(found[0].data)]


def names(optimizer: Any, wanted: Any = "equal") -> list[str]:
    return [each.name for each in kernels.choose(optimizer, wanted)]


# ---- which -----------------------------------------------------------------------------------------------------------


def test_many_small_parameters_are_stepped_together() -> None:
    assert names(optim.Adam(parameters())) == ["foreach"]


def test_each_group_has_its_own_kernel() -> None:
    groups = [{"params": parameters(20)}, {"params": parameters(2)}, {"params": parameters(30)}]
    found = kernels.choose(optim.SGD(groups, lr=0.1), "equal")
    assert [each.size for each in found] == [20, 30]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.Adam(parameters(3)),
        lambda: optim.Adam(parameters(MANY, 20_000)),
        lambda: optim.Adam(parameters(dtype=torch.bfloat16)),
        lambda: optim.Adam(parameters(), foreach=False),
        lambda: optim.Adam(parameters(), fused=True),
        lambda: optim.Adam(parameters(), fused=False),
        lambda: optim.Adam(parameters(), lr=torch.tensor(0.1)),
        lambda: optim.Adam([*parameters(), nn.Buffer(torch.ones(3)).requires_grad_()]),
        lambda: optim.Adam(sharing_memory()),
        lambda: optim.Adagrad(parameters()),
        lambda: optim.NAdam(parameters()),
        lambda: optim.Adafactor(parameters()),
    ],
    ids=[
        "few", "large", "16 bits", "a loop", "fused", "not fused", "tensor lr", "a buffer", "shared", "Adagrad",
        "NAdam", "Adafactor",
    ],
)  # fmt: skip
def test_torchs_choice_stays_where_another_is_slower_or_rounds_or_the_user_has_chosen(make: Any) -> None:
    assert names(make()) == []


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: optim.Adam(parameters(2)), ["fused"]),
        (lambda: optim.AdamW(parameters(2, 50_000)), ["fused"]),
        (lambda: optim.Adagrad(parameters(2)), ["fused"]),
        (lambda: optim.SGD(parameters(2), momentum=0.9), ["fused"]),
        (lambda: optim.SGD(parameters(2)), []),
        (lambda: optim.SGD(parameters()), ["foreach"]),
        (lambda: optim.NAdam(parameters()), ["foreach"]),
        (lambda: optim.NAdam(parameters(2)), []),
        (lambda: optim.SGD(parameters(dtype=torch.bfloat16), momentum=0.9), []),
        (lambda: optim.Adam(parameters(), foreach=False), []),
    ],
    ids=["Adam", "large", "Adagrad", "momentum", "SGD", "many SGD", "many NAdam", "NAdam", "16 bits", "a loop"],
)
def test_the_fastest_kernels_may_round(make: Any, expected: list[str]) -> None:
    assert names(make(), "fastest") == expected


def test_none_is_chosen_on_request() -> None:
    assert names(optim.Adam(parameters()), None) == []


def test_a_toy_that_differs_leaves_torchs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_agree", {})
    train = kernels._train_toy

    def wrong(kind: Any, dtype: Any, options: Any) -> Tensor:
        return train(kind, dtype, options) + (1e-7 if options["foreach"] else 0)

    monkeypatch.setattr(kernels, "_train_toy", wrong)
    assert names(optim.Adam(parameters())) == []


def test_a_toy_that_fails_leaves_torchs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_agree", {})

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ADAM, "_multi_tensor_adam", failing)
    assert names(optim.Adam(parameters())) == []


# ---- the same numbers ------------------------------------------------------------------------------------------------


def options_of(kind: type[optim.Optimizer], draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": draw.choice([0.1, 1e-3]), "maximize": draw.random() < 0.3}
    if kind is not optim.Rprop:
        options["weight_decay"] = draw.choice([0, 0.1])
    if kind is optim.SGD:
        options |= draw.choice([{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.3}])
    if kind in (optim.Adam, optim.AdamW):
        options |= {"amsgrad": draw.random() < 0.5, "betas": draw.choice([(0.9, 0.999), (0.0, 0.99)])}
    if kind is optim.RMSprop:
        options |= {"centered": draw.random() < 0.5, "momentum": draw.choice([0, 0.9])}
    return options


def stepped(kind: Any, seed: int, kernel: str | None) -> list[Tensor]:
    """Train random parameters with random gradients, some of which are missing; return parameters and state."""
    draw = random.Random(seed)
    options, dtype = options_of(kind, draw), draw.choice([torch.float32, torch.float64])
    generator = torch.Generator().manual_seed(seed)
    trained = [
        nn.Parameter(
            torch.randn([draw.randint(1, 9) for _ in range(draw.randint(0, 3))], generator=generator).to(dtype)
        )
        for _ in range(draw.randint(1, 20))
    ]
    optimizer, scale = kind(trained, **options), draw.choice([1.0, 1e-8, 1e3])
    for step in range(5):
        for number, each in enumerate(trained):
            gradient = torch.randn(each.shape, generator=generator).to(dtype) * scale
            each.grad = None if (step + number) % 4 == 0 else gradient
        optimizer.param_groups[0][kernel or "foreach"] = kernel is not None
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
    states = [optimizer.state[each] for each in trained]
    return trained + [each for state in states for _, each in sorted(state.items()) if isinstance(each, Tensor)]


def are_equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("name", kernels._EQUAL)
def test_foreach_computes_what_a_loop_does(name: str) -> None:
    kind = getattr(optim, name)
    assert [
        seed for seed in range(12) if not are_equal(stepped(kind, seed, None), stepped(kind, seed, "foreach"))
    ] == []


def test_a_kernel_that_rounds_is_seen() -> None:
    """The control."""
    assert not are_equal(stepped(optim.Adam, 1, None), stepped(optim.Adam, 1, "fused"))


# ---- in a fit --------------------------------------------------------------------------------------------------------


class ManyLayers(LightningModule):
    def __init__(self, kind: Any = optim.Adam, **options: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        self.make = lambda: kind(self.layers.parameters(), **options)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return self.make()


def fitted(module: ManyLayers, **arguments: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **arguments,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    trainer.fit(module, [torch.randn(6, 4, generator=generator) for _ in range(5)])
    return trainer


def kernels_of(trainer: Trainer) -> list[tuple[str, str]]:
    return [(each.choice, each.why) for each in trainer.plan.decisions if each.what == "kernels"]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that Adam was stepped with."""
    called: set[str] = set()
    for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        plain = getattr(ADAM, name)

        def noted(*args: Any, plain: Any = plain, name: str = name, **kwargs: Any) -> None:
            called.add(name)
            plain(*args, **kwargs)

        monkeypatch.setattr(ADAM, name, noted)
    direct._of_toy(optim.Adam)  # toys, before anything is noted
    for wanted in ("equal", "fastest"):
        kernels.choose(ManyLayers().make(), wanted)
    called.clear()
    return called


@pytest.mark.parametrize(
    ("wanted", "kernel"),
    [("equal", "_multi_tensor_adam"), ("fastest", "_fused_adam"), (None, "_single_tensor_adam")],
)
def test_the_kernel_steps_the_parameters(spy: set[str], wanted: Any, kernel: str) -> None:
    fitted(ManyLayers(), optimizer_kernels=wanted)
    assert spy == {kernel}


def test_a_fit_is_equal_bit_for_bit_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for wanted in ("equal", None):
        torch.manual_seed(1)
        module = ManyLayers(weight_decay=0.1)
        assert bool(kernels_of(fitted(module, optimizer_kernels=wanted))) is (wanted == "equal")
        state = module.optimizers().optimizer.state_dict()
        found.append((dict(module.state_dict()), state))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_the_plan_says_which_and_why() -> None:
    equal = [("foreach", "they are equal bit for bit and faster for 16 parameters on the host")]
    assert kernels_of(fitted(ManyLayers())) == equal
    fastest = [("fused", "they are faster for 16 parameters on the host")]
    assert kernels_of(fitted(ManyLayers(), optimizer_kernels="fastest")) == fastest
    assert kernels_of(fitted(ManyLayers(optim.Adafactor), optimizer_kernels="fastest")) == [
        ("torch's choice", "none is known to be faster for these parameters")
    ]


def test_the_plan_says_that_public_calls_have_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(direct.SWITCH, "0")
    assert kernels_of(fitted(ManyLayers(), optimizer_kernels="fastest")) == [
        ("torch's choice", "a step makes public calls")
    ]
    assert kernels_of(fitted(ManyLayers())) == []


def test_no_hook_sees_a_toy_being_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted(ManyLayers())  # with the toy of direct calls
    monkeypatch.setattr(kernels, "_agree", {})
    stepped: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.append(optimizer))
    try:
        trainer = fitted(module := ManyLayers())
    finally:
        handle.remove()
    assert set(map(id, stepped)) == {id(module.optimizers().optimizer)}
    assert kernels_of(trainer) == []


class Watching(ManyLayers):
    """A module that changes its optimizer after the third batch."""

    def __init__(self, change: Any = lambda optimizer: None) -> None:
        super().__init__()
        self.change, self.seen = change, []

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.optimizers().optimizer
        self.seen.append([(group["foreach"], group["fused"]) for group in optimizer.param_groups])
        if len(self.seen) == 3:
            self.change(optimizer)


def test_the_options_of_an_optimizer_are_never_seen_to_change() -> None:
    module = Watching()
    trainer = fitted(module)
    assert module.seen == [[(None, None)]] * 10
    assert kernels_of(trainer)[0][0] == "foreach"


def change_to_a_loop(optimizer: Any) -> None:
    optimizer.param_groups[0]["foreach"] = False


def change_to_a_tensor(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


def add_a_parameter(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))


@pytest.mark.parametrize("change", [change_to_a_loop, change_to_a_tensor, add_a_parameter])
def test_a_group_that_changes_in_a_fit_is_stepped_by_torchs_choice(spy: set[str], change: Any) -> None:
    module = Watching(change)
    fitted(module)
    assert spy == {"_multi_tensor_adam", "_single_tensor_adam"}


def searches(kind: Any, **options: Any) -> list[str]:
    """How often torch searches for a kernel in a small fit; the options are unchanged after it."""
    module, asked = ManyLayers(kind, **options), list[str]()
    home = ADAM if kind is optim.AdamW else sys.modules[kind.__module__]
    search = vars(home)["_default_to_fused_or_foreach"]
    module.layers = nn.Sequential(nn.Linear(4, 4))
    direct._of_toy(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "_default_to_fused_or_foreach", lambda *a, **k: asked.append("search") or search(*a, **k))
        fitted(module)
    assert {group["foreach"] for group in module.optimizers().optimizer.param_groups} == {options.get("foreach")}
    return asked


@pytest.mark.parametrize("name", kernels._LOOPS)
def test_torch_does_not_search_for_a_kernel_where_it_loops(name: str) -> None:
    kind = getattr(optim, name)
    assert searches(kind) == []


def test_an_error_in_a_step_leaves_the_options_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ManyLayers()
    kernels.choose(module.make(), "equal")  # the toy

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(ADAM, "_multi_tensor_adam", failing)
    made: list[Any] = []
    module.make = lambda: made.append(optim.Adam(module.layers.parameters())) or made[0]
    with pytest.raises(RuntimeError, match="planted"):
        fitted(module)
    assert made[0].param_groups[0]["foreach"] is None
