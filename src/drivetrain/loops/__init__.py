"""The training, evaluation and prediction loops: functions that share the counters of one
:class:`~drivetrain.loops.progress.Progress`.
"""

from drivetrain.base.lazy import lazy

lazy(__name__)
