"""hpc-gpt why: our own runs in every state, anyone's logs, and what must not be shown."""

import json
import os
import time
from pathlib import Path

import pytest

from hpc_gpt.core.ends.failures import ENDED, advice
from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.runs.attempt_cause import read_cause
from hpc_gpt.report.log_lines import last_lines, lines_around
from tests.cli.command import error_of, in_process
from tests.made_runs import add_attempt, metrics_line, unsubmitted_run, with_job
from tests.reader.made_logs import OOM, TIME_LIMIT, WORLD, step, timeout

KEYS = {
    "schema", "run", "name", "job_id", "ended", "cause", "rank", "node", "failed_node", "file", "line", "sure", "lines",
    "retry", "means", "to_do", "exclude", "chain", "notes", "attempts", "unread", "status",
}  # fmt: skip


def submitted(cluster: str = "local") -> RunFolder:
    return with_job(unsubmitted_run(cluster), "4711")


def why(name: object, *more: object, code: int = 0) -> str:
    done = in_process("why", name, *more)
    assert (done.code, "Traceback" in done.stderr) == (code, False), done.stderr
    return done.stdout


def why_json(*names: object, code: int = 0) -> dict:
    found = json.loads(why(*names, "--json", code=code))
    assert (set(found), found["schema"]) == (KEYS, 1)
    return found


# --- our own runs

LOST = "rank 0 lost another rank: RuntimeError: Read error: Connection reset by peer"
KILL = "rank 1 on l2 was ended by SIGKILL, by hand or by the kernel's memory killer (srun: l2: task 1: Killed)"
SRUN = (
    "srun: error: l2: task 1: Killed",
    "srun: launch/slurm: _step_signal: Terminating StepId=4711.0",
    "slurmstepd-l1: error: *** STEP 4711.0 ON l1 CANCELLED AT 2026-11-23T03:17:32 ***",
    "srun: error: l1: task 0: Killed",
    "srun: Force Terminated StepId=4711.0",
)
REQUEUED = "slurmstepd-l1: error: *** JOB 4711 ON l1 CANCELLED AT 2026-11-23T03:17:38 DUE TO JOB REQUEUE ***\n"


def test_a_rank_that_was_killed_is_the_one_that_is_told() -> None:
    """Not the one that lost its connection to it, whose words are all that the log has."""
    run = submitted()
    words = "rank 1 on r6 was ended by SIGKILL, by hand or by the kernel's memory killer"
    attempt = add_attempt(run, [metrics_line(1)], "error", cause=words)
    attempt.log.write_text(f"step 1\n{LOST}\n{words}\n")
    found = why_json(run.run_id)
    assert (found["ended"], found["cause"], found["rank"], found["node"]) == ("error", words, 1, "r6")
    assert (found["file"], found["line"]) == (str(attempt.log), 3)
    assert found["attempts"][0]["followed"]["count"] == 1
    assert "the kernel's log of r6" in found["to_do"]
    assert f"> 3 | {words}" in why(run.run_id)


def test_without_a_line_of_the_kill_what_followed_is_shown() -> None:
    run, words = submitted(), "rank 1 was ended by SIGKILL, by hand or by the kernel's memory killer"
    attempt = add_attempt(run, [metrics_line(1)], "error", cause=words)
    attempt.log.write_text(f"step 1\n{LOST}\n")
    found = why_json(run.run_id)
    assert found["cause"] == words
    assert (found["rank"], found["file"]) == (1, None)
    assert f"  2 | {LOST}" in why(run.run_id)
    attempt.log.write_text("step 1\nstep 2\n")
    assert "  2 | step 2" in why(run.run_id)


def requeued_after_a_kill(words: str) -> RunFolder:
    """A run of two nodes whose rank 1 was killed, and that its own script has put back into the queue."""
    run = submitted("generic-slurm")
    attempt = add_attempt(run, [metrics_line(1)], "error", cause=words, node_list="l[1-2]")
    attempt.log.write_text("\n".join(["step 1", LOST, *SRUN, "back to the queue: scontrol requeue 4711"]) + "\n")
    verdict = {"go_on": True, "ended": "error", "attempt_ended": "error", "why": words, "cause": words, "pause_s": 30.0}
    write_once(attempt.folder / "next.json", json.dumps({**verdict, "retries": 1, "begin": time.time() + 3600}))
    begun = f"run folder {run.path}, attempt 1, output in attempts/1/log\n"
    (run.path / "slurm-4711.out").write_text(begun + REQUEUED)
    return run


@pytest.mark.parametrize("words", [KILL, "task 1: Killed"], ids=["ours", "srun"])
def test_our_own_requeue_is_no_cause(words: str) -> None:
    run = requeued_after_a_kill(words)
    found = why_json(run.run_id)
    assert found["cause"] == (KILL if words == KILL else KILL.partition(" (srun")[0])
    assert (found["rank"], found["node"], found["failed_node"], found["exclude"]) == (1, "l2", None, None)
    assert (found["file"], found["line"]) == (str(run.attempt(1).log), 3)
    assert "REQUEUE" not in why(run.run_id)
    # While the second attempt runs, the kill is its history.
    add_attempt(run, [metrics_line(2)], None, node_list="l[1-2]")
    with (run.path / "slurm-4711.out").open("a") as out:
        out.write(f"run folder {run.path}, attempt 2, output in attempts/2/log\n")
    found = why_json(run.run_id)
    assert (found["ended"], found["cause"], found["attempts"][1]["others"]) == ("running", None, [])
    assert found["attempts"][0]["rank"] == 1


def test_a_requeue_that_slurm_made_is_one() -> None:
    run = submitted("generic-slurm")
    add_attempt(run, [metrics_line(1)], None).log.write_text("step 1\n")
    add_attempt(run, [metrics_line(2)], None)
    begun = [f"run folder {run.path}, attempt {number}, output in attempts/{number}/log\n" for number in (1, 2)]
    (run.path / "slurm-4711.out").write_text(begun[0] + REQUEUED + begun[1])
    first, second = why_json(run.run_id)["attempts"]
    assert (first["ended"], first["line"], second["line"]) == ("requeued", 2, None)


def test_after_a_later_cancel_the_kill_is_history() -> None:
    run = requeued_after_a_kill(KILL)
    run.mark_cancelled("4711")
    when = json.loads(run.cancelled_mark("4711").read_text())
    words = time.strftime("{} cancelled it on %Y-%m-%d at %H:%M", time.localtime(when["time"])).format(when["user"])
    found = why_json(run.run_id)
    assert (found["ended"], found["cause"], found["rank"]) == ("cancelled", f"{words}, while it waited", None)
    assert (found["lines"], found["chain"]) == ([], None)
    assert why(run.run_id).splitlines()[-1] == f"  1  error: {KILL}"
    # The same if the cancel ends a second attempt, which then knows only of the signal.
    add_attempt(run, [metrics_line(2)], "cancelled", cause="SIGTERM")
    found = why_json(run.run_id)
    assert (found["cause"], [each["cause"] for each in found["attempts"]]) == (words, [KILL, words])


ALL = """\
RUN (demo): gpu_memory: a GPU has too little memory for the model, the batch and the allocator's reserve
cause    rank 3: OOM
rank     3
where    LOG:12

   4 | line 4
   5 | line 5
   6 | line 6
   7 | line 7
   8 | line 8
   9 | line 9
  10 | line 10
  11 | line 11
> 12 | OOM
  13 | LOST 0
  14 | LOST 1
  15 | LOST 2
  16 | LOST 3

also     error: KeyError: 'a' (LOG:25)
         error: ValueError: 'a' (LOG:26)
         collective_timeout: TIMEOUT (LOG:27)
         collective_timeout: TIMEOUT (LOG:28)
         collective_timeout: TIMEOUT (LOG:29)
         and 6 more

then     12 x rank # lost another rank: RuntimeError: Read error: Connection reset by peer #

to do    a smaller micro-batch and more micro-batches, recompute, more tp or pp, a higher ZeRO stage, or offload
retry    no

attempts
  1  walltime: the time limit of 60 s is over
  2  gpu_memory: rank 3: OOM
"""


def test_all_of_an_answer_is_what_the_attempts_say() -> None:
    run = submitted()
    first = add_attempt(run, [metrics_line(1)], "walltime", cause="the time limit of 60 s is over", requeue=True)
    first.log.write_text(TIME_LIMIT + "\n")
    attempt = add_attempt(run, [metrics_line(2)], "gpu_memory", cause=f"rank 3: {OOM}")
    lines = [*(f"line {number}" for number in range(1, 12)), OOM, *(f"{LOST} {number}" for number in range(12))]
    lines += ["KeyError: 'a'", "ValueError: 'a'", *map(timeout, range(9))]
    attempt.log.write_text("\n".join(lines) + "\n")
    words = {str(attempt.log): "LOG", run.run_id: "RUN", OOM: "OOM", LOST: "LOST", timeout(0)[9:]: "TIMEOUT"}

    def short(text: str) -> str:
        for long, word in words.items():
            text = text.replace(long, word)
        return text

    assert short(why(run.run_id)) == ALL
    shown = [line.partition(" | ") for line in ALL.splitlines() if " | " in line]
    place = {"rank": 3, "node": None, "failed_node": None, "file": "LOG", "line": 12, "sure": None}
    other = {"rank": None, "node": None, "file": "LOG"}
    others = [{**other, "ended": "error", "cause": f"{kind}Error: 'a'", "line": line}
              for kind, line in (("Key", 25), ("Value", 26))]  # fmt: skip
    others += [{**other, "ended": "collective_timeout", "cause": "TIMEOUT", "rank": rank, "line": 27 + rank}
               for rank in range(8)]  # fmt: skip
    lost = "rank # lost another rank: RuntimeError: Read error: Connection reset by peer"
    then = {f"{lost} #": 12}
    nothing = {
        "note": None,
        "first_step": None,
        "last_step": None,
        "others": [],
        "survived": [],
        "followed": {"count": 0, "words": {}},
    }
    answer = json.loads(short(json.dumps(why_json(run.run_id))))
    assert answer.pop("attempts") == [
        {"attempt": 1, "ended": "walltime", "cause": "the time limit of 60 s is over", "pause_s": None, **place,
         "rank": None, "node": "r6i4n5", "file": str(first.log).replace(run.run_id, "RUN"), "line": 1, **nothing},
        {"attempt": 2, "ended": "gpu_memory", "cause": "rank 3: OOM", "pause_s": None, **place, **nothing,
         "others": others, "followed": {"count": 12, "words": then}},
    ]  # fmt: skip
    assert answer == {
        "schema": 1, "run": "RUN", "name": "demo", "job_id": "4711", "ended": "gpu_memory", "status": None,
        "cause": "rank 3: OOM", **place, "retry": False, "exclude": None, "chain": None, "notes": [], "unread": [],
        "means": "a GPU has too little memory for the model, the batch and the allocator's reserve",
        "to_do": ALL.partition("to do    ")[2].partition("\n")[0],
        "lines": [{"line": int(number.strip("> ")), "text": text} for number, _, text in shown],
    }  # fmt: skip


ELSEWHERE = (
    "the reason is elsewhere: in the output of the step or of each rank (srun --output, torchrun --log-dir), in the "
    "node's kernel log (dmesg), or in sacct -j JOB -o JobID,State,ExitCode,MaxRSS,NodeList"
)
KERNEL = "read the kernel's log of {} (dmesg): if the kernel killed the process, ask for more memory (--mem)"
SIGKILL = "rank 1{} was ended by SIGKILL, by hand or by the kernel's memory killer"


@pytest.mark.parametrize(
    ("of_judge", "retry"), [("it exited within 20 s: a retry would do the same", False), ("", None)]
)
def test_a_failure_that_would_be_the_same_is_not_tried_again(of_judge: str, retry: bool | None) -> None:
    attempt = add_attempt(run := submitted(), [metrics_line(1)], "error", cause="exit code 3")
    verdict = {"go_on": False, "ended": "error", "attempt_ended": "error", "cause": "exit code 3"}
    write_once(attempt.folder / "next.json", json.dumps({**verdict, "why": f"exit code 3; {of_judge}"}))
    assert why_json(run.run_id)["retry"] is retry
    assert f"retry    {'perhaps' if retry is None else 'no'}\n" in why(run.run_id)


NO_STEP = {"go_on": False, "ended": "no_progress", "attempt_ended": "error", "cause": "exit code 1"}


@pytest.mark.parametrize(
    ("cause", "log", "verdict", "to_do", "chain"),
    [
        (SIGKILL.format(""), "step 1", {}, KERNEL.format("its node"), None),
        (SIGKILL.format(" on r6"), "step 1", {}, KERNEL.format("r6"), None),
        ("exit code 1", "srun: error: n7: task 3: Exited with exit code 1", {}, ELSEWHERE, None),
        (
            "exit code 1",
            "step 1",
            NO_STEP | {"why": "3 made none"},
            "see why those attempts ended; a retry would end the same way",
            "ends as no_progress: 3 made none",
        ),
        (
            "exit code 1",
            "step 1",
            NO_STEP | {"ended": "error", "why": "exit code 1"},
            "read the lines around the cause",
            None,
        ),
        ("exit code 1", "step 1", NO_STEP | {"go_on": True}, "nothing to do yet", "continues after error"),
    ],
)
def test_what_to_do_and_the_chain_follow_from_the_end(cause, log, verdict, to_do, chain) -> None:
    attempt = add_attempt(run := submitted(), [metrics_line(1)], "error", cause=cause)
    attempt.log.write_text(f"{log}\n")
    if verdict:
        write_once(attempt.folder / "next.json", json.dumps(verdict))
    found = why_json(run.run_id)
    assert (found["to_do"], found["chain"]) == (to_do, chain)


def test_slurms_own_output_says_what_the_trainer_could_not() -> None:
    run = submitted("generic-slurm")
    add_attempt(run, [metrics_line(1)], "error", cause="rank 1 ended with exit code 1")
    (run.path / "slurm-4711.out").write_text("srun: error: Node failure on r6i4n5\n")
    found = why_json(run.path)
    assert (found["ended"], found["node"], found["failed_node"]) == ("node_failure", "r6i4n5", "r6i4n5")
    assert found["exclude"] == f"hpc-gpt submit --resume {run.run_id} --exclude r6i4n5"
    assert f"exclude  {found['exclude']}" in why(run.path)


@pytest.mark.parametrize(("node_list", "node"), [("r6i4n[5-7,9]", "r6i4n5"), ("n3,n5", "n3"), (None, None)])
def test_a_node_that_took_the_script_with_it_is_first(node_list: str | None, node: str | None) -> None:
    run = submitted("generic-slurm")
    words = "a node of the job died"
    add_attempt(run, [metrics_line(1)], "node_failure", cause=words, node_list=node_list).log.write_text("step 1\n")
    found = why_json(run.run_id)
    assert (found["ended"], found["failed_node"], found["cause"]) == ("node_failure", node, words)
    assert "the script itself was lost" in (found["sure"] or "") or node is None


def test_a_node_that_slurm_names_goes_before_the_list() -> None:
    run = submitted("generic-slurm")
    failed = add_attempt(run, [metrics_line(1)], "node_failure", cause="a node of the job died", node_list="n[5-6]")
    failed.log.write_text("srun: error: Node failure on n6\n")
    assert why_json(run.run_id)["exclude"] == f"hpc-gpt submit --resume {run.run_id} --exclude n6"
    add_attempt(run, [metrics_line(2)], "done")
    found = why_json(run.run_id)
    assert (found["ended"], found["attempts"][0]["failed_node"], found["exclude"]) == ("done", "n6", None)


def test_a_job_that_died_before_its_first_attempt() -> None:
    run = with_job(unsubmitted_run("generic-slurm"), "4711_3")
    (run.path / "slurm-4711_3.out").write_text("/var/spool/job4711/slurm_script: line 12: module: command not found\n")
    found = why_json(run.run_id)
    assert found["cause"] == "module: command not found"
    assert found["attempts"][0]["ended"] == "user_error"


def test_a_run_that_did_not_fail_says_how_it_stands() -> None:
    run = submitted()
    assert why(run.run_id).startswith(f"{run.run_id} (demo): pending: waits in the queue")
    add_attempt(run, [metrics_line(1)], "done").log.write_text("KeyError: 'survived'\n")
    shown = why(run.run_id)
    assert shown.startswith(f"{run.run_id} (demo): done: trained all its steps")
    assert "KeyError" not in shown


def test_nothing_said_is_exit_1() -> None:
    run = submitted()
    add_attempt(run, [], None, job_id="1")
    add_attempt(run, [metrics_line(1)], None, job_id="4711", started=1.0)
    for path in sorted(run.path.rglob("*"), reverse=True):
        os.utime(path, (1, 1))
    shown = why(run.run_id, code=1)
    assert "unknown: nothing says how it ended" in shown


# --- anyone's logs


def test_the_rank_a_timeout_lacks_and_the_node_slurm_names(tmp_path: Path) -> None:
    (folder := tmp_path / "theirs").mkdir()
    for rank in range(4):
        lines = [WORLD, *(step(number) for number in range(1, 4))] if rank == 0 else [WORLD]
        (folder / f"rank_{rank}.log").write_text("\n".join([*lines, *([timeout(rank)] if rank != 2 else [])]) + "\n")
    (folder / "slurm-4711.out").write_text("srun: error: r6i4n7: task 2: Killed\n")
    found = why_json(folder)
    assert (found["ended"], found["rank"], found["failed_node"]) == ("collective_timeout", 2, "r6i4n7")
    assert found["cause"].endswith("rank 2 did not report it, 3 of 4 ranks did")
    assert (found["exclude"], found["file"]) == ("#SBATCH --exclude=r6i4n7", str(folder / "rank_0.log"))
    assert [other["ended"] for other in found["attempts"][0]["others"]] == ["collective_timeout"] * 2


def test_an_address_is_no_node_that_slurm_can_leave_out(tmp_path: Path) -> None:
    log = tmp_path / "gpt.err"
    log.write_text("10.11.12.13: RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    found = why_json(log)
    assert (found["ended"], found["failed_node"], found["exclude"]) == ("node_failure", "10.11.12.13", None)


@pytest.mark.parametrize("folder", ["", "errors"])
def test_several_logs_of_one_run(tmp_path: Path, folder: str) -> None:
    out, err = tmp_path / "A.out", tmp_path / folder / "A.err"
    err.parent.mkdir(exist_ok=True)
    out.write_text("\n".join([step(1), step(2), step(3), ""]))
    err.write_text("[rank3]: Traceback (most recent call last):\n[rank3]: KeyError: 'position_ids'\n")
    found = why_json(out, str(err))
    assert (found["ended"], found["rank"], found["file"], found["line"]) == ("error", 3, str(err), 2)
    shown = why(out, code=1)
    assert "the log ends at step 3 of 1000" in shown
    assert "  3 |  iteration        3/" in shown, "without a word its last lines"
    err.write_text("")
    assert why_json(out, str(err), code=1)["cause"] == "the log ends at step 3 of 1000"
    (other := tmp_path / "B.out").write_text("\n".join([step(1), step(2), step(3), ""]))
    assert "2 runs in" in error_of(in_process("why", str(out), str(other)))[0]


@pytest.mark.parametrize("end", [TIME_LIMIT, "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2021-05-27T21:52:36 ***"])
def test_advice_for_another_program_names_nothing_of_ours_alone(tmp_path: Path, end: str) -> None:
    (log := tmp_path / "gpt.out").write_text("\n".join([step(1), step(2), end, ""]))
    found = why_json(log)
    assert found["ended"] in ("walltime", "cancelled")
    assert "resume it from its last checkpoint" in found["to_do"]
    assert all("submit" not in advice(ended, False) and "--dry-run" not in advice(ended, False) for ended in ENDED)


@pytest.mark.parametrize(
    ("bar", "advised"), [("0/3 [00:00<?, ?it/s]", "ask for more"), ("1/3 [00:09<00:18, 9.00s/it]", "checkpoint")]
)
def test_no_checkpoint_is_claimed_before_a_step(tmp_path: Path, bar: str, advised: str) -> None:
    (log := tmp_path / "fit.log").write_text(f"***** Running training *****\n  0%|          | {bar}\n{TIME_LIMIT}\n")
    assert advised in why_json(log)["to_do"]


def test_what_is_no_log_is_refused_with_its_kind(tmp_path: Path) -> None:
    (tmp_path / "loop.log").symlink_to("loop.log")
    for name, content, reason in (
        ("c.log", b"PK\x03\x04" + bytes(90), "a zip archive, as of a checkpoint"),
        ("b.log", bytes(range(256)) * 9, "binary"),
        ("loop.log", None, "a link to nothing"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        for verb in (("why", tmp_path / name), ("compare", tmp_path / name, tmp_path / name)):
            assert reason in error_of(in_process(*verb))[0]


@pytest.mark.parametrize("line", ["Killed", "KeyError: 1", "srun: error: n1: task 0: Segmentation fault"])
def test_a_log_of_an_end_alone_names_it(tmp_path: Path, line: str) -> None:
    (log := tmp_path / "fit.log").write_text(f"loading\n{line}\n")
    assert line in why_json(log)["cause"]


def test_a_node_without_gpus_is_at_fault_in_a_job_that_has_some(tmp_path: Path) -> None:
    run = submitted("generic-slurm")
    attempt = add_attempt(run, [], "error", cause="exit code 1")
    attempt.log.write_text("n7: RuntimeError: No CUDA GPUs are available\n")
    found = why_json(run.run_id)
    assert (found["ended"], found["failed_node"]) == ("node_failure", "n7")
    assert read_cause(attempt).node == "n7"
    (theirs := tmp_path / "gpt.out").write_text(attempt.log.read_text())
    assert why_json(theirs)["ended"] == "user_error"


def test_no_secret_and_no_control_character_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "gpt.out"
    token = "hf_abcdefghijklmnopqrstuvwxyz"
    hostile = f"\x1b]0;title\x07\x1b[2Jexport WANDB_API_KEY=0123456789abcdef\u202e token {token}"
    log.write_text("\n".join([step(1), hostile, f"ValueError: \x1b[31m {token} \x07\x9b", "<script>"]) + "\n")
    for more in ([], ["--json"]):
        shown = why(log, *more)
        assert not set(shown) & set("\x1b\x07\x9b\u202e")
        assert token not in shown
        assert "0123456789abcdef" not in shown
        assert "[removed]" in shown


# --- lines


def test_lines_around_a_line_of_a_long_log(tmp_path: Path) -> None:
    (log := tmp_path / "long.log").write_text("".join(f"line {number}\n" for number in range(1, 900_001)))
    for line in (1, 2, 400_000, 899_999, 900_000):
        wanted = [(n, f"line {n}") for n in range(max(1, line - 8), min(900_000, line + 4) + 1)]
        assert lines_around(log, line) == wanted
    assert last_lines(log) == [(n, f"line {n}") for n in range(899_993, 900_001)]
    log.write_text("one\n\ntwo")
    assert last_lines(log) == [(1, "one"), (3, "two")]
    assert lines_around(log, 3) == [(1, "one"), (2, ""), (3, "two")]


def test_lines_of_nothing(tmp_path: Path) -> None:
    for text in (b"", b"\0\0\0", b"\n" * 5):
        (tmp_path / "a.log").write_bytes(text)
        assert [shown for _, shown in lines_around(tmp_path / "a.log", 1) if shown] == []
        assert (last_lines(tmp_path / "a.log"), last_lines(tmp_path / "missing")) == ([], [])


# --- the table of classes


def test_help_lists_every_class() -> None:
    shown = in_process("help", "causes").stdout
    assert [line.partition(":")[0] for line in shown.splitlines() if not line.startswith(" ")] == ENDED
    assert "\nnan: the loss or the gradients became NaN or infinite\n    retry: no; a job chain stops; resume " in shown


@pytest.mark.parametrize(
    ("log", "place"),
    [
        ("/var/spool/slurmd/job7/slurm_script: line 4: torchrunn: command not found\n", "line 4 of the job script"),
        ('Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in <module>\n    main()\n'
         '  File "/home/me/shape.py", line 3, in main\n    model = load(NAME)\n'
         '  File "/venv/lib/python3.11/site-packages/torch/x.py", line 9, in load\n    raise ValueError("hidden")\n'
         "ValueError: hidden_size 100 is not divisible by 12 heads\n", "/home/me/shape.py:3"),
    ],
    ids=["bash", "python"],
)  # fmt: skip
def test_what_is_to_be_corrected_is_named_with_its_line(tmp_path: Path, log: str, place: str) -> None:
    (tmp_path / "fit.out").write_text(log)
    said = in_process("why", "fit.out", cwd=tmp_path).stdout
    assert f"to do    correct what the message names, at {place}" in said, said


def test_a_line_of_a_users_script_is_that_of_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -N 1\necho begin\ntorchrunn train.py\n")
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=3)
    said = in_process("why", cwd=tmp_path).stdout
    assert "to do    correct what the message names, at fit.slurm:4" in said, said
