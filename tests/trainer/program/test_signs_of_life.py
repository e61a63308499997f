"""When a program that is not ours is a hang: the table, the signs of life, the numbers of steps, and files that begin
anew."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.ends.program_end import has_last_line
from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.core.process import stat_of
from hpc_gpt.core.processes import find_processes as core_processes
from hpc_gpt.core.processes.find_processes import Tree
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.trainer.program import signs_of_life
from hpc_gpt.trainer.program.output_files import Follower
from hpc_gpt.trainer.program.process import ForeignLog
from hpc_gpt.trainer.program.signs_of_life import (
    CPU,
    FILES,
    GPU,
    OUTPUT,
    ForeignHeartbeat,
    Processes,
    Sign,
    SignsSeen,
    boot_s,
    checkpoint_files,
    hang_limit_s,
)
from hpc_gpt.trainer.program.step_numbers import StepNumbers
from tests.conftest import REPOSITORY
from tests.made_runs import unsubmitted_run
from tests.waiting import wait_for

STEP_S, FLOOR_S = 400.0, 300.0


@pytest.mark.parametrize(
    ("stepped", "at_total", "lives", "signs", "hang_s", "limit_s"),
    [
        (True, False, True, (), None, STEP_S),
        (True, False, True, (), 50.0, STEP_S),
        *((True, False, True, (sign,), None, 12 * FLOOR_S) for sign in (OUTPUT, FILES, CPU, GPU)),
        (True, False, True, (OUTPUT, CPU), 50.0, 12 * FLOOR_S),
        *((True, True, lives, signs, None, 0.0) for lives in (True, False) for signs in ((), (OUTPUT,))),
        (True, False, False, (), None, 0.0),
        (True, False, False, (OUTPUT,), None, 0.0),
        (False, False, True, (), None, 0.0),
        *((True, True, lives, signs, 50.0, 50.0) for lives in (True, False) for signs in ((), (OUTPUT,))),
        (True, False, False, (OUTPUT,), 50.0, 50.0),
        (False, False, True, (OUTPUT, CPU), 50.0, 50.0),
    ],
)  # fmt: skip
def test_the_table(
    stepped: bool, at_total: bool, lives: bool, signs: tuple, hang_s: float | None, limit_s: float
) -> None:
    assert (
        hang_limit_s(SignsSeen(stepped, at_total, lives, tuple(map(Sign, signs))), STEP_S, FLOOR_S, hang_s) == limit_s
    )


def test_a_sign_shortens_no_limit_and_no_limit_stays_none() -> None:
    shows = SignsSeen(True, signs=(Sign(CPU),))
    assert hang_limit_s(shows, 9000.0, FLOOR_S, None) == 9000.0
    assert hang_limit_s(shows, 0.0, FLOOR_S, None) == 0.0, "train.hang_multiple = 0"


@pytest.mark.parametrize(
    ("numbers", "made"),
    [
        ("1 2 3", "1 2 3"),
        ("5 5 6 6 7", "5 6 7"),  # a bar and a line
        ("1 1 2 1 2 3 2 3 4", "1 2 3 4"),  # ranks that print by themselves
        ("8 9 9 10 8 10 11 9 10 11 12", "8 9 10 11 12"),
        ("10 11 12 10 12 13", "10 11 12 13"),
        ("57 58 59 60 1 2 3", "57 58 59 60 1 2 3"),  # began late, and another stage
        ("1 2 3 60 1 2 3", "1 2 3 60 1 2 3"),  # a second stage, or an epoch
        ("10 20 30 10 20 30 10 20 30 40", "10 20 30 10 20 30 10 20 30 40"),
        ("0 50 99 0 50", "0 50 99 0 50"),
        ("1 2 60 59 60", "1 2 60"),
        ("1 2 60 20 21", "1 2 60"),
        ("1 2 60 20 21 22 23", "1 2 60 20 21 22 23"),  # back after a spike of the loss
        ("1 2 60 20 21 61", "1 2 60 61"),
        ("1 2 60 5 1 2", "1 2 60 1 2"),
    ],
)
def test_which_numbers_are_steps(numbers: str, made: str) -> None:
    steps = StepNumbers()
    assert [row["step"] for each in numbers.split() for row in steps.take({"step": int(each)}, 0.0)] == [
        int(each) for each in made.split()
    ]


def test_the_first_step_of_a_stage_counts_by_itself() -> None:
    steps = StepNumbers()
    for number in (1, 2, 59, 60, 1):
        steps.take({"step": number}, 10.0)
    assert (steps.flush_steps(11.0), steps.flush_steps(12.5), steps.flush_steps()) == ([], [{"step": 1}], [])
    assert steps.take({"step": 2}, 13.0) == [{"step": 2}]
    one_behind = StepNumbers()
    for number in (1, 2, 1):
        one_behind.take({"step": number}, 10.0)
    assert one_behind.flush_steps() == []


def test_what_an_attempt_before_made_is_not_made_again() -> None:
    steps = StepNumbers(resumed=100)
    assert [row["step"] for n in (98, 99, 100, 101, 99, 102, 1, 2) for row in steps.take({"step": n}, 0.0)] == [
        101, 102, 1, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "made"),
    [
        ("31 32 33 34", "31 32 33 34"),
        ("31 31 32 33", "31 32 33"),
        ("38 39 40 41", "38 39 40 41"),
        ("39 41", "39 41"),
        ("40 41 42", "41 42"),  # of a program that counts from 0
        ("31", "31"),
    ],
)
def test_a_program_may_begin_before_the_newest_checkpoint(numbers: str, made: str) -> None:
    steps = StepNumbers(resumed=40)
    rows = [row for n in numbers.split() for row in steps.take({"step": int(n), "loss": 2.0}, 0.0)]
    assert steps.flush_steps(9.0) == []
    assert [row["step"] for row in (*rows, *steps.flush_steps())] == [int(n) for n in made.split()]


def log_of(**more: object) -> ForeignLog:
    run = unsubmitted_run()

    def read(line: str) -> dict[str, float] | None:
        found = re.fullmatch(r"step (\d+)", line)
        return {"step": float(found[1])} if found else None

    return ForeignLog(run.new_attempt(), run.resolved(), 0, read, **more)  # type: ignore[arg-type]


def test_the_last_line_of_the_metrics_is_the_last_step_made() -> None:
    log = log_of(planned=lambda: 3)
    log.take("step 1", "step 2", "step 3")
    assert (log.last_step, has_last_line(log._attempt, 20)) == (3, False), "the settings count more than its lines"
    log.take("step 1", "step 2")
    lines = log._attempt.metrics.read_text().splitlines()
    assert (log._attempt.last_metrics()["step"], len(lines), log.last_step) == (2, 5, 2)
    again = ForeignLog(log._attempt, unsubmitted_run().resolved(), 0, log._read_step, written=[1, 2, 3, 1, 2])
    again.take(*(f"step {n}" for n in (1, 2, 3, 1, 2, 3)))
    assert [line.count('"step": 3,') for line in log._attempt.metrics.read_text().splitlines()] == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("numbers", "planned", "is_last"),
    [
        (range(1, 61), 60, True),
        (range(1, 60), 60, False),
        (range(60), 60, True),  # counted from 0
        ((1, 2), 0, False),
        (range(10, 91, 10), 99, True),  # then it evaluates
        (range(10, 91, 10), 100, False),
        (range(0, 91, 10), 100, False),
        ((5500,), 10_000, False),  # a single line does not say how far apart lines are
        ((), 100, False),
    ],
)
def test_the_last_line_is_less_than_a_spacing_from_the_total(numbers, planned, is_last) -> None:
    log = log_of(planned=lambda: planned)
    log.take(*(f"step {number}" for number in numbers))
    assert has_last_line(log._attempt, 0) == is_last


def test_lines_are_a_sign_if_more_come_than_between_two_steps() -> None:
    log = log_of()
    log.take("loading", "loaded", "step 1")
    assert not log.is_more
    for number in range(2, 9):
        log.take("lr 1e-4", f"step {number}", "memory 3 GiB")
    assert not log.is_more
    log.take("lr 1e-4")
    assert not log.is_more
    log.take("saving")
    assert log.is_more
    log.take("step 9")
    assert not log.is_more


# --- processes


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(text: str) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(["bash", "-c", text], start_new_session=True, **pipes))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()  # it says that it runs
        return started[-1]

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


PYTHON = f"{sys.executable} -c 'print(1, flush=True); import time; time.sleep(3600)'"


def any_lives(processes: Processes) -> bool:
    """After another look."""
    processes._tree.look(at_once=True)
    processes.look()
    return processes.any_since(boot_s() + 10)


@pytest.mark.parametrize(
    ("text", "lives"),
    [
        (f"{PYTHON}; true", True),
        (f"{PYTHON} & wait", True),
        ("echo 1; sleep 3600; true", False),  # a shell above it, and what only waits
        ("exec 3> >(tee /dev/null); echo 1; tail -f /dev/null; true", False),
        ("echo 1; while read -r -t 3600 line; do :; done < <(sleep 3600)", False),
        ("awk 'BEGIN { print 1; fflush(); system(\"exec sleep 3600\") }'; true", False),
        ("echo 1; while :; do :; done", True),  # the shell alone
        ("echo 1; sleep 3600 & kill -STOP $$; wait", True),  # stopped it waits for nothing
    ],
)
def test_which_processes_count(start, text: str, lives: bool) -> None:
    processes = Processes(Tree([start(text).pid]))
    assert {"mawk", "gawk"} <= set(signs_of_life.BESIDE)
    # A shell may not have started the next one yet.
    wait_for("its processes", lambda: any_lives(processes) == lives)
    assert not processes.any_since(boot_s() - 600), "it came after the step"


def test_one_whose_parent_ended_counts_and_ends(start) -> None:
    processes = Processes(tree := Tree([start(f"({PYTHON} & read line); sleep 3600; true").pid]))
    (python,) = [pid for pid in tree.look().seen if signs_of_life._program_of(pid).startswith("python")]
    parent = int(stat_of(python)[1])
    os.kill(parent, signal.SIGKILL)
    wait_for("another parent", lambda: int(stat_of(python)[1]) != parent)
    assert any_lives(processes)
    os.kill(python, signal.SIGKILL)
    wait_for("its end", lambda: not any_lives(processes))
    assert processes._was_seen


def test_cpu_work_is_seen_and_sleep_is_none(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "_OVER_S", 0.5)
    monkeypatch.setattr(core_processes, "_LOOK_S", 0.1)
    monkeypatch.setattr(core_processes, "_COST", 0)
    found = []
    for text in (f"{PYTHON}; true", "echo 1; while :; do :; done"):
        heart = ForeignHeartbeat(20.0, FLOOR_S, None)
        heart.processes = processes = Processes(Tree([start(text).pid]))
        for step in range(1, 9):
            heart.stepped(step, came_boot_s=boot_s() + 10)

        def is_measured(heart: ForeignHeartbeat = heart, processes: Processes = processes) -> bool:
            heart.limit_s()
            return bool(processes._work) and processes._looked - processes._work[0][0] >= signs_of_life._OVER_S

        wait_for("looks over half a second", is_measured)
        if "while" in text:
            wait_for("its work", lambda heart=heart: heart.limit_s() > FLOOR_S)
        found.append(heart.limit_s())
    assert found == [FLOOR_S, 12 * FLOOR_S]


def names_of_signs(heart: ForeignHeartbeat) -> list[str]:
    return [sign.name for sign in heart.seen().signs]


def test_a_gpu_at_work_and_a_file_that_grows_are_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "_READ_S", 0.0)
    monkeypatch.setattr(signs_of_life, "_LOOK_S", 0.0)
    run, util = unsubmitted_run(), [0.0]
    command = Command(run="true", checkpoints=f"{tmp_path}/step-*", complete="{checkpoint}/done")
    heart = ForeignHeartbeat(20.0, 0.1, None, lambda: checkpoint_files(run, command))
    heart.gpus = lambda: [GpuFigures(util[0], None, None, None, None)]
    for step in range(1, 9):
        heart.stepped(step)
    assert names_of_signs(heart) == []
    util[0] = 98.0
    assert names_of_signs(heart) == [GPU]
    heart.stepped(9)
    util[0] = 0.0
    (folder := tmp_path / "step-9").mkdir()
    for size in (1, 1, 2):
        (folder / "model.pt").write_bytes(bytes(size))
        os.utime(folder / "model.pt", (1, 1))
        heart._sized_at = heart._stepped = time.monotonic() - 9
        heart.look_at_files()
    assert names_of_signs(heart) == [FILES]


@pytest.mark.parametrize("is_one", [True, False])
def test_on_one_node_a_line_counts_as_long_as_a_step_may_take(is_one: bool) -> None:
    heart = ForeignHeartbeat(20.0, FLOOR_S, None, on_one_node=is_one)
    for step in range(1, 9):
        heart.stepped(step)
    heart.heard()
    assert heart.limit_s() == 12 * FLOOR_S
    heart._stepped -= FLOOR_S + 10
    heart._heard_at -= FLOOR_S - 5
    assert heart.limit_s() == 12 * FLOOR_S, "it is younger than a step may take"
    heart._heard_at -= 10
    assert heart.limit_s() == (FLOOR_S if is_one else 12 * FLOOR_S)
    heart.heard()
    assert heart.limit_s() == 12 * FLOOR_S, "the next line"


def test_output_counts_anew_when_no_step_is_due_any_more() -> None:
    heart = ForeignHeartbeat(20.0, FLOOR_S, 50.0)
    for step in range(1, 9):
        heart.stepped(step)
    heart.heard()
    moves = heart.moves
    assert (heart.limit_s(), heart.moves) == (12 * FLOOR_S, moves)
    heart.at_total = True
    assert (heart.limit_s(), heart.moves) == (50.0, moves + 1)
    heart.heard()
    assert heart.moves == moves + 2
    heart.at_total = False
    heart.stepped(1)
    assert heart.limit_s() == FLOOR_S, "a smaller number leads back"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "no other sign of life; a hang after 300 s"),
        (
            {"_heard_at": 20.0, "_grew_at": 8.0},
            "signs of life: output 20 s ago, files that grow 8 s ago; a hang after 60 min",
        ),
        (
            {"_heard_at": 20.0, "_on_one_node": True},
            "signs of life: output 20 s ago (counts for 280 s more); a hang without another sign, at the latest after"
            " 60 min",
        ),
        ({"at_total": True}, "no other step is due; the time limit ends it"),
        ({"at_total": True, "_silent_s": 50.0}, "no other step is due; a hang after 50 s without output"),
    ],
)
def test_status_says_since_when_and_what_comes(change: dict[str, object], words: str) -> None:
    heart = ForeignHeartbeat(20.0, FLOOR_S, None)
    assert heart.still() == (None, "")
    for step in range(1, 9):
        heart.stepped(step)
    assert heart.still() == (None, ""), "they come as usual"
    heart._stepped -= FLOOR_S / 2 + 1
    for name, value in change.items():
        setattr(heart, name, time.monotonic() - float(str(value)) if name.endswith("_at") else value)
    still_s, said = heart.still()
    assert (round(still_s or 0), said) == (151, words)


# --- files


@pytest.mark.parametrize("change", ["rotated", "cut", "over", "longer", "gone"])
def test_a_file_that_begins_anew_is_read_anew(tmp_path: Path, change: str) -> None:
    path, second = tmp_path / "fit.log", "step 1 loss 3.5\nstep 2 loss 3.4\n"
    path.write_text("".join(f"step {number} loss 2.5\n" for number in range(1, 4)))
    file = Follower(path)
    assert [line.split()[1] for line in file.lines()] == ["1", "2", "3"]
    assert (list(file.lines()), file.grew) == ([], False)
    with path.open("a") as more:
        more.write("step 4 loss 2.5\nsaving")
    if change == "rotated":
        path.rename(tmp_path / "fit.log.1")
    elif change == "gone":
        path.unlink()
        assert [line.split()[1] for line in file.lines()] == ["4"], "what came before it was removed"
    else:
        assert [line.split()[1] for line in file.lines()] == ["4"]
    if change == "longer":
        second += "step 3 loss 3.3\n" * 9
    path.write_text("" if change == "cut" else second)
    found = [line.split()[1] for line in file.lines()]
    if change == "cut":
        assert found == []
        path.write_text(second)
        found = [line.split()[1] for line in file.lines()]
    assert found == [*(["4"] if change == "rotated" else []), "1", "2", *["3"] * (9 if change == "longer" else 0)]


def test_a_file_from_a_place_on_and_parts_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "fit.log"
    path.write_text("step 1\n")
    file = Follower(path, path.stat().st_size)
    assert list(file.lines()) == []
    for text, lines in (("st", []), ("ep 2\n", ["step 2"]), ("step 3\rstep 4\r", ["step 3", "step 4"])):
        with path.open("a") as more:
            more.write(text)
        assert (list(file.lines()), file.grew) == (lines, True)


def test_the_page_has_the_table() -> None:
    page = " ".join((REPOSITORY / "docs" / "your-own-program.md").read_text().split())
    for words in ("12 x `train.hang_floor_s`", "`command.hang_s` without output", "5 % of a core"):
        assert words in page
