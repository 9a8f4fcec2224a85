"""Judging records: where a restarted program continued, and what differs from the undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.proof.judge import Difference, Judgement, earliest, judge, judge_ranks, logged_apart, position, summary
from drivetrain.proof.records import Start, packed, unpacked

NAMES = {"parameters": ["weight", "bias"], "optimizer": ["exp_avg of weight", "exp_avg of bias"], "model": [],
         "gradients": ["weight", "bias"], "module Average 2": ["weight", "bias"]}  # fmt: skip


def step(number: int) -> dict[str, Any]:
    """The record of a step in which everything depends on its number."""
    return {
        "time": number * 0.1,
        "names": NAMES,
        "tensors": {
            "parameters": packed([number, 10 * number]),
            "optimizer": packed([20 * number, 0]),
            "model": packed([]),
            "gradients": packed([number + 7, number + 8]),
        },
        "others": [["Average", packed([number, 3])]],
        "values": {"hyperparameters": {"lr of group 0": 0.1 / (1 + number // 4)}, "scaler": [{"scale": 4.0}]},
        "random": {"Python": "p", "torch": f"t{number}"},
        "since": {"inputs": [f"i{number}"], "batches": [f"b{number}"], "losses": [[0.5 / (1 + number), f"l{number}"]]},
    }


def run(first: int = 0, last: int = 12, ends: bool = True) -> Start:
    end = {**step(last), "since": {"inputs": [], "batches": [], "losses": []}}
    return Start([step(number) for number in range(first, last)], end=end if ends else None)


def judged(*restarts: Start, undisturbed: Start | None = None) -> Judgement:
    """Judge a run that was killed in its sixth step, and then started again."""
    undisturbed = undisturbed or run()
    return judge(undisturbed, [Start(undisturbed.steps[:6]), *restarts])


def parts(found: Judgement) -> list[tuple[int, str, str]]:
    return [each[:3] for each in found.differences]


def test_a_run_that_repeats_the_steps_since_its_checkpoint_is_equal() -> None:
    found = judged(run(3, 8, ends=False), run(8))
    assert (found.differences, found.notes) == ([], [])
    assert found.kills == [(6, 4), (8, 9)]


@pytest.mark.parametrize(
    ("change", "part", "detail"),
    [
        (lambda s: s["tensors"].update(parameters=packed([4, 0])), "parameters", "'bias'"),
        (lambda s: s["tensors"].update(optimizer=packed([0, 80])), "optimizer state",
         "'exp_avg of weight' and 1 more of 2, with each other's values"),
        (lambda s: s["tensors"].update(optimizer=packed([1, 1])), "optimizer state",
         "'exp_avg of weight' and 1 more of 2"),
        (lambda s: s["values"].update(hyperparameters={"lr of group 0": 0.1}), "hyperparameter",
         "lr of group 0: 0.1 instead of 0.05"),
        (lambda s: s["values"].update(scaler=[{"scale": 8.0}]), "gradient scaler", "scale: 8.0 instead of 4.0"),
        (lambda s: s.update(others=[["Average", packed([4, 9])]]), "a module Average that the optimizer does not train",
         "'bias'"),
        (lambda s: s["since"].update(inputs=["i0"], batches=["b0"]), "batch", "that of step 1"),
        (lambda s: s["since"].update(inputs=["new"], batches=["new"]), "batch",
         "one that the undisturbed run never had"),
        (lambda s: s["since"].update(inputs=["new"], batches=["b0"]), "batch", "that of step 1"),
        (lambda s: s["since"].update(inputs=["i0"]), "inputs of the model", "that of step 1"),
        (lambda s: s["since"].update(losses=[[0.25, "l"]]), "loss", "0.25 instead of 0.1"),
        (lambda s: s["tensors"].update(gradients=packed([0, 12])), "gradients", "'weight'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1], ids=["at the restart", "one step later"])
def test_a_part_that_differs_is_named_with_its_step(change: Any, part: str, detail: str, place: int) -> None:
    restart = run(4 - place)
    change(restart.steps[place])
    found = judged(restart)
    assert parts(found) == [(5, part, detail)]
    assert found.started_at[1] == 5 - place


def test_causes_come_before_their_effects() -> None:
    undisturbed, restart = run(), run(4)
    for each in (*undisturbed.steps, *restart.steps):
        each["names"], each["tensors"]["model"] = {**NAMES, "model": ["mean"]}, packed([1])
    restart.steps[0]["tensors"].update(gradients=packed([0, 0]), model=packed([2]))
    restart.steps[0]["since"].update(losses=[[9.0, "l"]])
    restart.steps[0]["random"]["torch"] = "t0"
    found = judged(restart, undisturbed=undisturbed)
    effects = ["random state", "buffers and frozen parameters", "loss", "gradients"]
    assert [part for _, part, _ in parts(found)] == effects
    assert found.equal == ["parameters", "optimizer state", "batch"]
    restart.steps[0]["since"].update(inputs=["i0"], batches=["b0"])
    assert [part for _, part, _ in parts(judged(restart, undisturbed=undisturbed))] == ["batch", *effects]


def test_what_is_equal_at_the_step_that_differs_is_listed() -> None:
    restart = run(4)
    restart.steps[0]["tensors"]["gradients"] = packed([0, 0])
    assert judged(restart).equal == ["parameters", "optimizer state", "batch", "loss", "random state"]


def test_of_several_batches_of_a_step_the_last_that_differs_is_looked_for() -> None:
    undisturbed, restart = run(), run(4)
    undisturbed.steps[5]["since"]["inputs"] = ["i5", "i5b"]
    restart.steps[1]["since"]["inputs"] = ["i2", "i5b"]
    assert parts(judged(restart, undisturbed=undisturbed)) == [(6, "inputs of the model", "that of step 3")]
    restart.steps[1]["since"]["inputs"] = ["new", "i5b"]
    detail = "one that the undisturbed run never had"
    assert parts(judged(restart, undisturbed=undisturbed)) == [(6, "inputs of the model", detail)]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["weight"], "1 tensor instead of 2, without 'bias'"),
        (["weight", "bias", "scale"], "3 tensors instead of 2, with 'scale'"),
        (["weight", "scale"], "'scale' in place of 'bias'"),
        (["parameter 0", "parameter 1"], "'parameter 0' in place of 'weight' and 1 more of 2"),
        (["bias", "weight"], "2 tensors instead of 2, in another order"),
    ],
)
def test_tensors_that_are_lost_or_new_are_named(names: list[str], text: str) -> None:
    restart = run(4)
    restart.steps[0]["names"] = {**NAMES, "gradients": names}
    restart.steps[0]["tensors"]["gradients"] = packed(list(range(len(names))))
    assert parts(judged(restart)) == [(5, "gradients", text)]


def test_a_random_state_that_nothing_depends_on_is_a_note() -> None:
    restart = run(4)
    for each in restart.steps[2:]:
        each["random"] = {**each["random"], "torch": "other"}
    found = judged(restart)
    assert found.differences == []
    assert found.notes == [
        "the random state of torch differs from step 7 on; no number that was compared depends on it"
    ]


def test_a_generator_that_the_program_never_seeds_is_not_compared() -> None:
    first, restart = run(last=6, ends=False), run(4)
    for each in (*first.steps, *restart.steps):
        each["random"] = {**each["random"], "Python": "of this process"}
    assert judge(run(), [first, restart]).notes == []


def test_what_came_before_the_restart_is_not_expected_again() -> None:
    undisturbed, restart = run(), run(4)
    undisturbed.steps[4]["since"]["inputs"] = ["validation", "i4"]
    assert judged(restart, undisturbed=undisturbed).differences == []
    undisturbed.steps[5]["since"]["inputs"] = ["validation", "i5"]
    assert [part for _, part, _ in parts(judged(restart, undisturbed=undisturbed))] == ["inputs of the model"]


def test_a_batch_that_no_module_gets_is_that_of_the_loader() -> None:
    undisturbed, restart = run(), run(4)
    for each in (*undisturbed.steps, *restart.steps):
        each["since"]["inputs"] = []
    restart.steps[1]["since"]["batches"] = ["b2"]
    assert parts(judged(restart, undisturbed=undisturbed)) == [(6, "batch", "that of step 3")]


def test_modules_of_one_class_and_several_sizes_are_told_apart() -> None:
    undisturbed, restart = run(), run(4)
    for each in (*undisturbed.steps, *restart.steps):
        each["names"] = {**NAMES, "module Average 3": ["a", "b", "c"]}
        each["others"] = [["Average", packed([0, 0, 0])], *each["others"]]
    restart.steps[0]["others"] = [["Average", packed([4, 9])], ["Average", packed([0, 1, 0])]]
    name = "a module Average that the optimizer does not train"
    assert sorted(parts(judged(restart, undisturbed=undisturbed))) == [(5, name, "'b'"), (5, name, "'bias'")]


def test_averages_without_a_counterpart_are_not_compared() -> None:
    undisturbed, restart = run(), run(4)
    for each in undisturbed.steps:
        each["others"] = [*each["others"], ["Average", packed([0, 0])]]  # one that was collected later
    assert judged(restart, undisturbed=undisturbed).differences == []


@pytest.mark.parametrize(("last", "text"), [(10, "ends after step 10"), (14, "ends after step 14")])
def test_a_run_of_another_length_differs(last: int, text: str) -> None:
    [found] = judged(run(4, last)).differences
    assert found.part == "number of steps"
    assert text in found.detail


def test_the_end_is_compared_too() -> None:
    restart = run(4)
    assert restart.end is not None
    restart.end["tensors"]["parameters"] = packed([12, 0])
    assert parts(judged(restart)) == [(13, "parameters", "'bias'")]


def test_among_equal_steps_one_counts_that_can_have_come_next_and_fits_what_follows() -> None:
    flat = [step(0) for _ in range(4)] + [step(number) for number in range(4, 8)]
    assert position(flat, flat, latest=0) == 0
    assert position(flat[1:], flat, latest=3) == 1
    assert position(flat[3:], flat, latest=3) == 3
    assert position(flat[1:2], flat, latest=2) == 2
    assert position(flat[4:], flat, latest=3) == 4
    end = [step(9) for _ in range(6)]
    other = [{**step(9), "random": {"Python": "of another process", "torch": "t"}} for _ in range(4)]
    assert position(other, end, latest=5) == 2
    assert position(other[:2], end, latest=5, ends=True) == 4


def test_a_program_that_restores_nothing_but_its_weights_is_compared_with_their_step() -> None:
    odd = {**step(0), "since": step(0)["since"]}
    odd["tensors"] = {**odd["tensors"], "parameters": step(5)["tensors"]["parameters"]}
    assert position([odd], run().steps, latest=6) == 5


def test_a_program_that_restores_all_but_its_weights_is_compared_with_the_step_of_the_rest() -> None:
    restart = run(4)
    restart.steps[0]["tensors"]["parameters"] = step(0)["tensors"]["parameters"]
    found = judged(restart)
    assert parts(found) == [(5, "parameters", "'weight' and 1 more of 2, those of step 1")]
    assert found.kills == [(6, 5)]


# ---- logged values ---------------------------------------------------------------------------------------------------


def logged(*rows: tuple[str, float, int]) -> Judgement:
    undisturbed, restart = run(), run(4)
    undisturbed.rows = [("loss", 0.5, 1), ("loss", 0.25, 2), ("loss", 0.125, 3)]
    restart.rows = list(rows)
    return judged(restart, undisturbed=undisturbed)


def test_rows_that_are_logged_again_or_lost_are_no_difference() -> None:
    assert logged(("loss", 0.25, 2), ("loss", 0.25, 2)).differences == []


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (("loss", 0.3, 2), "'loss' of step 2: 0.3 instead of 0.25"),
        (("loss", 0.25, 1), "'loss' of step 2 is logged as that of step 1"),
        (("loss", 0.3, 9), "'loss' of step 9: 0.3 instead of no value"),
    ],
)
def test_a_value_that_the_undisturbed_run_does_not_log_there_differs(row: Any, detail: str) -> None:
    assert parts(logged(row)) == [(row[2], "logged row", detail)]


def test_times_are_no_part_of_the_training() -> None:
    assert logged(("samples_per_second", 3.5, 2), ("epoch_time", 1.0, 2)).differences == []
    assert logged(("beta", 3.5, 2)).differences != []


def test_values_in_which_two_undisturbed_runs_differ_are_found_by_name() -> None:
    one, other = run(), run()
    one.rows, other.rows = [("loss", 0.5, 1), ("load", 3.0, 1)], [("loss", 0.5, 1), ("load", 4.0, 1)]
    assert logged_apart(one, other) == {"load"}


def test_the_rank_with_the_cause_is_reported() -> None:
    cause, effect = Judgement(rank=1), Judgement(rank=0)
    cause.differences = [Difference(5, "random state", "", 1), Difference(5, "gradients", "", 1)]
    effect.differences = [Difference(5, "gradients", "", 0)]
    assert earliest([effect, cause]) is cause
    assert earliest([effect, Judgement(rank=1)]) is effect


def test_the_hash_depends_on_each_step_and_not_on_the_time_or_what_is_never_seeded() -> None:
    slower, other = run(), run()
    for each in slower.steps:
        each["time"] += 1
        each["random"]["Python"] = "of this process"
    other.steps[3]["since"]["losses"] = [[0.0, "l"]]
    assert summary(slower) == summary(run()) != summary(other)


def rank(number: int, **changes: list[list[int]]) -> Start:
    """The records of a rank: batches, losses and random states of its own; ``changes``: a part's tensors by step."""
    found = run()
    for place, each in enumerate(found.steps):
        each["since"] = {part: [f"{part} of rank {number}"] for part in each["since"]}
        each["since"]["losses"] = [[float(number), "l"]]
        each["random"] = {"Python": "p", "torch": f"t{place} of rank {number}"}
        each["names"] = {**NAMES, "model": ["mean"]}
        each["tensors"]["model"] = packed([place])
        for part, values in changes.items():
            if place < len(values):
                each["tensors"][part] = packed(values[place])
    return found


def test_ranks_with_batches_of_their_own_are_equal() -> None:
    found = judge_ranks(rank(0), rank(1), 0, 1)
    assert (found.differences, found.notes) == ([], [])


@pytest.mark.parametrize(
    ("part", "words", "name"),
    [
        ("parameters", "parameters", "bias"),
        ("optimizer", "optimizer state", "exp_avg of bias"),
        ("gradients", "gradients", "bias"),
    ],
)
def test_ranks_differ_in_a_tensor_from_a_step_on(part: str, words: str, name: str) -> None:
    values = [unpacked(each["tensors"][part]) for each in run().steps]
    values[5] = [values[5][0], 1 << 12]
    found = judge_ranks(rank(0), rank(3, **{part: values}), 0, 3)
    assert parts(found) == [(6, words, f"'{name}'")]
    assert (found.tensor, found.against, found.rank) == (f"{part}: {name}", 0, 3)
    assert found.equal[:1] == ["parameters" if part != "parameters" else "optimizer state"]


@pytest.mark.parametrize("since", [0, 4], ids=["from the first step", "after steps that leave it as it is"])
def test_a_buffer_that_each_rank_computes_from_its_batches_is_named_and_not_compared(since: int) -> None:
    one, own = ([[first * (place >= since) + max(place, since - 1)] for place in range(12)] for first in (0, 100))
    found = judge_ranks(rank(0, model=one), rank(1, model=own), 0, 1)
    assert found.differences == []
    assert found.notes == ["not compared, because each rank computes it from its own batches: mean"]


@pytest.mark.parametrize(
    ("sign", "values", "first"),
    [
        (1, [[place + 100 * (place >= 4)] for place in range(12)], 5),  # it was equal before
        (-1, [[100 * (place >= 4) - place] for place in range(12)], 5),
        (1, [[77]] * 12, 1),  # no batch changes it
    ],
)
def test_a_buffer_that_ranks_do_not_compute_from_their_batches_is_compared(
    sign: int, values: list[list[int]], first: int
) -> None:
    found = judge_ranks(rank(0, model=[[sign * place] for place in range(12)]), rank(1, model=values), 0, 1)
    assert parts(found) == [(first, "buffers and frozen parameters", "'mean'")]


def test_tensors_of_one_rank_only_are_not_compared() -> None:
    """As with ``ZeroRedundancyOptimizer``: each rank has the optimizer state of some parameters."""
    divided = rank(1, optimizer=[[5]] * 12)
    for each in divided.steps:
        each["names"] = {**each["names"], "optimizer": ["exp_avg of another"]}
    assert judge_ranks(rank(0), divided, 0, 1).differences == []


def test_a_second_run_that_was_cut_differs() -> None:
    """It has no record of its end, as a run that was killed; one that resumes may go on."""
    cut = run(0, 5, ends=False)
    expected = [(6, "number of steps", "the program ends after step 5, undisturbed after 12")]
    assert parts(judge(run(), [cut], resumes=False)) == expected
    assert parts(judge(run(), [cut, run(5)])) == []


def test_a_rank_that_makes_fewer_steps_differs() -> None:
    shorter = rank(1)
    del shorter.steps[9:]
    assert parts(judge_ranks(rank(0), shorter, 0, 1)) == [(10, "number of steps", "rank 0 makes 12, rank 1 makes 9")]
