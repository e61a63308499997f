"""Every verb that takes runs takes the same names: an experiment's, a sweep's, the end of an id. A
verb that looks at one run takes the newest of several and says so; a verb that acts on several live ones asks."""

import json
import os

import pytest

from hpc_gpt.cli import VerbGroup, verbs
from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.runs.find_runs import Named
from hpc_gpt.launcher.submission import check_submission
from hpc_gpt.launcher.sweep import queue_locally, write_sweep
from tests.cli.command import in_process
from tests.core.runs.test_find import prepared
from tests.made_runs import make_run, metrics_line, unsubmitted_run, with_attempt
from tests.terminal import on_a_terminal

# {verb: what it takes of several runs}, for every verb with RUN.
TAKES = {
    "status": "all", "report": "all", "clean": "all", "compare": "all",
    "logs": "newest", "why": "newest", "top": "newest", "export": "newest",
    "stop": "asks", "save": "asks", "requeue": "asks", "cancel": "asks",
}  # fmt: skip
ACTS = [verb for verb, takes in TAKES.items() if takes == "asks"]


def done_run(folder):
    run = with_attempt(make_run(folder, "local", submit=False, name="x y"), [metrics_line(1)], "done", job_id="7")
    run.attempt(1).log.write_text(f"output of {run.run_id}\n")
    return run


def named(kind: str) -> tuple[str, Named]:
    """(a name of that kind, what it means)."""
    if kind == "experiment":
        return "x y", Named([done_run(logs_dir()) for _ in range(2)], "x y")
    rows = [prepared(row) for row in ("a", "b")]
    sweep = write_sweep("my table", rows, logs_dir(), check_submission(rows, logs_dir()))
    queue_locally(sweep)
    gone = {"pid": os.getpid(), "pid_start": "0"}
    for run in sweep.runs:
        run.add_submission({**run.submissions()[-1], "queue": gone})
        with_attempt(run, [metrics_line(1)], "done", job_id="7").attempt(1).log.write_text(f"output of {run.run_id}\n")
    name = "my table" if kind == "sweep" else sweep.id[-4:]
    return name, Named(sweep.runs, name if kind == "sweep" else f"sweep {sweep.id}")


def test_every_verb_with_runs_is_in_the_table():
    takes = {name for name in verbs() if "RUN is a" in (VerbGroup().get_command(None, name).help or "")}
    assert takes - set(TAKES) == set()


@pytest.mark.parametrize("kind", ["experiment", "sweep", "end of a sweep's id"])
def test_a_name_is_taken_by_every_verb(kind, monkeypatch):
    name, means = named(kind)
    ids, newest = [run.run_id for run in means.runs], means.runs[-1]
    says = f"the newest of the 2 runs of {means.what}, {newest.run_id} of {newest.path.parent.name}:"
    verbs = TAKES if kind in ("experiment", "sweep") else ("report", "status", "why", "cancel")
    for verb, takes in ((verb, TAKES[verb]) for verb in verbs):
        done = in_process(verb, name)
        assert done.code != 5, (verb, done.stderr)
        if takes == "newest":
            assert done.stderr.splitlines()[0] == says, verb
        elif verb in ("stop", "save", "requeue", "cancel"):
            assert f"{verb}: 2 runs of {name} ended before" in done.stderr
        else:
            assert [run_id in done.stdout + done.stderr for run_id in ids] == [True, True], (verb, done)
    assert in_process("logs", name).stdout == f"output of {newest.run_id}\n"
    assert json.loads(in_process("why", name, "--json").stdout)["run"] == newest.run_id
    assert [row["run"] for row in json.loads(in_process("status", name, "--json").stdout)["runs"]] == ids


def live_sweep():
    rows = [prepared(row) for row in ("a", "b")]
    sweep = write_sweep("table", rows, logs_dir(), check_submission(rows, logs_dir()))
    queue_locally(sweep)
    return sweep


@pytest.mark.parametrize("verb", ACTS)
def test_several_live_runs_are_listed_and_asked_for(verb):
    sweep = live_sweep()
    done = in_process(verb, "table", code=2)
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines[:2]] == [run.run_id for run in sweep.runs]
    assert lines[2:] == [
        f"Error: {'cancel would end 2 runs' if verb == 'cancel' else f'{verb} applies to 2 runs that have not ended'}",
        "",
        "hint: --yes takes them all; or name one",
    ]
    in_process(verb, "table", "--json", code=2)
    assert not any(run.cancelled_mark("queue").exists() for run in sweep.runs)
    if verb == "stop":
        code, shown = on_a_terminal("-m", "hpc_gpt", verb, "table", after=f"{verb} these 2? [y/N]", type_in="n\n")
        assert (code, f"{verb}: nothing was done" in shown) == (1, True)
    assert not any(run.cancelled_mark("queue").exists() for run in sweep.runs)
    agreed = in_process(verb, "table", "--yes")
    assert agreed.code == (0 if verb in ("stop", "cancel") else 1), "what waits here has nothing to save"
    assert all(run.cancelled_mark("queue").exists() for run in sweep.runs) == (verb in ("stop", "cancel"))


def test_one_live_run_of_several_is_not_asked_for():
    sweep = live_sweep()
    in_process("cancel", sweep.runs[0].run_id, code=0)
    in_process("cancel", "table", code=0)
    assert sweep.runs[1].cancelled_mark("queue").exists()


@pytest.mark.parametrize("verb", [("why",), ("logs", "--path")])
def test_a_verb_that_looks_takes_the_newest_run(verb):
    unsubmitted_run()
    newest = unsubmitted_run()
    newest.new_attempt().log.write_text("step 1\n")
    done, named = in_process(*verb), in_process(*verb, newest.run_id)
    assert done.stderr.splitlines()[0] == f"the newest run, {newest.run_id} of demo:"
    assert (done.code, done.stdout) == (named.code, named.stdout)
    assert done.stdout
