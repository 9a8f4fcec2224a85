"""Classes of earlier Lightning generations that drivetrain lacks. Programs can import these classes, but their
constructors raise an error.
"""

from __future__ import annotations

from typing import Any

from drivetrain.errors import NotSupportedError


class _Absent:
    """A class that programs can import, but whose constructor raises an error.

    Raises:
        NotSupportedError: always.
    """

    cure = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(f"{cls.__name__} is not supported yet. {cls.cure}")


class TestTubeLogger(_Absent):
    """The logger of the package test-tube, which drivetrain does not support."""

    cure = "Use TensorBoardLogger or CSVLogger, or write a Logger: see docs/own_logger.md."
    __test__ = False  # pytest must not collect this class as a test


class RPCSequentialPlugin(_Absent):
    """A pipeline of layers on several GPUs, by fairscale."""

    cure = "Use PipelineStrategy: see docs/pipeline.md."


class DDPSequentialPlugin(RPCSequentialPlugin):
    """:class:`RPCSequentialPlugin` under its earlier name."""
