"""Names of earlier generations that programs import and may never use: making an object of one raises an error."""

from __future__ import annotations

from typing import Any

from drivetrain.errors import NotSupportedError


class _Absent:
    """A class that can be imported, and no more.

    Raises:
        NotSupportedError: always.
    """

    cure = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(f"{cls.__name__} is not supported yet. {cls.cure}")


class TestTubeLogger(_Absent):
    """Logs to a folder of test tube."""

    cure = "Use TensorBoardLogger or CSVLogger, or write a Logger: see docs/own_parts.md."
    __test__ = False  # to pytest, no class of tests


class RPCSequentialPlugin(_Absent):
    """A pipeline of layers on several GPUs, by fairscale."""

    cure = "Use PipelineStrategy: see docs/pipeline.md."


class DDPSequentialPlugin(RPCSequentialPlugin):
    """The same, under its earlier name."""
