"""A test suite for a user's strategy.

In a test file::

    from drivetrain.testing.strategy_conformance import StrategyConformance


    class TestMine(StrategyConformance):
        strategy = MyStrategy

Each method is a test. With ``devices = 2`` the tests run in two processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from drivetrain.accelerators.accelerator import HOST
from drivetrain.engine.engine import Engine
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.strategies.familiar import Familiar
from drivetrain.strategies.step import Step
from drivetrain.strategies.step_parts import HOOKS_IN_A_STEP
from drivetrain.strategies.strategy import Strategy
from drivetrain.testing._ranks import Ranks
from drivetrain.testing._regression import (
    BATCHES,
    GLOBAL_BATCH,
    QUIET,
    Saves,
    Small,
    data,
    plain_loop,
    stepped,
    trained,
    whole,
)
from drivetrain.testing.checks import same
from drivetrain.testing.groups import check_group
from drivetrain.trainer.trainer import Trainer

try:
    import pytest
except ImportError as error:
    raise ImportError("The conformance suite runs under pytest. Write pip install pytest.") from error

_VERBS = sorted(
    name
    for contract in (Step, Familiar)
    for name, value in vars(contract).items()
    if callable(value) and not name.startswith(("_", "on_"))
)
_LATE = "ranks have different gradients after the last backward pass of a window: exchange them in or right after it."
_IN_A_STEP = {"training_step", "backward", "pre_backward", "post_backward", "zero_grad", "optimizer_step"}


def runs_on_every_rank(suite: type) -> type:
    """Class decorator: run each test of a suite on every rank, with an empty folder."""
    for name, row in list(vars(suite).items()):
        if name.startswith("test_"):
            setattr(suite, name, needs_every_rank(row))
    return suite


def needs_every_rank(row: Callable[[Any, Path], None]) -> Any:
    """Return a test that runs the method ``row`` on every rank. The test's attribute ``row`` is this method."""

    def test(self: StrategyConformance, tmp_path: Path) -> None:
        self._ranks.run(row.__name__, tmp_path)

    test.__name__, test.__qualname__, test.__doc__ = row.__name__, row.__qualname__, row.__doc__
    test.row = row  # type: ignore[attr-defined]
    return test


@runs_on_every_rank
class StrategyConformance:
    """The test suite: define a subclass that sets ``strategy`` and whose name begins with ``Test``.

    Attributes:
        strategy: the strategy's class, or a function without arguments that returns a strategy.
        devices: the number of processes. Each process trains on a different part of the data.
        replicas: the number of devices per process, for a strategy with ``drives_all_devices``.
        accelerator: the Trainer's argument of this name.
        precision: the Trainer's argument of this name. Set "32-true" for devices without float64.
        tolerance: the allowed relative and absolute difference between results of the strategy and results of a plain
            loop on the host.
        resumes_bit_by_bit: whether a resumed run must equal an uninterrupted run bit for bit. If False, ``tolerance``
            is the allowed difference. A compiler, for example, may round differently after a run has resumed.
    """

    strategy: ClassVar[Callable[[], Strategy]]
    devices: ClassVar[int] = 1
    replicas: ClassVar[int] = 1
    accelerator: ClassVar[Any] = "cpu"
    precision: ClassVar[str] = "64-true"
    tolerance: ClassVar[float] = 1e-9
    resumes_bit_by_bit: ClassVar[bool] = True

    _ranks: ClassVar[Ranks]

    @classmethod
    def setup_class(cls) -> None:
        """Prepare the processes in which the tests run."""
        cls._ranks = Ranks(cls, cls.devices)

    @classmethod
    def teardown_class(cls) -> None:
        """End the processes."""
        cls._ranks.close()

    # ---- helpers for tests ---------------------------------------------------------------------------------------

    def make(self) -> Strategy:
        """Return a new strategy."""
        return type(self).strategy()

    def trainer(self, strategy: Strategy | None = None, **arguments: Any) -> Trainer:
        """Return a Trainer that trains two epochs with the strategy, without output."""
        strategy = strategy or self.make()
        # If a strategy drives all devices from one process, each process counts as a machine.
        devices, nodes = (self.replicas, self.devices) if strategy.facts.drives_all_devices else (self.devices, 1)
        usual: dict[str, Any] = {
            "strategy": strategy, "accelerator": self.accelerator, "devices": devices, "num_nodes": nodes,
            "precision": self.precision, "max_epochs": 2, **QUIET,
        }  # fmt: skip
        return Trainer(**{**usual, **arguments})

    def loader(self, batches: int = BATCHES) -> Any:
        """Return a loader of ``batches`` batches. Each batch is this rank's part of a global batch."""
        return DataLoader(data(batches), batch_size=GLOBAL_BATCH // self.devices)

    def fit(self, module: Small, trainer: Trainer | None = None, **arguments: Any) -> dict[str, Any]:
        """Train ``module``, and return the results, which are the same on every rank."""
        ckpt_path = arguments.pop("ckpt_path", None)
        trainer = trainer or self.trainer(**arguments)
        trainer.fit(module, self.loader(), self.loader(2), ckpt_path=ckpt_path)
        return {
            **trained(module, trainer.optimizers[0]),
            "losses": everyones_mean(trainer.strategy, module.losses, self.replicas),
            "gradients": module.gradients,
            "steps": trainer.global_step,
        }

    def plain_loop(self, **arguments: Any) -> dict[str, Any]:
        """Return the expected results of :meth:`fit`, which a plain loop over global batches computes on the host."""
        return plain_loop(self.plain_module, **arguments)

    def plain_module(self, kind: str = "plain") -> Small:
        """Return a module on the host in the dtype of the precision."""
        return Small(kind).to(torch.float64 if self.precision == "64-true" else torch.float32)

    def near(self, one: Any, other: Any) -> None:
        """Check that two numbers or tensors are equal within ``tolerance``."""
        torch.testing.assert_close(one, other, rtol=self.tolerance, atol=self.tolerance, check_dtype=False)

    def compare(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        """Compare the results of :meth:`fit` and :meth:`plain_loop`."""
        same(found["steps"], expected["steps"], "optimizer steps")
        for part in ("losses", "gradients", "weights", "optimizer"):
            self.near(found[part], expected[part])

    # ---- training ------------------------------------------------------------------------------------------------

    def test_it_trains_like_the_plain_loop(self, folder: Path) -> None:
        """A fit gives the weights, losses, gradients and optimizer state of a plain loop over the global batches."""
        self.compare(self.fit(Small()), self.plain_loop())

    def test_it_accumulates(self, folder: Path) -> None:
        """A step's gradient is the mean over the step's batches, even if the last step of an epoch has fewer
        batches.
        """
        self.compare(self.fit(Small(), accumulate_grad_batches=4), self.plain_loop(accumulate=4))

    def test_it_weighs_losses(self, folder: Path) -> None:
        """With weighted losses, a step's gradient is the weighted mean over all ranks and over the step's batches."""
        found = self.fit(Small("weighted"), accumulate_grad_batches=4)
        self.compare(found, self.plain_loop(accumulate=4, kind="weighted"))

    def test_the_length_of_a_window_does_not_matter(self, folder: Path) -> None:
        """With weighted losses, a step over two batches has the gradient of a step over four batches: each batch twice.

        The test fails if a strategy adds a residual of earlier steps whose unit depends on the number of batches.
        ``tolerance`` is not used, because even a lossy exchange rounds the two gradients in the same way, up to an
        exact factor of 2.
        """
        gradients = []
        for order in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 4, 5, 5]):
            samples = [batch * GLOBAL_BATCH + sample for batch in order for sample in range(GLOBAL_BATCH)]
            loader = DataLoader(Subset(data(BATCHES), samples), batch_size=self.loader().batch_size)
            module = Small("weighted")
            self.trainer(accumulate_grad_batches=4, limit_val_batches=0).fit(module, loader)
            gradients.append(module.gradients)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)

    def test_all_ranks_start_with_the_weights_of_rank_0(self, folder: Path) -> None:
        """If the initial weights of the module differ between ranks, all ranks train from the weights of rank 0."""
        module = Small()
        if self.trainer().global_rank:
            with torch.no_grad():
                module.scale.add_(1)
        self.compare(self.fit(module), self.plain_loop())

    def test_it_clips(self, folder: Path) -> None:
        """Gradients are clipped by the norm of the complete gradient, and by value."""
        for algorithm, limit in (("norm", 0.05), ("value", 0.01)):
            found = self.fit(
                Small(), accumulate_grad_batches=4, gradient_clip_val=limit, gradient_clip_algorithm=algorithm
            )
            self.compare(found, self.plain_loop(accumulate=4, clip=(algorithm, limit)))

    def test_the_optimizer_steps_the_gradients_that_hooks_see(self, folder: Path) -> None:
        """All ranks see the same gradient in ``on_before_optimizer_step``. The optimizer steps with this gradient after
        clipping it.

        ``tolerance`` is not used, because this hook sees gradients after a lossy exchange has rounded them.
        """
        trainer = self.trainer(accumulate_grad_batches=4, gradient_clip_val=0.05)
        self.check_stepped(self.fit(Small(), trainer), trainer.strategy)

    def check_stepped(self, found: dict[str, Any], strategy: Strategy) -> None:
        """Check that the recorded gradients are equal on all ranks. Check that optimizer steps with these gradients,
        clipped to the norm 0.05, give the trained weights.
        """
        for gradients in strategy.world.gather_objects(found["gradients"]):
            torch.testing.assert_close(gradients, found["gradients"], msg=lambda text: f"{_LATE} {text}")
        expected = stepped(self.plain_module(), found["gradients"], ("norm", 0.05))
        torch.testing.assert_close({name: found[name] for name in expected}, expected)

    def test_manual_optimization_works(self, folder: Path) -> None:
        """Manual optimization trains like the plain loop, or raises a NotSupportedError."""
        refused = "automatic_optimization"
        try:
            self.compare(self.fit(Small("manual")), self.plain_loop())
        except NotSupportedError as error:
            refused = str(error)
        assert "automatic_optimization" in refused, f"manual optimization is refused without its name: {refused}"

    def test_a_verb_that_only_calls_super_changes_nothing(self, folder: Path) -> None:
        """If one or all methods of the strategy's step are overridden and only call ``super()``, no result changes."""
        arguments: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0}
        arguments |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
        expected = self.fit(Small("weighted"), self.trainer(**arguments))
        limit = min(self.tolerance, 1e-4)  # small even for a lossy strategy, which rounds in the same way in both fits
        for verbs in (_VERBS, *([verb] for verb in _VERBS)):
            called: set[str] = set()
            strategy = passing_on(self.make(), verbs, called)
            found = self.fit(Small("weighted"), self.trainer(strategy, **arguments))
            try:
                torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
            except AssertionError as error:
                which = verbs[0] if len(verbs) == 1 else "every verb"
                raise AssertionError(f"overriding {which} with super() changes the numbers: {error}") from error
            if len(verbs) > 1 and type(self.make()).bind_step is Step.bind_step:
                assert called >= _IN_A_STEP, f"overridden and not called: {', '.join(sorted(_IN_A_STEP - called))}"

    def test_hooks_inside_a_step_are_called_or_refused(self, folder: Path) -> None:
        """If a module overrides a hook of the step, the hook is called, or the set-up raises a ConfigurationError."""
        for hook in sorted(HOOKS_IN_A_STEP):
            module, refused = hooked(hook), ""
            try:
                self.fit(module, max_epochs=1, limit_train_batches=1, limit_val_batches=0, gradient_clip_val=1.0)
            except ConfigurationError as error:
                refused = str(error)
            assert hook in module.called or hook in refused, f"{hook} is overridden, and neither called nor refused"

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def test_it_evaluates(self, folder: Path) -> None:
        """Validation in and after a fit, testing and prediction give the results of the trained weights."""
        module, trainer = Small(), self.trainer(max_epochs=1)
        self.fit(module, trainer)
        in_fit = float(trainer.callback_metrics["loss"])
        reference = self.reference_of(module)
        batches = self.loader(2)
        with torch.no_grad():
            x, y, _ = data(2).tensors
            outputs = reference(x.to(reference.scale.dtype))
            expected = float(F.mse_loss(outputs, y.to(outputs.dtype)))
        validated = trainer.validate(module, batches, verbose=False)[0]["loss"]
        tested = trainer.test(module, batches, verbose=False)[0]["loss"]
        for name, value in (("in fit", in_fit), ("validate", validated), ("test", tested)):
            limit = max(self.tolerance, 1e-7) * abs(expected)
            assert abs(value - expected) <= limit, f"the loss of {name} is {value}, and {expected} is right"
        predictions: Any = trainer.predict(module, batches)
        if trainer.is_global_zero:
            self.near(torch.cat(predictions), outputs)
        else:
            same(predictions, [], "predictions on other ranks than 0")

    def reference_of(self, module: Small) -> Small:
        """Return a plain module on the host with the weights of ``module``. Every rank must call this method."""
        plain = self.plain_module()
        plain.load_state_dict(whole(dict(module.named_parameters())))
        return plain

    def test_it_trains_a_module_that_it_has_evaluated(self, folder: Path) -> None:
        """Validation runs in inference mode if ``allows_inference_mode`` is True. A module can be trained
        afterwards.
        """
        module, trainer = Small(), self.trainer()
        trainer.validate(module, self.loader(2), verbose=False)
        same(module.inference, {trainer.strategy.facts.allows_inference_mode}, "inference mode during validation")
        self.compare(self.fit(module, trainer), self.plain_loop())

    # ---- saving and resuming -------------------------------------------------------------------------------------

    def test_it_resumes_exactly(self, folder: Path) -> None:
        """A run that resumes after an epoch, in an epoch, or in an optimizer step equals an uninterrupted run."""
        for at, accumulate in ((6, 1), (9, 1), (9, 4)):
            file = folder / f"{at}-{accumulate}.ckpt"
            arguments: dict[str, Any] = {"accumulate_grad_batches": accumulate}
            uninterrupted = self.fit(Small(), **arguments, callbacks=[Saves(file, at)])
            resumed = self.fit(Small(), **arguments, ckpt_path=file)
            self.check_resumed(resumed, uninterrupted, at)

    def check_resumed(self, resumed: dict[str, Any], uninterrupted: dict[str, Any], at: int) -> None:
        """Compare a run that was resumed after ``at`` batches with an uninterrupted run."""
        same(len(resumed["losses"]), 2 * BATCHES - at, "batches of the resumed run")
        limit = 0 if self.resumes_bit_by_bit else self.tolerance
        torch.testing.assert_close(resumed["losses"], uninterrupted["losses"][at:], rtol=limit, atol=limit)
        for part in ("weights", "optimizer"):
            torch.testing.assert_close(resumed[part], uninterrupted[part], rtol=limit, atol=limit)

    def test_its_files_are_those_of_a_plain_module(self, folder: Path) -> None:
        """A checkpoint contains complete tensors under the module's names, and a plain module can load them."""
        module, trainer = Small(), self.trainer(max_epochs=1)
        found = self.fit(module, trainer)
        trainer.save_checkpoint(folder / "one.ckpt")
        trainer.strategy.barrier()
        checkpoint = torch.load(folder / "one.ckpt", weights_only=True)
        same(sorted(checkpoint["state_dict"]), sorted(found["weights"]), "names of the weights in the file")
        same({type(value) for value in checkpoint["state_dict"].values()}, {Tensor}, "types of the weights in the file")
        plain = self.plain_module()
        plain.load_state_dict(checkpoint["state_dict"])
        self.near(dict(plain.state_dict()), found["weights"])

    # ---- a user's loop -------------------------------------------------------------------------------------------

    def fit_by_engine(self, saves: Path | None = None, resumes: Path | None = None) -> tuple[dict[str, Any], Strategy]:
        """Train with an Engine: one epoch, a save, and a second epoch. A step has two batches."""
        strategy = self.make()
        plan = self.trainer(strategy).plan
        engine = Engine(plan=plan)
        engine.launch()
        module = Small()
        model, optimizer = engine.setup(module, module.configure_optimizers())
        loader, state = engine.setup_dataloaders(self.loader()), {"model": model, "optimizer": optimizer}
        if resumes is not None:
            engine.load(resumes, state)
        for _ in range(2 if resumes is None else 1):
            if saves is not None and module.losses:
                engine.save(saves, state)
            for number, batch in enumerate(loader):
                with engine.no_backward_sync(model, enabled=number % 2 == 0):
                    engine.backward(model.training_step(batch, number) / 2)
                if number % 2 == 1:
                    module.on_before_optimizer_step(optimizer)
                    engine.clip_gradients(model, optimizer, max_norm=0.05)
                    optimizer.step()
                    optimizer.zero_grad()
        found = {**trained(module, optimizer), "losses": everyones_mean(strategy, module.losses, self.replicas)}
        return {**found, "gradients": module.gradients, "steps": len(module.gradients)}, strategy

    def test_an_engine_trains_like_the_plain_loop(self, folder: Path) -> None:
        """A loop that uses an Engine exchanges, clips and uses accumulated gradients as the Trainer does."""
        found, strategy = self.fit_by_engine()
        self.compare(found, self.plain_loop(accumulate=2, clip=("norm", 0.05)))
        self.check_stepped(found, strategy)

    def test_an_engine_resumes_exactly(self, folder: Path) -> None:
        """A loop that resumes from a checkpoint of ``Engine.save`` equals an uninterrupted loop."""
        uninterrupted, _ = self.fit_by_engine(saves=folder / "engine.ckpt")
        resumed, _ = self.fit_by_engine(resumes=folder / "engine.ckpt")
        self.check_resumed(resumed, uninterrupted, BATCHES)

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def test_it_knows_its_ranks(self, folder: Path) -> None:
        """The strategy has the job's ranks and sizes. ``is_distributed`` is True if there are several processes."""
        trainer = self.trainer()
        trainer.validate(Small(), self.loader(2), verbose=False)
        strategy = trainer.strategy
        assert isinstance(strategy.root_device, torch.device), f"root_device is {strategy.root_device!r}"
        same(strategy.world_size, self.devices, "world_size")
        assert strategy.facts.is_distributed or self.devices == 1, "is_distributed is False, with several processes"
        same(strategy.world.gather_objects(strategy.global_rank), list(range(self.devices)), "global_rank on all ranks")
        same(strategy.is_global_zero, strategy.global_rank == 0, "is_global_zero")
        if not strategy.facts.is_distributed:
            same((strategy.global_rank, strategy.local_rank, strategy.node_rank), (0, 0, 0), "ranks of one process")
        same(list(strategy.world.ranks), list(range(self.devices)), "world.ranks")
        for group in (strategy.world, strategy.data):
            same(group.rank, strategy.global_rank, f"rank of {type(group).__name__}")
            check_group(group)

    def test_ranks_exchange_values(self, folder: Path) -> None:
        """Collectives return the right values on every rank. With one process, a collective returns its input."""
        trainer = self.trainer()
        trainer.validate(Small(), self.loader(2), verbose=False)
        strategy, size = trainer.strategy, self.devices
        rank, device = strategy.global_rank, strategy.root_device
        strategy.barrier()
        strategy.barrier("with a name")
        same(strategy.broadcast({"rank": rank}), {"rank": 0}, "broadcast")
        same(strategy.broadcast([rank], src=size - 1), [size - 1], "broadcast from the last rank")
        here = torch.tensor([float(rank), 1.0], device=device)
        everyones = [[float(other), 1.0] for other in range(size)]
        mean, total = [(size - 1) / 2, 1.0], [size * (size - 1) / 2, float(size)]
        for operation, expected in (("mean", mean), ("sum", total)):
            same(strategy.reduce(here.clone(), reduce_op=operation).cpu().tolist(), expected, f"reduce, {operation}")
        same(strategy.reduce("no tensor"), "no tensor", "reduce of no tensor")
        same(strategy.all_gather(here).cpu().reshape(size, 2).tolist(), everyones, "all_gather")
        same(strategy.reduce_boolean_decision(rank == 0, all=False), True, "whether any rank decides so")
        same(strategy.reduce_boolean_decision(rank == 0, all=True), size == 1, "whether all ranks decide so")
        same(strategy.world.gather_keyed(["a", "b"], here).cpu().tolist(), everyones, "gather_keyed")

    # ---- life ----------------------------------------------------------------------------------------------------

    def test_a_run_gives_the_module_back(self, folder: Path) -> None:
        """After a run the module is on the host on every rank, can be called, and can be trained again."""
        module, trainer = Small(), self.trainer(max_epochs=1)
        self.fit(module, trainer)
        same({parameter.device.type for parameter in module.parameters()}, {HOST.type}, "device after the run")
        reference = self.reference_of(module)
        x = data(1).tensors[0].to(reference.scale.dtype)
        with torch.no_grad():
            self.near(whole({"output": module(x)})["output"], reference(x))
        self.trainer(max_epochs=1).fit(module, self.loader(), self.loader(2))
        same(len(module.losses), 2 * BATCHES * self.replicas, "batches of both runs")

    def test_it_can_be_torn_down_at_any_time(self, folder: Path) -> None:
        """``teardown`` works before the set-up, and can be called twice."""
        strategy = self.trainer().strategy
        strategy.teardown()
        strategy.teardown()

    def test_an_error_in_a_step_is_what_the_caller_sees(self, folder: Path) -> None:
        """An exception in a step reaches the caller of ``fit`` and calls ``on_exception``, and the next run works."""
        heard: list[BaseException] = []
        strategy = self.make()
        strategy.on_exception = heard.append  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError):
            self.trainer(strategy).fit(Small("failing"), self.loader(), self.loader(2))
        same([type(each) for each in heard], [ZeroDivisionError], "what on_exception got")
        self.compare(self.fit(Small()), self.plain_loop())

    def test_a_copy_of_it_trains(self, folder: Path) -> None:
        """The strategy can be pickled. The unpickled copy trains as the original does."""
        strategy = self.make()
        fresh = pickle.loads(pickle.dumps(strategy))
        same(type(fresh), type(strategy), "class of the copy")
        self.compare(self.fit(Small(), self.trainer(fresh)), self.plain_loop())


# ---- helpers ---------------------------------------------------------------------------------------------------------


def everyones_mean(strategy: Strategy, losses: list[Tensor], replicas: int = 1) -> Tensor:
    """Return the mean of each loss over all ranks and replicas, which have equally many samples."""
    here = torch.stack([loss.cpu() for loss in losses]) if losses else torch.zeros(0)
    here = here.reshape(-1, replicas).mean(1)
    return torch.stack(strategy.world.gather_objects(here)).mean(0)


def passing_on(strategy: Strategy, verbs: list[str], called: set[str]) -> Strategy:
    """Change the class of ``strategy`` to a subclass. The subclass overrides the methods ``verbs``. Each of these
    methods adds its name to ``called``, and calls ``super()``.
    """
    own = type(strategy)

    def override(name: str) -> Any:
        def verb(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(super(passing, self), name)(*args, **kwargs)

        return verb

    passing = type(f"Passing{own.__name__}", (own,), {name: override(name) for name in verbs})
    strategy.__class__ = passing
    return strategy


def hooked(hook: str) -> Small:
    """Return a module that overrides ``hook`` and records the hook's calls."""

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.called.add(hook)
        return getattr(super(own, self), hook)(*args, **kwargs)

    own = type("Hooked", (Small,), {hook: override})
    return own()
