"""drivetrain: train PyTorch models on any hardware, with a Trainer or with a loop of your own.

``import drivetrain as dt``. The public names below, and the packages such as ``dt.callbacks`` and ``dt.loggers``, are
imported when they are first used, so importing the package costs next to nothing.
"""

from drivetrain.base import VERSION
from drivetrain.base.lazy import public
from drivetrain.base.supplied import supply

__all__ = public(__name__)

__version__ = VERSION

# By the function that a lower layer declares, what a higher one supplies; it is imported when it is called.
supply(
    {
        "drivetrain.base.introspect:check_overrides": "drivetrain.compat.members:check_members",
        "drivetrain.base.supplied:in_our_layout": "drivetrain.compat.earlier_checkpoints:migrate",
        "drivetrain.base.supplied:instead_of": "drivetrain.compat.missing:instead_of",
        "drivetrain.base.supplied:warn_of_uncalled": "drivetrain.compat.members:warn_of_uncalled",
        "drivetrain.launchers.board:phase_name": "drivetrain.loops.progress:phase_name",
        "drivetrain.module.loading:class_and_arguments": "drivetrain.cli.from_checkpoint:class_and_arguments",
        "drivetrain.trainer.attach:check_former_hooks": "drivetrain.compat.former_hooks:check_not_defined",
        "drivetrain.trainer.attach:former_hooks": "drivetrain.compat.former_hooks:former_hooks",
        "drivetrain.trainer.attach:with_defaults": "drivetrain.callbacks.defaults:with_defaults",
        "drivetrain.trainer.life:begin_record": "drivetrain.report.record:begin",
        "drivetrain.trainer.life:end_record": "drivetrain.report.record:end",
        "drivetrain.trainer.properties:familiar_property": "drivetrain.compat.loop_views:familiar_property",
        "drivetrain.trainer.trainer:translated": "drivetrain.compat.translated:translated",
    }
)
