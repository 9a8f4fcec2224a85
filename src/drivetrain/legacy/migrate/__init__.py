"""``drivetrain migrate``: rewrites programs written for Lightning, and reports code that cannot be rewritten safely."""

from drivetrain.base.lazy import lazy

lazy(__name__)
