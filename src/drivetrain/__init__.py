"""drivetrain: train PyTorch models on any hardware, with a Trainer or with a loop of your own.

``import drivetrain as dt``. The public names below, and the packages such as ``dt.callbacks`` and ``dt.loggers``, are
imported when they are first used, so importing the package costs next to nothing.
"""

from drivetrain.base.lazy import public

__all__ = public(__name__)

__version__ = "0.1.0"
