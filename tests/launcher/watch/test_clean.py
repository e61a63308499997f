"""What `hpc-gpt clean` removes of runs that have ended, and what it never does."""

import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpc_gpt.core.checkpoints.branches import CheckpointHold, is_read, reading, reserved_steps
from hpc_gpt.core.checkpoints.lineage import Parent
from hpc_gpt.core.checkpoints.retention import rename_to_delete
from hpc_gpt.core.files import logs_dir, write_once
from hpc_gpt.core.processes import lock
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, RunFolder
from hpc_gpt.core.runs.work_archive import take_work, unpack_work
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest
from hpc_gpt.launcher.branching import Way, prepare_new_run
from hpc_gpt.launcher.request import Request
from tests.cli.command import as_nobody, error_of, in_process
from tests.made_runs import (
    add_attempt,
    add_checkpoint,
    make_run,
    metrics_line,
    with_attempt,
    with_checkpoints,
    with_job,
)


def ended_run(*steps: int, damaged: tuple[int, ...] = (), ago_s: float = 0.0, logs: Path | None = None) -> RunFolder:
    run = with_attempt(make_run(logs or logs_dir()), [metrics_line(1)], "done", time=time.time() - ago_s)
    return with_checkpoints(run, *steps, damaged=damaged)


def steps_of(run: RunFolder) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.iterdir())


def files_of(run: RunFolder) -> dict[str, bytes]:
    paths = [path for path in run.path.rglob("*") if path.is_file() and path.parent.parent != run.checkpoints]
    return {str(path): path.read_bytes() for path in paths}


def cleaned(*words: object) -> dict:
    done = in_process("clean", *words, "--json", code=0)
    return json.loads(done.stdout)


def why_of(found: dict, run: RunFolder) -> dict[str, str]:
    [row] = [row for row in found["runs"] if row["run"] == run.run_id]
    return {piece["name"]: piece["why"] for piece in row["stays"]} | ({"": row["refused"]} if row["refused"] else {})


def test_all_but_the_last_sound_checkpoint_go_with_yes_alone():
    run = ended_run(10, 20, 30, damaged=(40,))
    before = files_of(run)
    listed = in_process("clean", run.path, code=0)
    assert "  may go  step-00000020  " in listed.stdout
    assert "KiB: a newer sound one stays" in listed.stdout
    assert "  stays   step-00000030  " in listed.stdout
    assert listed.stderr == "nothing was removed: --yes removes the listed files\n"
    assert steps_of(run) == [10, 20, 30, 40]
    found = cleaned(run.path)
    assert (found["removed"], [piece["name"] for piece in found["runs"][0]["goes"]]) == (
        False,
        ["step-00000020", "step-00000010"],
    )
    done = cleaned(run.path, "--yes")
    assert done["removed"]
    assert done["bytes"] == found["bytes"] > 1400
    assert steps_of(run) == [30, 40], "one that is not sound is left to a resumption"
    assert files_of(run) == before
    assert cleaned(run.path, "--yes")["bytes"] == 0


def test_a_checkpoint_of_bad_bytes_is_not_the_one_that_stays():
    run = ended_run(10, 20, 30)
    file = run.checkpoints / "step-00000030" / "weights"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    cleaned(run.path, "--yes")
    assert steps_of(run) == [20, 30]


@pytest.mark.parametrize(("words", "left"), [(["--keep", "none"], []), (["--keep", "2"], [20, 30]),
                                             (["--keep", "9"], [10, 20, 30]), (["--older", "2d"], [10, 20, 30]),
                                             (["--older", "20h"], [30])])  # fmt: skip
def test_how_many_stay_and_of_how_old_a_run(words, left):
    run = ended_run(10, 20, 30, ago_s=86400)
    cleaned(run.path, "--yes", *words)
    assert steps_of(run) == left


def test_of_a_run_that_trains_waits_or_may_nothing_goes():
    trains = make_run(logs_dir())
    line = lock.submission_line(os.getpid(), "1", [], "local")
    trains.add_submission(line)
    add_attempt(trains, [metrics_line(1)], None, job_id="1")
    never, over = make_run(logs_dir(), submit=False), ended_run(1, 2)
    of_slurm = with_attempt(make_run(logs_dir(), "generic-slurm"), [metrics_line(1)], "done")
    for run in (trains, never, of_slurm):
        with_checkpoints(run, 1, 2)
        done = in_process("clean", run.path, "--yes", "--keep", "none")
        assert (done.code, len(error_of(done)[0].splitlines())) == (2, 1), done.stderr
        assert "nothing" not in done.stdout
    found = cleaned(logs_dir(), "--yes")  # of a folder of runs a line is enough
    assert why_of(found, trains) == {"": "it is running"}
    assert "it is not known whether it has ended" in why_of(found, never)[""]
    assert "it is not known whether one of its jobs waits: squeue" in why_of(found, of_slurm)[""]
    assert [steps_of(run) for run in (trains, never, of_slurm, over)] == [[1, 2], [1, 2], [1, 2], [2]]


def test_what_another_run_began_from_stays_while_it_needs_it(tmp_path):
    run = ended_run(10, 20, 30)
    branch, resumed, noted = (make_run(logs_dir()) for _ in range(3))
    for child, step, is_branch in ((branch, 10, True), (resumed, 30, False)):  # without a note in the other's folder
        write_once(child.path / RESUMED_FROM, json.dumps(Parent(run.run_id, str(run.path), step, is_branch).note))
    elsewhere = make_run(tmp_path / "other-logs")  # which no list of this folder has
    CheckpointHold(run, 20, lambda: False).place(elsewhere.path)
    found = cleaned(run.path, "--keep", "none", "--yes")
    assert set(why_of(found, run).values()) == {"a run that began from it has none of its own yet"}
    assert steps_of(run) == [10, 20, 30]
    for child, left in ((branch, [20, 30]), (elsewhere, [30]), (resumed, [])):
        add_checkpoint(child, 40)
        cleaned(run.path, "--keep", "none", "--yes")
        assert steps_of(run) == left
    assert noted.path.exists()


def test_what_is_read_stays():
    run = ended_run(10)
    with reading(run):
        found = cleaned(run.path, "--yes", "--keep", "none")
        assert why_of(found, run) == {"step-00000010": "an export or a submission reads it"}
    note = run.path / "branches" / "reader.gone-1.7.json"
    note.write_text(json.dumps({"host": "gone-1", "pid": 7, "pid_start": "1"}))
    cleaned(run.path, "--yes", "--keep", "none")
    assert steps_of(run) == [10], "what another host's process does is not known"
    os.utime(note, (time.time() - 90000,) * 2)
    cleaned(run.path, "--yes", "--keep", "none")
    assert steps_of(run) == []


def test_a_run_that_resumes_leaves_a_note_in_the_one_it_needs():
    run = ended_run(10, 20)
    request = Request("", None, None, {}, given={"train.log_every": 1})
    prepared = prepare_new_run(run, request, Way.RESUME).prepared
    child = make_run(logs_dir())
    prepared.hold.place(child.path)
    assert reserved_steps(run.path) == {20}


def test_nothing_goes_while_a_resumption_is_submitted(monkeypatch):
    run = ended_run(10, 20)
    seen = []
    monkeypatch.setattr(
        "hpc_gpt.launcher.resumption.choose_resumption", lambda run, *_: seen.append(is_read(run.path)) or 1
    )
    in_process("submit", "--resume", run.path, code=1)
    assert seen == [True]
    assert not is_read(run.path)


def test_what_another_may_be_starting_is_refused(monkeypatch):
    monkeypatch.setattr("hpc_gpt.launcher.watch.clean._REPORT_S", 0.1)
    run = ended_run(10, 20)
    lock.take(run, lock.Holder("gone-1", 7, "1"))
    assert "held by process 7 on gone-1" in in_process("clean", run.path, "--yes", code=1).stderr
    assert steps_of(run) == [10, 20]


def test_what_the_disk_refuses_is_a_line_and_goes_next_time(monkeypatch):
    run = ended_run(10, 20, 30)
    calls = itertools.count()

    def refuse_the_second(path):
        if next(calls):
            raise PermissionError(13, "Permission denied", str(path))
        return rename_to_delete(path)

    with monkeypatch.context() as patch:
        patch.setattr("hpc_gpt.launcher.watch.clean.rename_to_delete", refuse_the_second)
        done = in_process("clean", run.path, "--yes")
    assert done.code == 1
    assert f"{run.checkpoints}/step-00000010: Permission denied\n" in done.stderr
    assert not lock.lock_path(run).exists()
    cleaned(run.path, "--yes")
    assert steps_of(run) == [30]


def test_what_was_cut_off_goes_and_a_program_keeps_its_own():
    run = ended_run(10)
    for name in (".writing-step-00000030", ".deleting-step-00000005-1", ".damaged-step-00000007-1"):
        (run.checkpoints / name).mkdir()
    cleaned(run.path, "--yes")
    assert steps_of(run) == [10]
    others = [ended_run(10) for _ in range(2)]
    for each in others:
        (each.checkpoints / "megatron").mkdir()
        (each.checkpoints / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    (run.checkpoints / "megatron").mkdir()
    (run.checkpoints / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    assert "delete by hand those that you do not need" in why_of(cleaned(run.path, "--yes"), run)[""]
    lines = in_process("clean", run.path, *(each.path for each in others)).stdout.splitlines()
    ids = ", ".join(each.run_id for each in (run, *others))
    assert lines[0].startswith(f"{ids}: nothing is removed: its own program wrote the checkpoints"), "said once"
    assert len(lines) == 2


def of_program(ended: str, lines: object = (), writes: str = "", checkpoints: str | None = None) -> RunFolder:
    """A run of a program of somebody's own in a copy of its folder, in which it `writes` a file."""
    run = make_run(logs_dir())
    (source := Path(tempfile.mkdtemp()) / "code").mkdir()
    (source / "train.py").write_text("pass")
    asked = Experiment(
        engine=Engine("command"),
        layout=LayoutRequest(gpus=1),
        command=Command(run="python train.py", workdir=str(source), checkpoints=checkpoints),
    )
    (run.path / "resolved.json").unlink()
    (run.path / "resolved.json").write_text(resolve(asked, ClusterProfile("local", scheduler="local")).to_json())
    take_work(str(source)).place(run.path)
    work = unpack_work(run.path)
    (work / "__pycache__").mkdir()
    (work / "__pycache__" / "train.pyc").write_text("of Python")
    if writes:
        (work / writes).write_text("weights")
    return with_attempt(run, lines, ended)


def race_of(visits: int) -> RunFolder:
    """A race of 0.4."""
    run = with_attempt(make_run(logs_dir()), [], "error")
    rows = [{"cell": "a", "tokens_per_s": [5.0] * visits}]
    (run.path / "bench.json").write_text(json.dumps({"bench": run.run_id, "records": [], "rows": rows}))
    return run


def cancelled_run() -> RunFolder:
    run = make_run(logs_dir())
    (run.path / "cancelled.4711").touch()
    return run


# A run of each kind, and what of it goes; the table of docs/checkpoints.md says the same.
KINDS = {
    "failed before its first step": (lambda: with_attempt(make_run(logs_dir()), [], "error"), "all"),
    "never began": (lambda: cancelled_run(), "all"),
    "refused": (lambda: refused_run(), "all"),
    "done": (lambda: ended_run(10, 20), "step-00000010"),
    "failed with checkpoints": (
        lambda: with_checkpoints(with_attempt(make_run(logs_dir()), 20, "error"), 10, 20),
        "step-00000010",
    ),
    "failed with steps alone": (lambda: with_attempt(make_run(logs_dir()), 30, "error"), ""),
    "a program failed at once": (lambda: of_program("error"), "all"),
    "a program failed after steps": (lambda: of_program("error", 30), ""),
    "a program wrote a file": (lambda: of_program("error", writes="model.safetensors"), ""),
    "a program changed a file": (lambda: of_program("error", writes="train.py"), ""),
    "a program was stopped": (lambda: of_program("stopped"), ""),
    "a program names its checkpoints": (lambda: of_program("error", checkpoints="out/step-*"), ""),
    "a race without a measurement": (lambda: race_of(0), "all"),
    "a race with measurements": (lambda: race_of(3), ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_of_a_run_of_each_kind(kind: str):
    make, goes = KINDS[kind]
    run = make()
    [row] = cleaned(run.path, "--yes")["runs"]
    assert [piece["name"] for piece in row["goes"]] == ([run.run_id] if goes == "all" else [goes] * bool(goes)), row
    assert run.path.exists() == (goes != "all")
    if row["refused"]:
        assert row["refused"].startswith("its own program wrote "), row


def test_a_folder_that_a_submission_reads_stays():
    run = with_attempt(make_run(logs_dir()), [], "error")
    with reading(run):
        assert why_of(cleaned(run.path, "--yes"), run) == {"": "a submission reads it"}
    assert run.path.exists()
    cleaned(run.path, "--yes")
    assert not run.path.exists()


def refused_run(**line: object) -> RunFolder:
    run = make_run(logs_dir(), "generic-slurm", submit=False)
    run.add_submission({"scheduler": "slurm", "job_id": None, "refused": "Invalid account", **line})
    return run


def test_what_was_refused_goes_whole_and_what_had_a_job_stays():
    refused, trained, lost = refused_run(), refused_run(), refused_run(refused=None, lost="no answer")
    by_then = refused_run()
    by_then.add_submission({"scheduler": "slurm", "job_id": "7", "refused": None})
    with_attempt(trained, [metrics_line(1)], "done")
    runs = (trained, lost, by_then)
    shown = in_process("clean", refused.path, code=0).stdout
    assert f"  may go  {refused.run_id}  " in shown
    assert ": its submission was refused, and nothing was queued\n" in shown
    assert refused.path.exists()
    found = cleaned(logs_dir(), "--yes")
    assert (refused.path.exists(), [run.path.exists() for run in runs]) == (False, [True] * 3)
    assert {row["run"] for row in found["runs"] if row["goes"]} == {refused.run_id}
    assert found["bytes"] > 0
    kept = cleaned(refused_run().path, "--yes", "--older", "1h")
    assert "it ended " in kept["runs"][0]["refused"]


def test_the_sizes_of_a_run_by_kind():
    run = with_checkpoints(with_attempt(make_run(logs_dir()), 8999, "done"), 10)
    sizes = json.loads(in_process("status", run.path, "--sizes", "--json").stdout)["runs"][0]["sizes"]
    assert sizes["checkpoints"] == sum(path.stat().st_size for path in run.checkpoints.rglob("*") if path.is_file())
    shown = in_process("status", run.path, "--sizes")
    assert shown.stderr == "next: hpc-gpt clean RUN lists the files that may go\n"
    assert shown.stdout.splitlines()[0].split()[2:] == ["checkpoints", "logs", "code", "work", "other", "in", "all"]
    run = of_program("error", 30, writes="model.safetensors")
    sizes = json.loads(in_process("status", run.path, "--sizes", "--json").stdout)["runs"][0]["sizes"]
    assert sizes["work"] == len("weights") + len("pass") + len("of Python")


# --- killed, and two at once

_left = itertools.repeat(False)


def _interrupt(event: str, _: object) -> None:
    if event in ("os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree") and next(_left, False):
        os._exit(7)


sys.addaudithook(_interrupt)


def test_killed_at_any_change_it_leaves_what_the_next_finishes():
    for change in itertools.count():
        run = ended_run(10, 20, 30)
        if (child := os.fork()) == 0:
            globals()["_left"] = iter([*[False] * change, True])
            in_process("clean", run.path, "--yes")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert (run.checkpoints / "step-00000030" / "weights").exists()
        cleaned(run.path, "--yes")
        assert steps_of(run) == [30], change
        shutil.rmtree(run.path)
        if code == 0:
            break
    assert change > 8


def test_killed_as_it_removes_a_refused_run_the_next_finishes():
    for change in itertools.count():
        run = refused_run()
        if (child := os.fork()) == 0:
            globals()["_left"] = iter([*[False] * change, True])
            in_process("clean", run.path, "--yes")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if (run.path / "resolved.json").exists():
            cleaned(run.path, "--yes")
            assert not run.path.exists(), change
        shutil.rmtree(run.path, ignore_errors=True)
        if code == 0:
            break
    assert change > 3


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def open_logs(monkeypatch):
    """Logs that every user may change."""
    (folder := Path(tempfile.mkdtemp())).chmod(0o777)
    monkeypatch.setenv("HPC_GPT_LOGS", str(folder))
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_two_users_at_once_remove_it_once(open_logs):
    runs = [ended_run(*range(10, 200, 10), logs=open_logs) for _ in range(4)]
    for path in (open_logs, *open_logs.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    in_process("clean", open_logs)  # imports all that is needed
    if (other := os.fork()) == 0:
        os._exit(as_nobody("clean", open_logs, "--yes").code)
    own = in_process("clean", open_logs, "--yes")
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
    assert own.code == 0, own.stderr
    for run in runs:
        assert steps_of(run) == [190]
        assert not lock.lock_path(run).exists()


@needs_root
def test_what_is_anothers_is_its_owners_to_cancel_and_clean(open_logs):
    job = with_job(make_run(open_logs, "generic-slurm", submit=False), "4711")
    done = as_nobody("cancel", job.path, "--yes")
    assert done.code == 1
    assert "Permission denied" in done.stderr
    assert "it belongs to root, who can cancel it" in done.stderr
    assert "scancel" not in done.stderr
    run = ended_run(10, 20, logs=open_logs)
    done = as_nobody("clean", run.path, "--yes")
    said = f"{run.run_id}: Permission denied: it belongs to root, who can clean it\n"
    assert (done.code, done.stderr) == (1, said)
    assert steps_of(run) == [10, 20]
