"""``drivetrain migrate``: rewrites programs written for Lightning, as far as that is safe."""

from drivetrain.base.lazy import lazy

lazy(__name__)
