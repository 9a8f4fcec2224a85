"""Engine as programs written for Fabric expect it."""

from __future__ import annotations

from typing import Any

from drivetrain import Engine


class Takes:
    """Hooks with fewer and more arguments than a call gives."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch(self, epoch: int) -> None:
        self.seen.append(epoch)

    def on_batch(self, **given: Any) -> None:
        self.seen.append(given)

    def on_end(self) -> None:
        self.seen.append("end")


def test_a_hook_gets_the_keywords_that_it_takes() -> None:
    callback = Takes()
    engine = Engine(accelerator="cpu", devices=1, callbacks=[callback])
    engine.call("on_epoch", epoch=3, model=object(), loss=1.0)
    engine.call("on_batch", epoch=3, loss=1.0)
    engine.call("on_end", epoch=3)
    engine.call("on_epoch", 4)
    engine.call("on_nothing", epoch=3)
    assert callback.seen == [3, {"epoch": 3, "loss": 1.0}, "end", 4]
