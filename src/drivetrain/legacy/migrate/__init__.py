"""``drivetrain migrate``: rewrites programs written for Lightning, where a rewrite is safe."""

from drivetrain.base.lazy import lazy

lazy(__name__)
