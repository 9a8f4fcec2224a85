"""Where the tests of each file of the package are.

The tests of `src/drivetrain/<folder>/<file>.py` are in `tests/<folder>/test_<file>.py`, or under that name in one of
the folders of MIRRORS. TESTS_OF names further tests, and those of the other files. `make where FILE=loops/step.py`
prints them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "drivetrain"

MIRRORS = ("distributed", "extras", "conformance")
"""What only several processes show; what needs packages of its own; what every part of a kind must do."""

TESTS_OF = {
    "accelerators/choice.py": "accelerators/test_accelerator.py",
    "accelerators/graphs.py": "accelerators/test_accelerator.py gpu/test_graphs.py",
    "accelerators/peak_flops.py": "callbacks/test_throughput_monitor.py",
    "advice/data.py": "advice/test_oversights.py advice/test_watch.py",
    "advice/error_notes.py": "advice/test_memory_note.py",
    "advice/losses.py": "advice/test_oversights.py",
    "advice/model.py": "advice/test_oversights.py",
    "advice/sampler.py": "advice/test_thread_stack.py",
    "advice/steps.py": "advice/test_watch.py",
    "base/compile_options.py": "trainer/test_compiling.py",
    "base/digest.py": "proof/test_recorder.py proof/test_outputs.py",
    "base/configs.py": "familiar/test_configs.py",
    "base/memory.py": "advice/test_memory_note.py loops/test_split.py",
    "base/packages.py": "base/test_lazy.py",
    "base/no_init.py": "engine/test_verbs.py familiar/test_precisions.py",
    "callback.py": "test_hook_order.py",
    "cli/failed.py": "cli/test_command.py",
    "callbacks/_checkpoint_arguments.py": "callbacks/test_model_checkpoint.py",
    "callbacks/_checkpoint_names.py": "callbacks/test_model_checkpoint.py",
    "callbacks/_progress_thread.py": "callbacks/test_progress_bar.py",
    "callbacks/_rich_layout.py": "callbacks/test_rich_progress.py",
    "callbacks/defaults.py": "trainer/test_trainer.py callbacks/test_timer.py test_bad_input.py",
    "checkpoints/part_lists.py": "checkpoints/test_sharded.py",
    "checkpoints/writer_process.py": "checkpoints/test_writer.py",
    "checkpoints/xla.py": "strategies/test_xla.py xla/test_training.py",
    "clusters/aws_batch.py": "clusters/test_machines.py",
    "clusters/dstack.py": "clusters/test_machines.py",
    "clusters/kubernetes.py": "clusters/test_machines.py",
    "clusters/sagemaker.py": "clusters/test_machines.py",
    "clusters/skypilot.py": "clusters/test_machines.py",
    "clusters/vertex.py": "clusters/test_machines.py",
    "clusters/xla.py": "strategies/test_xla.py xla/test_xla.py",
    "__main__.py": "cli/test_command.py",
    "compat/__main__.py": "compat/test_command.py",
    "compat/collectives.py": "familiar/test_engine.py familiar/test_engine_on_ranks.py",
    "compat/connector_views.py": "trainer/test_connector_views.py",
    "compat/fabric_deepspeed.py": "extras/test_deepspeed_fabric.py",
    "compat/fabric_loggers.py": "familiar/test_engine.py",
    "compat/fabric_xla.py": "xla/test_fabric.py",
    "compat/former_hooks.py": "test_bad_input.py compat/test_deprecated.py",
    "compat/installing.py": "compat/test_install.py",
    "compat/loop_views.py": "familiar/test_training.py trainer/test_properties.py",
    "compat/translated.py": "legacy/v1_3/test_trainer.py",
    "compat/startup/sitecustomize.py": "compat/test_children.py",
    "compat/table.py": "compat/test_public_names.py",
    "doctor/clock.py": "doctor/test_machine.py",
    "doctor/devices.py": "doctor/test_numbers.py",
    "doctor/disk.py": "doctor/test_machine.py",
    "doctor/limits.py": "doctor/test_machine.py",
    "doctor/optimizers.py": "doctor/test_numbers.py",
    "doctor/processes.py": "doctor/test_checks.py",
    "doctor/versions.py": "doctor/test_machine.py",
    "data/loader_passes.py": "data/test_passes.py",
    "data/sampled_passes.py": "data/test_passes.py",
    "data/stateful.py": "data/test_passes.py",
    "engine/command_line.py": "engine/test_engine.py",
    "engine/parts.py": "engine/test_engine.py",
    "engine/ranks.py": "engine/test_engine.py distributed/test_engine.py",
    "engine/state_files.py": "engine/test_verbs.py engine/test_snapshots.py",
    "engine/throughput.py": "callbacks/test_throughput_monitor.py",
    "launchers/_fork.py": "launchers/test_multiprocessing.py",
    "launchers/_ray_actor.py": "launchers/test_ray.py real_clusters/test_ray.py",
    "launchers/failure.py": "trainer/test_shown.py launchers/test_multiprocessing.py",
    "launchers/xla.py": "strategies/test_xla.py xla/test_xla.py",
    "legacy/absent.py": "legacy/v1_3/test_served.py",
    "legacy/adapted.py": "legacy/v1_1/test_accelerators.py legacy/v1_3/test_accelerators.py",
    "legacy/deprecated.py": "legacy/v1_1/test_trainer.py legacy/v1_3/test_trainer.py",
    "legacy/migrate/bindings.py": "legacy/migrate/test_imports.py",
    "legacy/migrate/hyperparameters.py": "legacy/migrate/test_calls.py",
    "legacy/migrate/names.py": "legacy/migrate/test_imports.py",
    "legacy/parts.py": "legacy/v1_1/test_accelerators.py legacy/v1_3/test_accelerators.py",
    "legacy/v1_1/_callbacks.py": "legacy/v1_1/test_trainer.py",
    "legacy/v1_1/flags.py": "legacy/v1_1/test_trainer.py",
    "legacy/v1_1/named.py": "legacy/v1_1/test_accelerators.py",
    "legacy/v1_1/plugins.py": "legacy/v1_1/test_accelerators.py legacy/v1_1/test_trainer.py",
    "legacy/v1_1/results.py": "legacy/v1_1/test_trainer.py",
    "legacy/v1_1/strategy.py": "legacy/v1_1/test_accelerators.py",
    "legacy/v1_1/synced_log.py": "legacy/v1_1/test_accelerators.py",
    "legacy/v1_1/wrappers.py": "legacy/v1_1/test_accelerators.py",
    "legacy/v1_3/_callbacks.py": "legacy/v1_3/test_trainer.py",
    "legacy/v1_3/arguments.py": "legacy/v1_3/test_trainer.py",
    "legacy/v1_3/availability.py": "legacy/v1_1/test_served.py legacy/v1_3/test_cli.py",
    "legacy/v1_3/checks.py": "legacy/v1_3/test_trainer.py",
    "legacy/v1_3/defaults.py": "legacy/v1_3/test_module.py",
    "legacy/v1_3/epoch_ends.py": "legacy/v1_3/test_epochs.py",
    "legacy/v1_3/flags.py": "legacy/v1_3/test_trainer.py",
    "legacy/v1_3/helpers.py": "legacy/test_names.py",
    "legacy/v1_3/hooks.py": "legacy/v1_3/test_epochs.py",
    "legacy/v1_3/last_steps.py": "legacy/v1_3/test_epochs.py",
    "legacy/v1_3/loggers.py": "legacy/v1_3/test_trainer.py",
    "legacy/v1_3/precision_plugins.py": "legacy/v1_3/test_accelerators.py",
    "legacy/v1_3/progress.py": "legacy/test_names.py",
    "legacy/v1_3/properties.py": "legacy/v1_3/test_trainer.py",
    "legacy/v1_3/stepping.py": "legacy/v1_3/test_accelerators.py",
    "legacy/v1_3/steps.py": "legacy/v1_3/test_epochs.py",
    "legacy/v1_3/strategy.py": "legacy/v1_3/test_accelerators.py",
    "legacy/v1_3/training_type_plugin.py": "legacy/v1_3/test_members.py",
    "legacy/v1_3/training_type_plugins.py": "legacy/v1_3/test_accelerators.py",
    "legacy/v1_3/tuner.py": "legacy/v1_3/test_trainer.py",
    "logbook/entry.py": "logbook/test_logbook.py loops/test_restart_checks.py",
    "logbook/history.py": "logbook/test_curves.py",
    "loggers/_event_file.py": "loggers/test_tensorboard.py",
    "loggers/_folder.py": "loggers/test_csv.py",
    "loggers/_mirror.py": "trainer/test_addresses.py",
    "loops/epoch.py": "loops/test_fit.py loops/test_evaluate.py loops/test_restart.py",
    "loops/metrics.py": "loops/test_restart_checks.py loops/test_restart_points.py",
    "loops/pieces.py": "strategies/test_step.py loops/test_precisions.py",
    "loops/replay.py": "callbacks/test_replay_check.py distributed/test_replay_check.py",
    "loops/resume.py": "loops/test_restart.py trainer/test_resume.py trainer/test_other_ranks.py",
    "loops/run.py": "loops/test_stop.py budget/test_size.py",
    "loops/sanity.py": "trainer/test_trainer.py",
    "loops/spans.py": "profilers/test_profiler.py",
    "loops/graph_parts.py": "loops/test_graphs.py",
    "loops/step_checks.py": "loops/test_split.py loops/test_graphs.py callbacks/test_replay_check.py",
    "loops/step.py": "loops/test_fit.py loops/test_manual.py strategies/test_step.py",
    "loops/uneven.py": "distributed/test_uneven_loaders.py",
    "module/datamodule.py": "module/test_module.py",
    "module/hooks.py": "test_hook_order.py module/test_module.py",
    "module/trainable.py": "module/test_module.py",
    "plugins/environments.py": "base/test_lazy.py",
    "plugins/io.py": "base/test_lazy.py",
    "plugins/layer_sync.py": "base/test_lazy.py",
    "plugins/precision.py": "base/test_lazy.py",
    "precision/familiar.py": "precision/test_members.py",
    "precision/float8.py": "precision/test_packages.py extras/test_torchao.py",
    "precision/xla.py": "strategies/test_xla.py xla/test_training.py",
    "profilers/passthrough.py": "profilers/test_profiler.py",
    "profilers/xla.py": "xla/test_profiler.py",
    "proof/child.py": "proof/test_recorder.py proof/test_command.py",
    "proof/diff_command.py": "proof/test_command.py",
    "proof/plugin.py": "proof/test_command.py",
    "proof/proving.py": "proof/test_command.py",
    "proof/records.py": "proof/test_recorder.py",
    "strategies/joint_save.py": "distributed/test_background_saves.py faults/test_background_deaths.py",
    "strategies/_deepspeed_config.py": "strategies/test_deepspeed.py extras/test_deepspeed.py",
    "strategies/_deepspeed_optimizers.py": "strategies/test_deepspeed.py",
    "strategies/_deepspeed_state.py": "extras/test_deepspeed.py",
    "strategies/alone.py": "callbacks/test_on_exception_checkpoint.py faults/test_saved_shards.py",
    "strategies/copies.py": "distributed/test_replica_check.py",
    "strategies/failing.py": "trainer/test_shown.py trainer/test_votes.py faults/test_faults.py",
    "strategies/familiar.py": "strategies/test_members.py",
    "strategies/fsdp_options.py": "distributed/test_fsdp_policies.py engine/test_wrappers.py",
    "strategies/fully_sharded.py": "distributed/test_fsdp.py distributed/test_model_parallel.py",
    "strategies/local_passes.py": "loops/test_split.py distributed/test_split.py",
    "strategies/model.py": "strategies/test_strategy.py",
    "strategies/parallel.py": "strategies/test_members.py distributed/test_ddp.py",
    "strategies/pipeline_stages.py": "distributed/test_pipeline.py",
    "strategies/ranks.py": "strategies/test_group.py",
    "strategies/redirection.py": "strategies/test_step.py",
    "strategies/sharded_files.py": "distributed/test_fsdp_checkpoints.py faults/test_saved_shards.py",
    "strategies/sharded_gradients.py": "distributed/test_fsdp.py",
    "strategies/single_xla.py": "strategies/test_xla.py xla/test_training.py",
    "strategies/state.py": "strategies/test_members.py engine/test_verbs.py trainer/test_checkpoint.py",
    "strategies/step_parts.py": "strategies/test_step.py",
    "strategies/tp_plan.py": "distributed/test_model_parallel.py",
    "strategies/xla_spmd.py": "strategies/test_xla.py xla/spmd/test_spmd.py",
    "report/comparing.py": "report/test_command.py",
    "report/run_file.py": "report/test_record.py",
    "report/sections.py": "report/test_page.py",
    "testing/_machine.py": "testing/test_fake.py",
    "testing/_places.py": "testing/test_fake.py",
    "testing/_ranks.py": "conformance/test_strategy_conformance.py",
    "testing/_regression.py": "conformance/test_strategies.py conformance/test_pipeline_strategy.py",
    "testing/checks.py": "conformance/test_kits.py cli/test_conformance.py",
    "testing/kits/_launch.py": "conformance/test_kits.py",
    "testing/kits/accelerator.py": "conformance/test_kits.py",
    "testing/kits/cluster.py": "conformance/test_kits.py",
    "testing/kits/launcher.py": "conformance/test_kits.py",
    "testing/kits/loader.py": "conformance/test_kits.py",
    "testing/kits/logger.py": "conformance/test_kits.py",
    "testing/kits/precision.py": "conformance/test_kits.py",
    "testing/kits/store.py": "conformance/test_kits.py",
    "testing/kits/strategy.py": "conformance/test_kits.py",
    "trainer/after_exception.py": "callbacks/test_on_exception_checkpoint.py faults/test_saved_shards.py",
    "trainer/job.py": "trainer/test_trainer.py distributed/test_started_here.py",
    "trainer/life.py": "trainer/test_trainer.py",
    "trainer/precision_checks.py": "precision/test_members.py",
    "trainer/profiling.py": "profilers/test_profiler.py",
    "trainer/stopping.py": "loops/test_stop.py faults/test_stop.py callbacks/test_fit_summary.py",
    "trainer/switches.py": "loops/test_fit.py",
    "trainer/telling.py": "trainer/test_results.py",
    "trainer/weights.py": "trainer/test_resume.py trainer/test_checkpoint.py",
    "forecast/allowance.py": "forecast/test_command.py",
    "forecast/blocks.py": "forecast/test_memory.py",
    "forecast/child.py": "forecast/test_command.py",
    "forecast/ledger.py": "forecast/test_memory.py",
    "forecast/operations.py": "forecast/test_exchange.py forecast/test_memory.py",
    "forecast/standins.py": "forecast/test_memory.py",
    "forecast/torch_tools.py": "forecast/test_memory.py test_torch_names.py",
    "forecast/tries.py": "forecast/test_command.py",
    "forecast/windows.py": "forecast/test_memory.py",
    "trials/child.py": "trials/test_command.py",
    "tuner/tuned_attribute.py": "tuner/test_lr_finder.py tuner/test_batch_size_finder.py",
    "tuner/tuning.py": "tuner/test_lr_finder.py",
}


def mirrors_of(file: str) -> list[str]:
    """Return the tests that the rule finds for a file of the package, both relative to their folders."""
    path = Path(file)
    name = f"test_{path.stem.lstrip('_')}.py"
    return [(Path(folder) / name).as_posix() for folder in (path.parent, *MIRRORS) if (TESTS / folder / name).exists()]


def where(file: str) -> list[str]:
    """Return the tests of a file of the package: its mirrors, and those that the map names."""
    return [*mirrors_of(file), *TESTS_OF.get(file, "").split()]


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("file", FILES)
def test_every_file_has_tests(file: str) -> None:
    assert where(file), f"Write tests/{Path(file).parent}/test_{Path(file).stem}.py, or name its tests in TESTS_OF."


@pytest.mark.parametrize("file", TESTS_OF)
def test_the_map_names_what_exists_and_no_mirror_says(file: str) -> None:
    assert file in FILES
    assert [each for each in TESTS_OF[file].split() if not (TESTS / each).exists()] == []
    assert set(mirrors_of(file)).isdisjoint(TESTS_OF[file].split())


def test_a_file_is_found_by_the_rule_or_in_the_map() -> None:
    assert where("plan.py") == ["test_plan.py"]
    assert where("strategies/ddp.py") == ["distributed/test_ddp.py"]
    assert where("loops/step.py") == ["loops/test_fit.py", "loops/test_manual.py", "strategies/test_step.py"]
    assert where("loops/no_such_file.py") == []


if __name__ == "__main__":
    print(*(f"tests/{each}" for each in where(sys.argv[1].split("src/drivetrain/")[-1])), sep="\n")
