"""`top` on runs made by hand: what its lines say, at two nodes and at many, and of a long run."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.core.processes.heartbeats import RankHeartbeat, line_of, write_heartbeat
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.launcher.watch.status import read_folders
from hpc_gpt.launcher.watch.top import draw_curve, read_curve, screen
from hpc_gpt.trainer.preflight.verdict import SHARED
from tests.cli.command import in_process
from tests.made_runs import add_attempt, add_checkpoint, make_run, metrics_line

BEAT = RankHeartbeat(0, "n1", 4711, 9, 40, "training", 0.5, 300.0, 0.0)


def running(steps: int = 40, **settings) -> tuple[RunFolder, Attempt]:
    """A run on four ranks that has trained so many steps, by its folder still running."""
    run = make_run(logs_dir(), "a100-80g-8", **settings)
    attempt = add_attempt(run, steps, None, started=time.time() - 100)
    attempt.heartbeats.mkdir()
    return run, attempt


def beat(attempt: Attempt, rank: int, **values) -> None:
    write_heartbeat(attempt.heartbeats, replace(BEAT, **{"rank": rank, "time": time.time(), **values}))


def shown(run: RunFolder, columns: int = 80, **values) -> str:
    (status,) = read_folders([run])
    return "\n".join(screen(run, replace(status, **{"state": "running", "cause": None, **values}), columns))


def test_each_node_and_each_rank_has_a_line_the_slowest_first():
    run, attempt = running()
    gpus = (GpuFigures(97, 70.1, 80.0, 650, 61), GpuFigures(91, 60.0, 80.0, 640, 66))
    beat(attempt, 0, gpus=gpus)
    place = {"collective": "all_reduce", "place": "loop.py:96 in run"}
    beat(attempt, 1, step=39, phase="saving", quiet_s=12.0, heard="SIGTERM", **place)
    beat(attempt, 2, host="n2", gpus=(GpuFigures(12, 3.0, 80.0, None, None),))
    beat(attempt, 3, host="n2", time=time.time() - 100)
    said = shown(run)
    nodes = re.findall(r"^(n\d.*)$", said, re.M)
    assert nodes == [
        "n2        2       1     1  12%   3.0/80 GiB        -        -",
        "n1        2       -     2  94%  70.1/80 GiB  1,290 W    66 °C",
    ]
    ranks = re.findall(r"^(\d +n\d.*)$", said, re.M)
    assert [line.split()[0] for line in ranks] == ["3", "1", "0", "2"]
    assert re.fullmatch(r"3 +n2 +40 +training +0\.5 s +100 s ago +silent", ranks[0])
    assert re.fullmatch(r"1 +n1 +39 +saving +12 s +\S+ s ago +heard SIGTERM; all_reduce; loop\.py:96 in run", ranks[1])
    assert "of all" not in said


def test_the_supervisor_of_a_users_program_has_no_step_or_phase(tmp_path: Path) -> None:
    (file := tmp_path / "own.toml").write_text('engine.name = "command"\ncommand.run = "sleep 1"\n')
    run, attempt = running(experiment=str(file), layout__gpus=1)
    beat(attempt, 0, step=0, phase="starting")
    said = shown(run)
    assert re.search(r"^rank +node +heartbeat\n0 +n1 +\S+ s ago$", said, re.M), said


def test_before_the_heartbeats_it_says_what_is_done_meanwhile():
    run, attempt = running(steps=0)
    (attempt.folder / SHARED).mkdir()
    assert shown(run).endswith("no heartbeat yet: the nodes are probed (preflight)")
    (attempt.folder / SHARED).rmdir()
    assert shown(run).endswith("no heartbeat yet: the ranks start")
    assert shown(run, state="walltime").endswith("no heartbeat yet")


def test_a_rank_without_a_heartbeat_is_the_slowest_until_the_end():
    run, attempt = running()
    for rank in (0, 1, 3):
        beat(attempt, rank, time=1.0 if rank == 3 else time.time())
    assert re.search(r"^2 .* no heartbeat yet\n3 .* silent\n0 ", shown(run), re.M)
    assert re.search(r"^space: [\d.,]+ \w+ free, the next checkpoint takes [\d.]+ MiB$", shown(run), re.M)
    ended = shown(run, state="stopped")
    assert ("silent" in ended, "training" in ended) == (False, False)
    assert "no GPU figures in the heartbeats: no GPU, or no driver" in ended


def test_a_mixture_has_a_line_on_its_experts():
    run, _ = running([metrics_line(1), metrics_line(2, balance_loss=1.0625, expert_load=3.5, experts_dead=0)])
    assert "experts: balance loss 1.06, expert load 3.50, dead experts 0" in shown(run).splitlines()
    assert "experts:" not in shown(running()[0])


def test_what_comes_next_is_in_its_order():
    run, _ = running(train__steps=200, train__eval_every=50, train__save_every=60, train__save_at=[45],
                     train__save_minutes=30.0, job__time="1:00:00", job__signal_lead_s=120)  # fmt: skip
    (line,) = re.findall(r"^next: (.*)$", shown(run), re.M)
    words = [part.rpartition(", in ")[0] for part in line.split("; ")]
    assert words[:4] == ["saves after step 45", "evaluates after step 50", "saves after step 60", "ends after step 200"]
    assert words[4] == "saves, after 30 min"
    # With the date in the last hour of a day.
    assert re.fullmatch(r"time limit at (\S+ )?\d\d:\d\d: saves and is requeued", words[5])
    assert re.match(r"saves after step 45, in 2.5 s; evaluates after step 50, in 5 s", line)
    add_checkpoint(run, 40)
    assert "saves, after 30 min, in 30 min" in shown(run)
    assert "next:" not in shown(run, state="done")
    assert re.search(r"^running  step 40/200 .*  left 80 s, until \d", shown(run, left_s=80.0), re.M)


def test_the_curve_reads_samples_and_counts_each_step_once():
    run, _ = running(30_000)
    again = [metrics_line(step, loss=1.0) for step in range(25_001, 25_100)]
    add_attempt(run, [*again, "half a li"], None, started=time.time())
    curve = read_curve(run.attempts())
    assert 250 < len(curve) < 600, "as many of a longer run"
    assert (min(curve), max(curve)) == (1, 25_099)
    assert curve[25_001] == 1.0
    assert all(loss == pytest.approx(2 + 4 / step) for step, loss in curve.items() if step <= 25_000)
    lines = draw_curve(curve, 70)
    assert len(lines) == 8
    assert {*"".join(lines[1:-1])} & {*"▁▂▃▄▅▆▇█"}
    assert lines[-1].endswith("step 1 to 25,099")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("text", ["[1, 2]\n", '{"step": 1}\n', '{"step": 1, "loss": NaN}\n', "x" * 10**6, "[" * 9999])
def test_a_damaged_file_has_no_curve(text):
    run = make_run(logs_dir())
    attempt = add_attempt(run, [], None)
    attempt.metrics.write_text(text)
    assert read_curve([attempt]) == {}
    assert draw_curve({}, 40) == ["no loss yet"]


def of_nodes(count: int) -> tuple[int, str]:
    """(how many lines are executed for the screen of a run on so many nodes, the screen)."""
    run, attempt = running()
    for node in range(count):
        last = time.time() - (999 if node == 5 else 0)
        gpus = 8 * (GpuFigures(90 + node % 10, 70.1, 80.0, 650, 60),)
        of_node = replace(BEAT, host=f"n{node:04}", time=last)
        first, *others = (
            replace(of_node, rank=rank, step=40 - (rank == 77), gpus=None if rank % 8 else gpus)
            for rank in range(8 * node, 8 * node + 8)
        )
        write_heartbeat(attempt.heartbeats, first, map(line_of, others))
    lines, before = 0, sys.gettrace()

    def count_line(_: object, event: str, __: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return count_line

    sys.settrace(count_line)
    try:
        said = shown(run)
    finally:
        sys.settrace(before)
    return lines, said


def test_of_many_nodes_it_has_the_spread_and_the_ten_worst():
    """Four times as many nodes are no more than six times the lines that run."""
    (few, _), (many, said) = of_nodes(24), of_nodes(96)
    assert many < 6 * few
    assert "10 of 96 nodes, least used first:\nnode   ranks  silent" in said
    assert re.search(r"^n0005 +8 +8 ", said, re.M)
    assert "GPU use of all: 90% to 99%, median 94%" in said
    assert "10 of 768 ranks, slowest first:" in said
    assert len(re.findall(r"^\d+ +n\d{4} ", said, re.M)) == 10
    assert "step of all: 39 to 40, median 40" in said
    assert len(said.splitlines()) < 50


def test_it_is_printed_once_without_a_terminal_and_needs_a_run():
    assert (in_process("top").code, in_process("top", "nothing").code) == (5, 5)
    run, attempt = running()
    beat(attempt, 0, place="\x1b[2J")
    said = in_process("top", run.path).stdout
    assert "\x1b" not in said
    assert said.startswith(f"{run.run_id} of demo, ")
