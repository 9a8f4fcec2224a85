"""The training, evaluation and prediction loops: functions that read and advance the counters of a
:class:`~drivetrain.loops.progress.Progress` object.
"""

from drivetrain.base.lazy import lazy

lazy(__name__)
