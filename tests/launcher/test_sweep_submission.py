"""What becomes of the rows that are handed to Slurm, and of those behind one that it does not take; without Slurm."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable
from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.slurm.directives import script_directives
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.render import array_script, render_script
from hpc_gpt.launcher.submission import check_submission, faults_of_rows
from hpc_gpt.launcher.sweep import SubmittedSweep, group_alike, plan_jobs, queue_sweep, write_sweep


def prepared(row: str, time: str, cluster: str = "generic-slurm") -> PreparedRun:
    settings = load_experiment("demo", {"name": f"table-{row}", "data.source": "random", "job.time": time})
    resolved = resolve(settings, load_profile(cluster))
    resolved = type(resolved)(**{**vars(resolved), "sweep": "table", "row": row})
    return PreparedRun(resolved, render_script(resolved), "")


# a, c and e ask for the same, as do b and d.
TIMES = {"a": "1:00:00", "b": "2:00:00", "c": "1:00:00", "d": "2:00:00", "e": "1:00:00", "f": "3:00:00"}
ROWS = [prepared(row, time) for row, time in TIMES.items()]


@pytest.fixture
def sweep() -> SubmittedSweep:
    rows = [prepared(row, time, "local") for row, time in TIMES.items()]
    sweep = write_sweep("table", rows, logs_dir(), check_submission(rows, logs_dir()))
    sweep.largest = 100
    return sweep


class Sbatch:
    """Stands for Slurm: takes each job, but for the fault that it holds for the n-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **faults: Exception) -> None:
        self.faults = faults
        self.taken: list[tuple[list[str], int | None]] = []
        self.after: list[str | None] = []
        self.count = 0
        monkeypatch.setattr("hpc_gpt.launcher.executor.submit_array", self.array)
        monkeypatch.setattr("hpc_gpt.launcher.sweep.start_run", self.single)
        monkeypatch.setattr("hpc_gpt.launcher.sweep.check_start", lambda resolved, script: "")

    def array(self, folder: Any, resolved: Any, runs: Any, at_once: int | None, after: str | None) -> str:
        self.after.append(after)
        assert (folder / "array.sh").exists()
        assert [(folder / str(n)).resolve() for n in range(len(runs))] == [run.path.resolve() for run in runs]
        return self._take(runs, at_once)

    def single(self, run: Any, resolved: Any, jobs: int) -> Any:
        assert run.resolved().row == resolved.row
        return SimpleNamespace(job_id=self._take([run], None))

    def _take(self, runs: Any, at_once: int | None) -> str:
        self.count += 1
        if fault := self.faults.get(f"n{self.count}"):
            raise fault
        self.taken.append(([run.resolved().row for run in runs], at_once))
        return str(4700 + self.count)


def refusals(sweep: SubmittedSweep) -> dict[str, str]:
    return {str(run.resolved().row): run.submissions()[-1]["refused"] for run in sweep.runs if list(run.submissions())}


def test_rows_alike_are_one_array_an_odd_row_a_single_job(sweep, monkeypatch) -> None:
    sbatch = Sbatch(monkeypatch)
    queue_sweep(sweep, ROWS, at_once=2)
    assert sbatch.taken == [(["a", "c", "e"], 2), (["b", "d"], 2), (["f"], None)]
    assert [job.id for job in sweep.jobs] == ["4701", "4702", "4703"]
    assert [[run.resolved().row for run in job.runs] for job in sweep.jobs] == [["a", "c", "e"], ["b", "d"], ["f"]]
    assert [[row.resolved.row for row in job] for job in plan_jobs(ROWS)] == [["a", "c", "e"], ["b", "d"], ["f"]]
    assert refusals(sweep) == {}


def test_an_array_is_no_larger_than_the_cluster_lets_it_be(sweep, monkeypatch) -> None:
    sbatch = Sbatch(monkeypatch)
    sweep.largest = 2
    queue_sweep(sweep, ROWS)
    assert sorted(rows for rows, _ in sbatch.taken) == [["a", "c"], ["b", "d"], ["e"], ["f"]]


def test_so_many_at_once_holds_over_the_arrays_of_rows_alike(sweep, monkeypatch) -> None:
    sbatch = Sbatch(monkeypatch)
    sweep.largest = 2
    queue_sweep(sweep, ROWS, at_once=2)
    assert sbatch.taken == [(["a", "c"], 2), (["e"], 2), (["b", "d"], 2), (["f"], None)]
    assert sbatch.after == [None, "4701", None]


def test_what_sbatch_refuses_is_kept_and_the_rest_goes_on(sweep, monkeypatch) -> None:
    sbatch = Sbatch(monkeypatch, n1=JobRefused("no such account", "ask"), n3=JobRefused("too long", "shorter"))
    queue_sweep(sweep, ROWS)
    assert sbatch.taken == [(["b", "d"], None)]
    assert [str(fault) for fault in sweep.refusals] == ["rows 'a', 'c', 'e': no such account", "row 'f': too long"]
    assert [fault.hint for fault in sweep.refusals] == ["ask", "shorter"]


@pytest.mark.parametrize("fault", [SlurmUnreachable("slurmctld is away", "wait"), KeyboardInterrupt()])
def test_rows_after_slurm_went_away_are_refused_and_no_others(sweep, monkeypatch, fault) -> None:
    Sbatch(monkeypatch, n2=fault)
    with pytest.raises(type(fault)):
        queue_sweep(sweep, ROWS)
    assert [job.id for job in sweep.jobs] == ["4701"]
    # Its own rows, b and d, are marked where sbatch is asked.
    assert refusals(sweep) == {"f": str(fault) or "Ctrl-C"}


def test_a_fault_of_many_rows_is_told_once():
    alike = {f"r{number}": ConfigError("train.steps is x", "use a number") for number in range(5)}
    told = faults_of_rows(alike | {"last": ConfigError("pp 2 cannot run", "use --pp 1")}, 6)
    assert str(told).splitlines() == [
        "rows 'r0', 'r1', 'r2' and 2 more: train.steps is x",
        "row 'last': pp 2 cannot run",
    ]
    assert told.hint == "use a number; use --pp 1"


# --- arrays


def script(name: str, *directives: str) -> str:
    lines = [f"#SBATCH --job-name={name}", *(f"#SBATCH {directive}" for directive in directives)]
    return "\n".join(["#!/bin/bash", *lines, "", "# more", f"echo {name}", "#SBATCH --nodes=77", ""])


def test_scripts_alike_but_for_the_name_are_one_array():
    scripts = [script("a", "--nodes=2"), script("b", "--nodes=3"), script("c", "--nodes=2")]
    assert script_directives(scripts[0]) == ["--job-name=a", "--nodes=2"], "they end at the first command"
    assert group_alike(scripts, 10) == [[0, 2], [1]]
    text = array_script("the 'table'", [scripts[0], scripts[2]])
    assert script_directives(text) == ["--job-name='the '\"'\"'table'\"'\"''", "--nodes=2"]
    assert script_directives(array_script("table", [scripts[0]] * 2))[0] == "--job-name=a"


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 7))
def test_every_script_is_in_one_group_of_its_like(kinds, largest):
    scripts = [script(str(number), f"--nodes={kind}") for number, kind in enumerate(kinds)]
    groups = group_alike(scripts, largest)
    assert sorted(number for group in groups for number in group) == list(range(len(kinds)))
    assert all(len(group) <= largest for group in groups)
    assert all(len({kinds[number] for number in group}) == 1 for group in groups)
    assert len(groups) == sum(-(-kinds.count(kind) // largest) for kind in set(kinds))
