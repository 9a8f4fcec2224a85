"""Cluster environments, which give each process its rank: one file per kind of cluster."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
