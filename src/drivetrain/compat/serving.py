"""Lightning's ``ServableModule``, and a callback that checks before training whether a module can answer requests."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drivetrain import Callback
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.tree import is_dtensor
from drivetrain.errors import ConfigurationError, NotSupportedError, WrongTypeError, shown
from drivetrain.module.export import undisturbed

_Converters = dict[str, Callable[[Any], Any]]


class ServableModule(ABC, nn.Module):
    """Base class, besides LightningModule, of modules that answer requests of a server."""

    @abstractmethod
    def configure_payload(self) -> dict[str, Any]:
        """Return an example request, which JSON can represent: ``{"body": {argument of serve_step: value}}``."""

    @abstractmethod
    def configure_serialization(self) -> tuple[_Converters, _Converters]:
        """Return two dictionaries of functions. The first has a function for each argument of ``serve_step``, which
        creates the argument from JSON's data. The second has a function for each output, which converts the output to
        JSON's data.
        """

    @abstractmethod
    def serve_step(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        """Return the outputs for one request, by name."""

    @abstractmethod
    def configure_response(self) -> dict[str, Any]:
        """Return the expected answer to the example request, which JSON can represent."""


@dataclass(frozen=True)
class Response:
    """The answer to a request: the status 200 with JSON, or the status 500 with an error."""

    status_code: int
    text: str

    def json(self) -> Any:
        """Return the answer's data."""
        return json.loads(self.text)


class ServableModuleValidator(Callback):
    """Before training, lets the module answer its example request, and compares the answer with the expected one.

    No server is started, but the request and the answer are converted to JSON and back. The module answers in
    evaluation mode.

    Args:
        optimization: only ``None``.
        server: only "fastapi".
        host, port, timeout: ignored.
        exit_on_failure: raise an error if the module cannot answer.

    Attributes:
        resp: the answer; ``None`` before training starts.

    Raises:
        NotSupportedError: the value of ``optimization`` or ``server`` is not supported; or, when training starts, the
            strategy shards parameters.
        ConfigurationError: when training starts, the module is no ServableModule, or does not answer as expected.
    """

    def __init__(
        self,
        optimization: str | None = None,
        server: str = "fastapi",
        host: str = "127.0.0.1",
        port: int = 8080,
        timeout: int = 20,
        exit_on_failure: bool = True,
    ) -> None:
        super().__init__()
        for name, value, only in (("optimization", optimization, None), ("server", server, "fastapi")):
            if value != only:
                raise NotSupportedError(f"ServableModuleValidator({name}={shown(value)}): write {name}={only!r}.")
        self.optimization, self.server, self.host, self.port = optimization, server, host, port
        self.timeout, self.exit_on_failure = timeout, exit_on_failure
        self.resp: Response | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        name = type(pl_module).__name__
        if not isinstance(pl_module, ServableModule):
            raise WrongTypeError(f"{name} is no ServableModule. Write class {name}(LightningModule, ServableModule).")
        if any(is_dtensor(each) for each in pl_module.parameters()):
            raise NotSupportedError(
                'ServableModuleValidator needs complete parameters, and this strategy shards them. Use strategy="ddp".'
            )
        payload = pl_module.configure_payload()
        if not isinstance(payload, dict) or "body" not in payload:
            raise ConfigurationError(
                f'{name}.configure_payload returned {shown(payload)}, which has no "body". Write {{"body": {{...}}}}.'
            )
        with undisturbed(pl_module):
            self.resp = _answer(pl_module, payload)
        if not self.successful:
            if self.exit_on_failure:
                raise ConfigurationError(f"{name} cannot answer the request {shown(payload)}: {self.resp.text}.")
        elif (answer := self.resp.json()) != (expected := pl_module.configure_response()):
            raise ConfigurationError(
                f"{name} answers its example request with {answer}, and configure_response returned {expected}. "
                "Correct one of the two."
            )
        else:
            rank_zero_info(f"{name} answers its example request with {answer}.")

    @property
    def successful(self) -> bool | None:
        """Whether the module has answered; ``None`` before training starts."""
        return None if self.resp is None else self.resp.status_code == 200

    def state_dict(self) -> dict[str, Any]:
        return {"successful": self.successful, "optimization": self.optimization, "server": self.server}


def _answer(module: ServableModule, payload: dict[str, Any]) -> Response:
    try:
        body = json.loads(json.dumps(payload))["body"]
        inputs, outputs = module.configure_serialization()
        found: Any = module.serve_step(**body | {key: convert(body[key]) for key, convert in inputs.items()})
        return Response(200, json.dumps(found | {key: convert(found[key]) for key, convert in outputs.items()}))
    except Exception as error:  # a server would answer with the error, and go on
        return Response(500, f"{type(error).__name__}: {error}")
