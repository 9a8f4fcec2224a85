"""Arguments of Trainer(...) that were renamed are rewritten, and the others are reported."""

from __future__ import annotations

import ast

import pytest

import drivetrain
from drivetrain.legacy.migrate.program import migrate
from drivetrain.legacy.v1_3.flags import FLAGS, PRESENT

IMPORT = "from drivetrain import Trainer\n"

REWRITTEN = {
    "gpus=2": 'accelerator="gpu", devices=2',
    "gpus=[0, 1]": 'accelerator="gpu", devices=[0, 1]',
    "gpus=-1,  # all\n": 'accelerator="gpu", devices=-1,  # all\n',
    "gpus=0": 'accelerator="cpu"',
    "gpus=None": 'accelerator="cpu"',
    "gpus=args.gpus": 'accelerator="gpu" if args.gpus else "cpu", devices=args.gpus or 1',
    "tpu_cores=8": 'accelerator="tpu", devices=8',
    "num_processes=n": 'accelerator="cpu", devices=n',
    'accelerator="gpu", gpus=2': 'accelerator="gpu", devices=2',
    'gpus=2, distributed_backend="ddp"': 'accelerator="gpu", devices=2, strategy="ddp"',
    "gpus=2, accelerator='dp'": "accelerator=\"gpu\", devices=2, strategy='dp'",
    'accelerator="ddp_cpu", num_processes=2': 'strategy="ddp_spawn", accelerator="cpu", devices=2',
    'distributed_backend="ddp_cpu"': 'accelerator="cpu", strategy="ddp_spawn"',
    "gpus=None, num_processes=2": 'accelerator="cpu", devices=2',
    "gpus=0, num_processes=1": 'accelerator="cpu"',
    "checkpoint_callback=False": "enable_checkpointing=False",
    "checkpoint_callback=F(a=1), callbacks=[b,]": "callbacks=[b, F(a=1),]",
    "checkpoint_callback=F(a=1), callbacks=[]": "callbacks=[F(a=1)]",
    "checkpoint_callback=F(a=1), callbacks=None": "callbacks=[F(a=1)]",
    "checkpoint_callback=F(a=1)": "callbacks=[F(a=1)]",
    "progress_bar_refresh_rate=0": "enable_progress_bar=False",
    "progress_bar_refresh_rate=5": "callbacks=[RichProgressBar(refresh_rate=5)]",
    "weights_summary=None": "enable_model_summary=False",
    'weights_summary="full"': "callbacks=[ModelSummary(max_depth=-1)]",
    'weights_summary="top", max_epochs=3': "max_epochs=3",
    'weights_save_path="a"': 'callbacks=[ModelCheckpoint(dirpath="a")]',
    "accumulate_grad_batches={4: 2}": "callbacks=[GradientAccumulationScheduler({4: 2})]",
    "reload_dataloaders_every_epoch=True": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp=False": "use_distributed_sampler=False",
    "replace_sampler_ddp=(  # no\n  flag)": "use_distributed_sampler=(  # no\n  flag)",
    'precision=16, amp_level="O3", amp_backend="apex"': 'precision="16-true"',
    'precision=16, amp_backend="native"': "precision=16",
    "max_epochs=1, auto_lr_find=False, stochastic_weight_avg=False": "max_epochs=1",
    "move_metrics_to_cpu=True, max_steps=None": "",
}  # fmt: skip


@pytest.mark.parametrize("before", REWRITTEN, ids=range(len(REWRITTEN)))
def test_an_argument_is_rewritten_once(before: str) -> None:
    source = migrate("train.py", f"{IMPORT}t = Trainer({before})\n".encode())
    after = source.result()
    assert after.endswith(f"t = Trainer({REWRITTEN[before]})\n")
    assert migrate("train.py", after.encode()).result() == after
    names = {node.func.id for node in ast.walk(ast.parse(after)) if isinstance(node, ast.Call)}  # type: ignore[attr-defined]
    for name in names - {"Trainer", "F"}:
        assert f"import {name}\n" in after
    assert all("find_unused" in each.text for each in source.remarks if each.is_left)
    assert {each.line for each in source.remarks} == {2}


LEFT = {
    "resume_from_checkpoint=a": "trainer.fit(model, ckpt_path=a)",
    "truncated_bptt_steps=3": "self.truncated_bptt_steps = 3 in the LightningModule",
    "track_grad_norm=2": "self.log in on_before_optimizer_step",
    "terminate_on_nan=True": "check_finite=True",
    "auto_lr_find=True": "write Tuner(trainer) of drivetrain.tuner",
    "model_registry=name": "not supported yet",
    "checkpoint_callback=flag": "enable_checkpointing=... for a bool",
    "checkpoint_callback=F(), callbacks=c": "write F() into callbacks=",
    "gpus=count()": 'accelerator="gpu", devices=...',
    'distributed_backend="ddp_sharded"': "a plugin of drivetrain.legacy.v1_3",
    "distributed_backend=args.backend": "write strategy=...",
    'strategy="ddp", distributed_backend="ddp"': "keep one",
    "gpus=2, devices=2": "keep one",
    "weights_summary=args.summary": "ModelSummary",
    "overfit_pct=0.1": "Trainer has no argument overfit_pct any more",
    "**config": "look at what it contains",
    "True": "keywords only",
}


@pytest.mark.parametrize("before", LEFT, ids=range(len(LEFT)))
def test_what_needs_a_person_is_reported_and_stays(before: str) -> None:
    source = migrate("train.py", f"{IMPORT}\nt = Trainer({before})\n".encode())
    assert LEFT[before] in " ".join(each.text for each in source.remarks if each.is_left and each.line == 3)
    assert before.split("=")[0] in source.result()


DIFFERS = {
    "max_epochs=1, weights_summary=None": 'takes a GPU today if there is one: write accelerator="cpu"',
    "gpus=2": 'write strategy="ddp_spawn" to spawn them',
    "accelerator='cpu', devices=2": "padded_evaluation in docs/compat.md",
    "accumulate_grad_batches=n": "undersized_windows in docs/compat.md",
}


@pytest.mark.parametrize("before", DIFFERS, ids=range(len(DIFFERS)))
def test_what_has_another_result_is_reported(before: str) -> None:
    source = migrate("train.py", f"{IMPORT}t = Trainer({before})\n".encode())
    assert [each for each in source.remarks if each.text.startswith("differs: ") and DIFFERS[before] in each.text]
    assert not [each for each in source.remarks if each.is_left]


@pytest.mark.parametrize("name", sorted(FLAGS.keys() - PRESENT))
def test_no_flag_of_that_time_passes_unseen(name: str) -> None:
    source = migrate("train.py", f"{IMPORT}t = Trainer({name}=value)\n".encode())
    assert [each for each in source.remarks if name in each.text]
    source = migrate("train.py", f"{IMPORT}t = Trainer({name}={FLAGS[name]!r})\n".encode())
    exec(compile(source.result().replace("t = Trainer(", "t = Trainer(logger=False, "), "train.py", "exec"), {})


def test_todays_arguments_stay() -> None:
    values = ", ".join(f"{name}=v" for name in sorted(PRESENT - {"profiler", "model_registry"}))
    text = f"import drivetrain as dt\nt = dt.Trainer({values})\n"
    assert migrate("train.py", text.encode()).result() == text
    assert drivetrain.Trainer  # the name that the text uses
