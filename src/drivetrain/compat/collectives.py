"""Lightning's ``fabric.plugins.collectives``: the functions of torch.distributed as methods of an object.

A :class:`Collective` is used in one of three ways. After ``engine.launch()``, call ``setup()``: the collective uses the
Engine's process group. Without an Engine, call ``setup(main_address=..., main_port=...)``, which creates the process
group, and later ``teardown()``. For a group of only some ranks, call ``create_group(ranks=...)``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from drivetrain.base import torch_private
from drivetrain.errors import unknown_value

default_pg_timeout = timedelta(seconds=1800)


class Collective(ABC):
    """Base class of collectives, which exchange tensors and objects between the ranks of a group.

    An operation with a result writes the result into one of its arguments, and returns this argument.
    """

    def __init__(self) -> None:
        self._group: Any = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """Index of this process in the group."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of processes in the group."""

    @property
    def group(self) -> Any:
        """The group.

        Raises:
            RuntimeError: the group does not exist yet.
        """
        if self._group is None:
            raise RuntimeError(
                f"{type(self).__name__} has no group yet. Call {type(self).__name__}.create_group() first."
            )
        return self._group

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> Tensor: ...

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str) -> Tensor: ...

    @abstractmethod
    def reduce(self, tensor: Tensor, dst: int, op: str) -> Tensor: ...

    @abstractmethod
    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]: ...

    @abstractmethod
    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor: ...

    @abstractmethod
    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str) -> Tensor: ...

    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None: ...

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor: ...

    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None: ...

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool: ...

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool: ...

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: Any) -> None: ...

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: Any) -> Any: ...

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: Any) -> None: ...

    @classmethod
    @abstractmethod
    def _convert_to_native_op(cls, op: str) -> Any: ...

    def setup(self, **kwargs: Any) -> Self:
        """Call :meth:`init_group` with ``kwargs``, unless the process group of the job already exists."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        """Create the group of this object: call :meth:`new_group` with ``kwargs``.

        Raises:
            RuntimeError: the object already has a group.
        """
        if self._group is not None:
            raise RuntimeError(f"{type(self).__name__} has a group already. Make another object for another group.")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """Leave the group.

        Raises:
            RuntimeError: this object has no group.
        """
        group = self.group
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.destroy_group(group)
        self._group = None
        return self


class TorchCollective(Collective):
    """The operations of torch.distributed.

    Raises:
        RuntimeError: torch was built without torch.distributed.
    """

    manages_default_group = False
    """Whether :meth:`setup` has created the job's process group. If True, :meth:`teardown` destroys this group."""

    addr_key = "MASTER_ADDR"
    port_key = "MASTER_PORT"

    def __init__(self) -> None:
        if not dist.is_available():
            raise RuntimeError("This torch is built without torch.distributed. Use SingleDeviceCollective.")
        super().__init__()

    @property
    def group(self) -> Any:
        """The group that :meth:`create_group` has created; before this call, the group of all ranks."""
        return dist.GroupMember.WORLD if self._group is None else self._group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        dist.all_reduce(tensor, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: Any = "sum") -> Tensor:
        dist.reduce(tensor, dst, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        dist.gather(tensor, gather_list or None, dst, group=self.group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        dist.scatter(tensor, scatter_list or None, src, group=self.group)
        return tensor

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = "sum") -> Tensor:
        dist.reduce_scatter(output, input_list, op=self._convert_to_native_op(op), group=self.group)
        return output

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        dist.all_to_all(output_tensor_list, input_tensor_list, group=self.group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        dist.send(tensor, dst, tag=tag, group=self.group)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        dist.recv(tensor, src, tag=tag, group=self.group)
        return tensor

    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]:
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(self, object_list: list[Any], src: int, device: torch.device | None = None) -> list[Any]:
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(self, obj: Any, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        dist.gather_object(obj, object_gather_list or None, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src, group=self.group)
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        if self.group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group=self.group, device_ids=device_ids)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        dist.monitored_barrier(group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    def setup(self, main_address: str | None = None, main_port: str | None = None, **kwargs: Any) -> Self:
        """Create the process group of the job if there is none.

        Args:
            main_address: the address of rank 0's machine; ``None``: the environment variable ``MASTER_ADDR``.
            main_port: the port of rank 0; ``None``: the environment variable ``MASTER_PORT``.
            kwargs: arguments of ``torch.distributed.init_process_group``.
        """
        if self.is_initialized():
            return self
        given = {self.addr_key: main_address, self.port_key: main_port}
        before = {key: os.environ[key] for key in given if key in os.environ}
        os.environ.update({key: str(value) for key, value in given.items() if value is not None})
        try:
            super().setup(**kwargs)
        finally:
            for key in given:
                os.environ.pop(key, None)
            os.environ.update(before)
        TorchCollective.manages_default_group = True
        return self

    def teardown(self) -> Self:
        """Leave the group. Also destroy the job's process group, if :meth:`setup` has created it and no other group
        exists.
        """
        is_member = self.group is not dist.GroupMember.NON_GROUP_MEMBER
        if self._group is not None:
            super().teardown()
        elif not TorchCollective.manages_default_group:
            raise RuntimeError(f"{type(self).__name__} has no group of its own. Call create_group() or setup() first.")
        is_last = self.is_initialized() and len(torch_private.world.pg_map) == 1
        if TorchCollective.manages_default_group and is_member and is_last:
            self.destroy_group(dist.GroupMember.WORLD)
            TorchCollective.manages_default_group = False
        return self

    @classmethod
    def is_available(cls) -> bool:
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        return cls.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        dist.init_process_group(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        return dist.new_group(**kwargs)

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        if group in torch_private.world.pg_map:
            dist.destroy_process_group(group)

    @classmethod
    def _convert_to_native_op(cls, op: Any) -> Any:
        if not isinstance(op, str):
            return op
        if not isinstance(native := getattr(dist.ReduceOp, op.upper(), None), dist.ReduceOp.RedOpType):
            known = [name.lower() for name in dist.ReduceOp.RedOpType.__members__]
            raise unknown_value(cls.__name__, "op", op, known)
        return native


class SingleDeviceCollective(Collective):
    """Operations for a job with one process, which exchange nothing."""

    rank = 0
    world_size = 1

    def _unchanged(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    broadcast = all_reduce = reduce = recv = _unchanged

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, **__: Any) -> list[Tensor]:
        return [tensor]

    def gather(self, tensor: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        return [tensor]

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], *_: Any, **__: Any) -> Tensor:
        return scatter_list[0]

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], *_: Any, **__: Any) -> Tensor:
        return input_list[0]

    def all_to_all(
        self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], *_: Any, **__: Any
    ) -> list[Tensor]:
        return input_tensor_list

    def send(self, *_: Any, **__: Any) -> None: ...

    barrier = send

    @classmethod
    def is_available(cls) -> bool:
        return True

    is_initialized = is_available

    @classmethod
    def init_group(cls, *_: Any, **__: Any) -> None: ...

    destroy_group = init_group

    @classmethod
    def new_group(cls, **_: Any) -> Any:
        return object()

    @classmethod
    def _convert_to_native_op(cls, op: str) -> str:
        return op
