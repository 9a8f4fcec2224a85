# The public names, for type checkers and for base/lazy.py.

from drivetrain.testing.checks import check_part as check_part
from drivetrain.testing.fake import FakeAccelerator as FakeAccelerator
from drivetrain.testing.fake import fake_devices as fake_devices
from drivetrain.testing.groups import check_group as check_group
from drivetrain.testing.record import Move as Move
from drivetrain.testing.record import Record as Record
from drivetrain.testing.record import Step as Step
from drivetrain.testing.record import Sync as Sync
