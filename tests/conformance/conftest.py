"""What of the suites runs in the long form only: `make test-faults`."""

from __future__ import annotations

import os

import pytest

# Two new processes in each: the host's, the pretend devices' and those while they are recorded. The devices of a
# process that is spawned are the same in all three, so one of them says whether a change broke it.
EQUAL = ("TestCPU::test_two_processes_train_as_one", "TestFake::test_two_processes_train_as_one")

# The same for models that are sharded; tests/distributed/test_fsdp.py has the numbers of the host.
SHARDED = "::test_a_sharded_model_trains"

# Strategies whose numbers are in tests/distributed/ (test_fsdp.py, test_fsdp2.py, test_model_parallel.py, test_ddp2.py,
# test_horovod.py, test_pipeline.py, test_rounded_gradients.py), and whose rows here are equal in most to TestDDP's.
ALIKE = (
    "::TestFSDP::", "::TestFSDP2::", "::TestFSDPOnceAWindow::", "::TestTensorParallel::", "::TestDDP2::",
    "::TestHorovod::", "::TestPipeline::", "::TestErrorFeedback::",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("DRIVETRAIN_FAULTS", "") == "long":
        return
    for item in items:
        if item.nodeid.endswith(EQUAL):
            item.add_marker(pytest.mark.skip("equal to TestFakeRecorded's: make test-faults runs all three"))
        if item.nodeid.endswith(SHARDED) or any(name in item.nodeid for name in ALIKE):
            item.add_marker(pytest.mark.skip("TestDDP and tests/distributed/ test most of it: make test-faults"))
