"""What a run that is asked to stop, save or requeue answers, and what is said while it is waited for, whole."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.core.errors import JobFailed, JobRefused
from hpc_gpt.launcher.watch import control
from hpc_gpt.launcher.watch.status import NO_ANSWER, RunStatus
from hpc_gpt.launcher.watch.sweep_rows import SweepStatus, fold, progress
from tests.made_runs import a_run, unsubmitted_run, with_job

AT_WORK = RunStatus("r", "demo", "running", None, "slurm", "7", 1)
MEGATRON = {"engine__name": "megatron-lm"}
UNSAVED = {"train__save_last": False}
# (its settings, its state, the verb, what it answers); `- ` is before what is refused
ASKED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {}, "stop", "asked to save after this step and end"),
    ({}, {}, "save", "asked to save after this step and continue"),
    ({}, {}, "requeue", "asked to save after this step and go back to the queue"),
    (UNSAVED, {}, "stop", "asked to end after this step, unsaved: train.save_last is false"),
    (UNSAVED, {}, "save", "asked to save after this step and continue"),
    (UNSAVED, {}, "requeue", "asked to go back to the queue after this step, unsaved: train.save_last is false"),
    (
        {},
        {"cause": NO_ANSWER},
        "save",
        "asked to save after this step and continue (Slurm does not answer, so it may not be running)",
    ),
    (
        {},
        {"state": "suspended"},
        "save",
        "asked to save after this step and continue (once Slurm resumes its job, which is suspended)",
    ),
    ({}, {"state": "done"}, "save", "- nothing to save, it ended as done"),
    ({}, {"state": "unknown", "cause": "gone"}, "stop", "- nothing to stop, it is unknown: gone"),
    (
        MEGATRON,
        {},
        "save",
        "- Megatron-LM saves as often as train.save_every says, and when it ends: stop or requeue it",
    ),
    (
        {},
        {"state": "pending", "begun": False},
        "stop",
        "it waits in the queue: when it starts, it ends as stopped; hpc-gpt cancel takes it out of the queue",
    ),
    ({}, {"state": "pending", "begun": False}, "save", "- nothing to save, it waits in the queue"),
    ({}, {"begun": False}, "requeue", "- nothing to requeue, no attempt has begun"),
    ({}, {"lost": "no answer", "cause": "not found"}, "stop", "- its job is not known yet: not found"),
]


@pytest.mark.parametrize(("settings", "state", "verb", "words"), ASKED)
def test_a_run_answers_what_it_is_asked(settings, state, verb, words, own_folders) -> None:
    line = {key: state[key] for key in ("lost",) if key in state}
    run = with_job(unsubmitted_run("generic-slurm", **settings), "7", **line)
    if state.get("begun", True):
        run.new_attempt()
    row = replace(AT_WORK, **{key: value for key, value in state.items() if key not in ("begun", *line)})
    asked = control._ask(run, verb, row)
    assert "- " * asked.refused + asked.message == words
    stops = verb == "stop" and not asked.refused
    assert [path.name for path in run.path.glob("stop.*")] == ["stop.7"] * stops
    at_work = not asked.refused and state.get("begun", True)
    assert (asked.attempt is not None, asked.request is not None) == (at_work, at_work)


def test_an_allocation_of_the_users_is_left_as_it_is(own_folders) -> None:
    run = unsubmitted_run("generic-slurm")
    (run.new_attempt().folder / "attempt.json").write_text('{"attempt": 1, "job_id": "7", "allocation": true}')
    asked, stop = control._ask(run, "requeue", AT_WORK), f"hpc-gpt stop {run.run_id} saves and ends it"
    assert (asked.refused, asked.message) == (True, f"it runs in an allocation of your own: {stop}")
    with pytest.raises(JobRefused, match="in an allocation of your own, job 7, which a cancel would end") as fault:
        control.cancel_run(run, AT_WORK)
    assert fault.value.hint == stop
    assert not run.is_cancelled("7")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "running"),
        ({"state": "suspended"}, "suspended"),
        ({"step": 0, "steps": 9}, "running  step 0/9"),
        (
            {"step": 3, "steps": 0, "loss": 2.34567, "tokens_per_s": 1234.5},
            "running  step 3  loss 2.3457  1234 tokens/s",
        ),
        ({"state": "pending", "cause": "other jobs come first"}, "pending  (other jobs come first)"),
        ({"state": "error", "cause": "boom"}, "error"),
    ],
)
def test_a_status_is_one_line(status: dict[str, Any], words: str) -> None:
    assert control.describe(replace(AT_WORK, **status)) == words


def test_how_runs_have_ended_is_said_or_raised(monkeypatch, capsys) -> None:
    run, row = a_run(), replace(AT_WORK, state="nan", step=3, steps=9, cause="8 steps")
    for status, words in ((row, "nan  step 3/9; 8 steps"), (replace(row, cause=None), "nan  step 3/9")):
        with pytest.raises(JobFailed) as fault:
            control.end_of_wait(run, status)
        assert f"{fault.value} | {fault.value.hint}" == f"run {run.run_id}: {words} | hpc-gpt why {run.run_id}"
    control.end_of_wait(run, replace(row, state="stopped"))
    assert capsys.readouterr().err == f"run {run.run_id}: stopped  step 3/9\nnext: hpc-gpt report {run.run_id}\n"
    ends = [replace(row, run="a", state="done"), replace(row, run="b"), replace(row, run="c", row="x", state="error")]
    monkeypatch.setattr(control, "follow", lambda *_: ends)
    with pytest.raises(JobFailed) as fault:
        control.wait_for_all([run])
    assert (str(fault.value), fault.value.hint) == (
        "run b: demo nan  step 3/9\nrun c: x error  step 3/9",
        "hpc-gpt why b",
    )


def test_a_ctrl_c_says_what_it_does(monkeypatch, capsys) -> None:
    saves, ends = a_run(), a_run(train__save_last=False)
    cancelled: list[tuple[str, bool]] = []
    monkeypatch.setattr(control, "cancel_run", lambda run, _, save=False: cancelled.append((run.run_id, save)))
    for runs, words in (
        ([saves], "the run is asked to save and stop"),
        ([ends], "the run is asked to stop, unsaved: train.save_last is false"),
        ([saves, ends], "the 2 runs are asked to stop, 1 of them unsaved: train.save_last is false"),
    ):
        control._interrupt(runs, 1, [])
        assert capsys.readouterr().err == f"Ctrl-C: {words}; once more cancels\n"
    assert cancelled == [(run.run_id, True) for run in (saves, ends, saves, ends)]
    control._interrupt([saves, ends], 2, [AT_WORK, AT_WORK])
    assert capsys.readouterr().err == "Ctrl-C again: the 2 runs are cancelled\n"
    assert cancelled[4:] == [(saves.run_id, False), (ends.run_id, False)]


def test_a_sweeps_line_has_the_sums_of_its_runs() -> None:
    one = replace(AT_WORK, sweep_id="s", job_id="7_1", step=3, steps=9, age_s=5.0, gpu_hours=1.5, layout="tp1")
    rows = [
        replace(one, sweep="table"),
        replace(AT_WORK, name="alone"),
        replace(one, job_id="7_2", state="nan", attempts=4, age_s=8.0),
        replace(one, job_id="8", age_s=None),
    ]
    of_sweep = [rows[0], *rows[2:]]
    states, figures = "2 running, 1 nan", {"layout": "3 runs", "age_s": 8.0, "gpu_hours": 4.5, "sweep_id": "s"}
    line = SweepStatus("s", "table", states, None, "slurm", "7 8", 6, runs=of_sweep, **figures)
    assert fold(rows) == [line, rows[1]]
    (bare,) = fold(two := [replace(one, attempts=0, job_id=None, step=None, steps=None, state="done") for _ in "ab"])
    assert (bare.layout, bare.attempts, bare.job_id, bare.runs) == ("2 runs", 0, None, two)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(3, 3), (3, 3)], "3/3"),
        ([(1, 3), (2, 6)], "1 to 2/3 to 6"),
        ([(None, 6), (2, 6)], "0 to 2/6"),
        ([(4, None), (4, None)], "4"),
        ([(None, None)], "-/-"),
    ],
)
def test_the_steps_of_a_sweep_are_those_of_each_run(steps, words) -> None:
    rows = [replace(AT_WORK, sweep_id="s", step=step, steps=planned) for step, planned in steps]
    (line,) = fold(rows)
    assert progress(line) == words
    assert progress(rows[0]) == progress(fold(rows[:1])[0])


@pytest.mark.parametrize(
    ("scheduler", "states", "looks"),
    [
        ("slurm", ["running", "done"], 2),
        ("slurm", ["unknown"] * 9, 8),
        ("local", ["unknown"] * 70, 62),
        ("slurm", ["unknown"] * 7 + ["pending"] + ["unknown"] * 9, 16),
        ("slurm", ["unknown", "nan"], 2),
    ],
)
def test_unknown_for_half_a_minute_is_over(scheduler: str, states: list[str], looks: int, monkeypatch) -> None:
    """Slurm is asked every 5 s, and a local run looked at every half a second."""
    clock, left = [100.0], iter([replace(AT_WORK, state=state, scheduler=scheduler) for state in states])
    sleep = lambda seconds: clock.append(clock[-1] + seconds)  # noqa: E731
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: clock[-1], sleep=sleep))
    monkeypatch.setattr(control, "read_status", lambda _: [next(left)])
    assert len(list(control.until_over([]))) == looks


def test_a_line_of_progress_is_ended_by_the_third_ctrl_c(monkeypatch) -> None:
    seen: list[str] = []
    line = SimpleNamespace(show=seen.append, end=lambda: seen.append("END"))
    monkeypatch.setattr(control, "ProgressLine", lambda: line)
    monkeypatch.setattr(control, "_interrupt", lambda runs, count, _: seen.append(f"Ctrl-C {count}"))

    def looks(_: object) -> Iterator[list[RunStatus]]:
        yield [AT_WORK]
        yield [AT_WORK]
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "until_over", looks)
    with pytest.raises(KeyboardInterrupt):
        control.follow([], lambda rows: rows[0].state, 0)
    assert seen == ["running", "Ctrl-C 1", "Ctrl-C 2", "END"]
    monkeypatch.setattr(control, "until_over", lambda _: [[AT_WORK], [replace(AT_WORK, state="done")]])
    assert control.follow([], lambda rows: rows[0].state, 0)[0].state == "done"
    assert seen[4:] == ["running", "done", "END"]
