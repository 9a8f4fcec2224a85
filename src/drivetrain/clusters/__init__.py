"""Cluster environments, which tell each process its rank. Each kind of cluster has one file."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
