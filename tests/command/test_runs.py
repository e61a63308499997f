"""Programs of one's own on this machine: ended in every way, taken up again, watched, and refused."""

import json
import os
import platform
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.files import read_json
from hpc_gpt.core.process import is_alive
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.around import around, events_of, named
from tests.cli.command import error_of, hpc_gpt, in_process
from tests.command.mine import experiment, kill, loss_of_loop, losses, processes
from tests.conftest import REPOSITORY
from tests.launcher.local.conftest import ended, newest, nothing_left
from tests.made_runs import read_run
from tests.processes import send
from tests.programs import put, ran
from tests.waiting import wait_for

__all__ = ["nothing_left"]  # a fixture, found by its name
GPUS = {"layout": {"gpus": 2}}


def start(path: Path, *more: object, **variables: str) -> RunFolder:
    in_process("submit", path, "--cluster", "local", *more, environment=variables, code=0)
    return newest()


def resume(run: RunFolder, **variables: str) -> None:
    hpc_gpt("submit", "--resume", run.run_id, environment=variables, code=0)


def step(run: RunFolder, attempt: int = 1) -> int:
    return int(run.attempt(attempt).last_metrics().get("step") or 0)


def test_a_killed_loop_goes_on_from_its_checkpoint_as_unbroken(tmp_path: Path) -> None:
    told = tmp_path / "told"
    once = (*around(told), "--set", "job.restart_in_job=false")
    run = start(experiment(tmp_path, "loop", tables=GPUS), *once, STEPS="30", WAITS_AT="13")
    wait_for("step 13", lambda: step(run) == 13)
    kill(run, "loop.sh")
    status = ended(run)
    assert (status.state, status.steps) == ("error", 30)  # the N of its lines
    killed = "was ended by SIGKILL, by hand or by the kernel's memory killer"
    assert status.cause == f"rank 0: bash loop.sh on {platform.node()} {killed}"
    why = in_process("why", run.run_id).stdout
    assert f"node     {platform.node()}\n" in why
    assert "read the kernel's log of" in why
    resume(run, STEPS="30")
    assert ended(run).state == "done"
    assert losses(run) == {step: loss_of_loop(step) for step in range(1, 31)}
    assert run.attempt(2).trainer()["resumed_step"] == 10
    record = read_run(run)
    assert (record.engine, record.gpus) == ("command", 2)
    assert (record.tp, record.global_batch, record.params) == (None, None, None)
    assert record.step_s > 0.04
    assert (record.loss_first, record.loss_last) == (4.0, loss_of_loop(30))
    wait_for("four events", lambda: told.read_text().count("\n") == 4, told.read_text)
    events = events_of(run, told)
    assert named(events, "ended", "step", "steps", "hours_left", "next")[1::2] == [
        ("failed", 1, "error", 13, None, None, "no other attempt"),
        ("ended", 2, "done", 30, None, 0.0, "no other attempt"),
    ]
    assert events[1]["cause"] == status.cause
    assert named(events, "ended", "cause", "next")[::2] == [
        ("first_step", number, None, None, "it trains") for number in (1, 2)
    ]
    assert events[3]["loss"] == loss_of_loop(30)


@pytest.mark.long
def test_a_log_without_step_numbers_shows_its_last_loss(tmp_path: Path) -> None:
    path = experiment(tmp_path, "epochs", {"run": "for e in 4 3 2; do echo epoch $e, loss: $e.5; done"}, GPUS)
    run = start(path)
    status = ended(run)
    assert (status.state, status.step, status.loss) == ("done", None, 2.5)
    assert "2.5000" in in_process("status", run.run_id).stdout


@pytest.mark.long(but="first")
@pytest.mark.parametrize("stop_signal", ["TERM", "USR1"])
def test_stop_sends_the_signal_and_waits_for_the_programs_save(tmp_path: Path, stop_signal: str) -> None:
    run = start(experiment(tmp_path, "loop", {"stop_signal": stop_signal}, GPUS), STEPS="10000")
    wait_for("step 3", lambda: step(run) >= 3)
    assert "your own program decides when it saves" in in_process("save", run.run_id).stderr
    done = in_process("stop", run.run_id, "--wait", code=0)
    assert f": asked to end by SIG{stop_signal}\n" in done.stdout
    end = run.attempt(1).ended()
    assert (end["ended"], end["cause"]) == ("stopped", "hpc-gpt stop; the program ended with exit code 3")
    saved = max(int(path.name.rpartition("-")[2]) for path in (run.path / "work" / "out").iterdir())
    assert saved == end["step"]
    resume(run, STEPS=str(saved + 4))
    assert ended(run).state == "done"
    assert min(json.loads(line)["step"] for line in run.attempt(2).metrics.read_text().splitlines()) == saved + 1
    assert losses(run) == {step: loss_of_loop(step) for step in range(1, saved + 5)}


@pytest.mark.long
def test_the_limit_is_walltime_for_a_shell_it_ends_first_too(tmp_path: Path) -> None:
    # `bash -c` of two commands dies at once of SIGTERM; its program saves for a second more.
    run = start(experiment(tmp_path, "loop", {"run": "true; bash loop.sh"}, GPUS), STEPS="10000")
    wait_for("step 3", lambda: step(run) >= 3)
    os.kill(read_json(run.attempt(1).ranks / "0.json")["pid"], signal.SIGUSR2)
    assert ended(run).state == "walltime"
    end = run.attempt(1).ended()
    assert (run.path / "work" / "out" / f"ckpt-{step(run)}" / ".done").exists()
    assert "the time limit is near" in end["cause"]


def test_a_program_that_does_not_end_is_killed_after_the_lead(tmp_path: Path) -> None:
    deaf = "trap '' TERM; echo step 1 loss 2.0; while true; do sleep 0.1; done"
    run = start(experiment(tmp_path, "deaf", {"run": deaf, "per": "job"}, {"job": {"signal_lead_s": 2}, **GPUS}))
    wait_for("its step", lambda: step(run) == 1)
    mine = processes(run, "sleep 0.1;")
    in_process("stop", run.run_id, "--wait", code=0)
    assert run.attempt(1).ended()["cause"] == (
        "hpc-gpt stop; the program was killed: SIGTERM had not ended it after 2 s"
    )
    assert not any(is_alive(pid, started) for pid, started in mine.items())


@pytest.mark.long
def test_a_program_that_no_signal_ends_is_not_asked(tmp_path: Path) -> None:
    run = start(experiment(tmp_path, "loop", {"stop_signal": "none"}, GPUS), STEPS="1000")
    wait_for("its first step", lambda: step(run) >= 1)
    for verb in ("stop", "save"):
        done = in_process(verb, run.run_id, code=1)
        assert ("stop_signal is none" if verb == "stop" else "decides when it saves") in done.stdout + done.stderr
    mine = processes(run, "loop.sh")
    assert mine
    in_process("cancel", run.run_id, code=0)
    assert ended(run).state == "cancelled"
    wait_for("the end of all", lambda: not any(is_alive(pid, started) for pid, started in mine.items()))


@pytest.mark.long
def test_a_cancel_that_ends_the_program_first_is_no_error(tmp_path: Path) -> None:
    run = start(experiment(tmp_path, "loop", {}, GPUS), STEPS="10000")
    wait_for("its first step", lambda: step(run) >= 1)
    run.mark_cancelled(str(run.attempt(1).started()["job_id"]))
    for pid in processes(run, "loop.sh"):
        send(pid, signal.SIGTERM)  # and none to the supervisor: its own may come later
    end = wait_for("its end", run.attempt(1).ended)
    assert (end["ended"], end["cause"]) == ("cancelled", "SIGTERM; the program ended with exit code 3")
    assert ended(run).state == "cancelled"


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("nanogtp --help", "nanogtp: command not found on "),
        (["nanogtp", "--help"], "no program nanogtp on "),
        (["./work", "x"], "no program ./work on "),
        ("./model.py", "./model.py: Permission denied on "),
    ],
)
def test_a_program_that_is_not_there_is_the_users_mistake(tmp_path: Path, command: Any, cause: str) -> None:
    run = start(experiment(tmp_path, "gone", {"run": command, "per": "job"}, GPUS))
    status = ended(run)
    assert (status.state, status.cause) == ("user_error", f"rank 0: {cause}{platform.node()}")


@pytest.mark.long
def test_a_port_that_another_process_takes_first_is_named(tmp_path: Path) -> None:
    """Whoever takes it in between listens when the program binds it."""
    binds = "import os, socket; address = '127.0.0.1', int(os.environ['MASTER_PORT'])"
    lines = [sys.executable, "-c", f"{binds}; taken = socket.create_server(address); socket.create_server(address)"]
    run = start(experiment(tmp_path, "meet", {"run": lines, "per": "job"}, GPUS))
    status = ended(run)
    port = run.attempt(1).rendezvous.read_text().split()[1]
    assert status.state == "port_taken"
    assert port in status.cause
    assert "retry    yes\n" in in_process("why", run.run_id).stdout


@pytest.mark.long
def test_options_that_change_nothing_resume_the_run_itself(tmp_path: Path) -> None:
    run = start(experiment(tmp_path, "fails", {"run": "exit 3", "per": "job"}, GPUS))
    ended(run)
    for options in (("--wait",), ("--wait", "--cluster", "local", "--gpus", 2)):
        done = in_process("submit", "--resume", run.run_id, *options)
        assert "its checkpoints stay with its run" not in done.stderr
        assert f"started {run.run_id} as process " in done.stdout
    assert len(run.attempts()) == 3
    assert (in_process("submit", "--resume", run.run_id, "--wait", "--gpus", 1).code, len(run.attempts())) == (2, 3)


def test_the_environment_of_each_task(tmp_path: Path) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK HPC_GPT_RUN HPC_GPT_ATTEMPT HPC_GPT_CHECKPOINTS GPUS_PER_NODE NNODES"
    show = f'for name in {names} PYTHONSAFEPATH PYTHONPATH; do echo "$name=${{!name:-}}"; done >"$1/env-$RANK"'
    ends = 'until [ "$RANK" = 0 ] || [ -e "$1/attempts/1/over/0" ]; do sleep 0.1; done; exit "$((RANK * 7))"'
    lines = ["bash", "-c", f'{show}; [ -n "$MASTER_PORT" ] && {{ {ends}; }}', "x", "{run}"]
    run = start(experiment(tmp_path, "env", {"run": lines, "per": "gpu", "setup": ["export RANK=$RANK"]}, GPUS))
    status = ended(run)
    # Rank 0 has long ended with 0: rank 1's failure counts all the same.
    assert (status.state, status.cause) == ("error", "rank 1: bash ended with exit code 7")
    for rank in ("0", "1"):
        found = dict(line.split("=", 1) for line in (run.path / f"env-{rank}").read_text().splitlines())
        assert [found[name] for name in names.split()] == [
            rank, "2", rank, str(run.path), "1", str(run.checkpoints), "2", "1",
        ]  # fmt: skip
        assert found["PYTHONSAFEPATH"] == ""
        assert str(run.path / "code.zip") not in found["PYTHONPATH"]
    assert [path.name for path in run.attempt(1).heartbeats.iterdir()] == ["all.jsonl"]
    assert len([*run.path.rglob("*")]) < 100, "a file is an inode of the user's quota"


def test_a_silent_program_hangs_only_past_what_it_may_be_silent(tmp_path: Path) -> None:
    # A rank beats, and is taken for silent, by the floor of a hang, which is no limit of what prints no steps.
    tables = {**GPUS, "train": {"hang_floor_s": 3}}
    run = start(experiment(tmp_path, "quiet", {"run": "sleep 3600", "per": "job", "hang_s": 2.0}, tables))
    assert ended(run).state == "hang"
    stacks = run.attempt(1).stacks / "0.txt"
    wait_for("its stacks", stacks.exists)
    assert "sleep 3600" in stacks.read_text()
    wait_for("its program's end", lambda: not processes(run, "sleep"))


def test_a_pattern_reads_any_program_and_a_model_gives_its_flops(tmp_path: Path) -> None:
    shown = r"""for n in 1 2 3 4 5 6; do echo "[$n] L=$n.5 t=200"; done"""
    pattern = r"\[(?P<step>\d+)\] L=(?P<loss>\S+) t=(?P<step_ms>\d+)"
    tables = {
        "model": {"hidden": 64, "layers": 2, "heads": 4, "vocab": 256, "seq": 32},
        "layout": {"gpus": 2, "tp": 2, "micro_batch": 4, "global_batch": 8},
        "train": {"dtype": "fp32", "steps": 6},
    }
    run = start(experiment(tmp_path, "own", {"run": shown, "per": "job", "pattern": pattern}, tables))
    status = ended(run)
    assert (status.state, status.step, status.steps) == ("done", 6, 6)
    record = read_run(run)
    assert (record.step_s, record.tokens_per_s) == (pytest.approx(0.2), pytest.approx(8 * 32 / 0.2))
    assert record.tokens_total == 6 * 8 * 32
    assert (record.tp, record.dp, record.params) == (2, 1, run.resolved().model.params)
    assert record.tflops_model > 0


def test_a_run_keeps_its_folders_files_but_those_git_ignores(tmp_path: Path) -> None:
    run_line = 'cat note; ls; [ -x tool.sh ] && ./tool.sh; echo more >>note; cat "$HPC_GPT_WORKDIR/data/big"'
    path = experiment(tmp_path, "kept", {"run": run_line, "per": "job"}, GPUS)
    work = tmp_path / "work"
    (work / "note").write_text("as submitted\n")
    put(work / "tool.sh", "#!/bin/bash\necho tool ran\n")
    (work / "data").mkdir()
    (work / "data" / "big").write_text("data in place\n")
    (work / ".gitignore").write_text("data/\n")
    in_process("render", path, "--cluster", "local", code=0)
    shown = in_process("submit", path, "--cluster", "local", "--dry-run").stdout
    assert "not in the copy, as git ignores it: data 0.01 KiB" in shown
    assert '[command] link = ["data"]' in shown
    run = start(path)
    (work / "note").write_text("edited later\n")
    assert ended(run).state == "done"
    log = run.attempt(1).log.read_text()
    assert "as submitted" in log
    assert "tool ran" in log
    assert "data in place" in log
    assert not (run.path / "work" / "data").exists()
    assert read_json(run.path / "provenance.json")["work_sha256"]
    resumed = in_process("submit", "--resume", run.run_id)
    assert error_of(resumed)[0] == f"run {run.run_id} is done: its program has ended"


def test_a_folder_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    path = experiment(tmp_path, "large", {"run": "true", "per": "job"}, GPUS)
    for number in range(7):
        with (tmp_path / "work" / f"w{number}.bin").open("wb") as file:
            file.truncate((10 + number) << 20)
    message, hint = error_of(in_process("submit", path, "--cluster", "local"))
    assert "above the 64 MiB" in message
    largest = ", ".join(f"w{number}.bin {10 + number}.0 MiB" for number in (6, 5, 4, 3, 2))
    assert message.endswith(f"the largest: {largest}")
    assert ".gitignore" in hint
    in_process("submit", path, "--cluster", "local", "--set", "command.snapshot=false", "--dry-run", code=0)


@pytest.mark.long
def test_without_a_snapshot_it_runs_in_its_folder_with_no_past(tmp_path: Path) -> None:
    path = experiment(tmp_path, "loop", {"snapshot": False}, GPUS)
    (old := tmp_path / "work" / "out" / "ckpt-99").mkdir(parents=True)
    (old / "step").write_text("99\n")
    (old / ".done").touch()
    for entry in (old, tmp_path / "work" / "out"):
        os.utime(entry, (time.time() - 3600, time.time() - 3600))
    run = start(path, STEPS="10")
    assert ended(run).state == "done"
    assert sorted(losses(run)) == list(range(1, 11))
    assert (tmp_path / "work" / "out" / "ckpt-10" / ".done").exists()
    assert not (run.path / "work").exists()


@pytest.mark.long
def test_a_sweep_of_commands_has_its_table_and_its_difference(tmp_path: Path) -> None:
    path = experiment(tmp_path, "loop", tables=GPUS)
    rows = '[rows]\n"three" = { train.steps = 3 }\n"four" = { command.run = "STEPS=4 bash loop.sh" }\n'
    path.write_text(path.read_text() + rows)
    in_process("submit", path, "--sweep", "--cluster", "local", "--wait", environment={"STEPS": "3"}, code=0)
    three, four = (next((Path(os.environ["HPC_GPT_LOGS"]) / f"loop-{row}").iterdir()) for row in ("three", "four"))
    shown = in_process("report", path, "--json")
    assert [row["loss_last"] for row in json.loads(shown.stdout)["records"]] == [loss_of_loop(3), loss_of_loop(4)]
    assert "command.run  bash loop.sh -> STEPS=4 bash loop.sh" in in_process("compare", three, four).stdout
    in_process("doctor", path, "--row", "four", "--cluster", "local", code=0)


@pytest.mark.long
def test_its_checkpoints_stay_in_its_run(tmp_path: Path) -> None:
    run = start(experiment(tmp_path, "loop", tables=GPUS), STEPS="10")
    assert ended(run).state == "done"
    other = in_process("submit", "--resume", run.run_id, "--gpus", "1", code=2)
    assert "its checkpoints stay with its run" in error_of(other)[0]
    assert "which hpc-gpt does not read" in hpc_gpt("export", run.run_id, "--out", tmp_path / "hf").stderr


@pytest.mark.long
def test_a_script_says_what_it_starts_and_plain_bash_runs_it(tmp_path: Path) -> None:
    path = experiment(tmp_path, "loop", tables=GPUS)
    script = in_process("render", path, "--cluster", "local").stdout
    (tmp_path / "job.sh").write_text(script)
    done = ran(
        "bash",
        tmp_path / "job.sh",
        env={**os.environ, "STEPS": "3", "HPC_GPT_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)},
        code=0,
    )
    assert "done at step 3" in done.stdout
    assert sorted(losses(newest())) == [1, 2, 3]


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("run_line", "state", "words"),
    [
        ('for n in 1 2 3; do echo "step $n/9 loss 1.0"; done', "error", "ends by itself at 3 of 9 steps"),
        ("true", "error", "ends by itself at 0 of 7 steps"),
        (
            'echo "step 3/9 loss 1.0"; echo "[exiting program after 1180.2 minutes] datetime: 2026-01-02 03:04:05"',
            "walltime",
            "exiting program after 1180.2 minutes, at 3 of 9 steps",
        ),
        ('for n in 1 2 3; do echo "step $n/3 loss 1.0"; done', "done", "3 of 3 steps"),
        ('for n in 1.0 nan nan; do echo "step $((++i))/3 loss $n"; done', "nan", "nan since step 2; 3 of 3 steps"),
        ('for n in 1.0 nan nan; do echo "step $((++i))/9 loss $n"; done; exit 3', "nan", "nan since step 2; rank 1: "),
    ],
)
def test_a_program_is_done_only_after_its_last_step(tmp_path: Path, run_line: str, state: str, words: str) -> None:
    tables = {**GPUS, "train": {"steps": 7}} if run_line == "true" else GPUS
    # Of two tasks the second one prints the steps.
    run_line = f'[ "$RANK" = 0 ] || {{ {run_line}; }}'
    run = start(experiment(tmp_path, "short", {"run": run_line}, tables))
    status = ended(run)
    assert status.state == state
    assert words in str(run.attempt(1).ended()["cause"])
    assert words in in_process("why", run.run_id).stdout


@pytest.mark.long
def test_a_file_git_ignores_is_not_found_and_why_names_the_line(tmp_path: Path) -> None:
    path = experiment(tmp_path, "data", {"run": "cat data/train.bin", "per": "job"}, GPUS)
    (tmp_path / "work" / "data").mkdir()
    (tmp_path / "work" / "data" / "train.bin").write_text("tokens\n")
    (tmp_path / "work" / ".gitignore").write_text("*.bin\n")
    run = start(path)
    assert ended(run).state == "error"
    line = 'add [command] link = ["data"], and submit again'
    assert f"work/data/train.bin, so the run's copy lacks it: {line}" in (in_process("why", run.run_id).stdout)
    run = start(path, "--set", 'command.link=["data"]')
    assert ended(run).state == "done"
    assert "tokens" in run.attempt(1).log.read_text()


@pytest.mark.long
def test_a_killed_torchrun_worker_has_its_rank_and_signal(tmp_path: Path) -> None:
    worker = """import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3600)
"""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "worker.py"]
    path = experiment(tmp_path, "torchrun", {"run": line, "per": "node"}, GPUS)
    (tmp_path / "work" / "worker.py").write_text(worker)
    run = start(path)
    status = ended(run)
    killed = "was ended by SIGKILL, by hand or by the kernel's memory killer"
    assert (status.state, status.cause) == ("error", f"rank 1 on {platform.node()} {killed}")
    shown = in_process("why", run.run_id).stdout
    assert "rank     1\n" in shown
    assert "read the kernel's log of" in shown


@pytest.mark.long
def test_a_full_disk_under_a_program_has_its_figures(tmp_path: Path) -> None:
    line = "echo step 1 loss 2.0; echo x >/dev/full"
    run = start(experiment(tmp_path, "full", {"run": line, "per": "job"}, GPUS))
    status = ended(run)
    assert status.state == "disk_full"
    assert re.search(r"No space left on device.* \([\d.]+ of [\d.]+ GiB free in /", str(status.cause))
    assert step(run) == 1
