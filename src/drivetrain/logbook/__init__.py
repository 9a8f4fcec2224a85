"""Store, reduce and read the values of ``self.log``."""

from drivetrain.base.lazy import public

__all__ = public(__name__)
