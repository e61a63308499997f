"""Beats: written in place and read back whole or not at all; which node is slow by them."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

from hpc_gpt.core.processes.heartbeats import (
    RankHeartbeat,
    c_dump,
    line_of,
    pack_heartbeats,
    read_c_dump,
    read_heartbeats,
    write_heartbeat,
)
from hpc_gpt.core.runs.run_folder import RunFolder

BEAT = RankHeartbeat(3, "n1", 4711, 1, 17, "training", 0.5, 300.0, 1e9, probe_s=0.01)


def test_words_that_are_long_or_odd_leave_room_for_all(tmp_path: Path) -> None:
    odd = replace(BEAT, host='é\\"\n' * 300, place="\x00\x07" * 300, collective="\u4e00" * 300)
    write_heartbeat(tmp_path, odd)
    (beat,) = read_heartbeats(tmp_path).values()
    assert (beat.rank, beat.step, beat.phase) == (3, 17, "training")


def test_what_is_damaged_or_of_another_kind_is_left_out(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, BEAT)
    for name, text in (("0.json", ""), ("1.json", '{"rank": 1'), ("2.json", "[]"), ("x.json", "{}"), ("5.txt", "{}")):
        (tmp_path / name).write_text(text)
    (tmp_path / "4.json").mkdir()
    os.mkfifo(tmp_path / "6.json")
    (tmp_path / "7.json").write_text("[" * 2000)
    for number, odd in enumerate(
        ({"rank": [1]}, {"host": [1]}, {"probe_s": "x"}, {"probe_s": math.nan}, {"step": None})
    ):
        (tmp_path / f"1{number}.json").write_text(json.dumps({**asdict(BEAT), **odd}))
    assert (list(read_heartbeats(tmp_path)), read_heartbeats(tmp_path / "none")) == ([3], {})


def test_the_last_of_a_rank_counts_whoever_wrote_it(tmp_path: Path) -> None:
    """Rank 3's first rank was stopped for a while, in which rank 3 wrote a file of its own."""
    first, lines = replace(BEAT, rank=2), [line_of(replace(BEAT, beat=number)) for number in (5, 9)]
    write_heartbeat(tmp_path, first, lines[:1])
    write_heartbeat(tmp_path, replace(BEAT, beat=7))
    assert read_heartbeats(tmp_path) == {2: first, 3: replace(BEAT, beat=7)}
    write_heartbeat(tmp_path, first, lines[1:])
    assert read_heartbeats(tmp_path) == {2: first, 3: replace(BEAT, beat=9)}
    c_dump(tmp_path, 3).write_text("Timeout!\n")
    assert (read_c_dump(tmp_path, 2), read_c_dump(tmp_path, 3)) == ("", "Timeout!\n")


def test_those_of_an_ended_attempt_become_one_file_but_stacks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for number in (1, 2, 3):
        attempt = run.new_attempt()
        attempt.heartbeats.mkdir()
        for rank in range(4):
            write_heartbeat(attempt.heartbeats, replace(BEAT, rank=rank, step=number))
            c_dump(attempt.heartbeats, rank).write_text("Timeout 2\n" if rank == 2 else "")
    run.attempt(1).write_ended("hang", "rank 3", 17)
    before = {number: read_heartbeats(run.attempt(number).heartbeats) for number in (1, 2, 3)}
    for _ in range(2):
        pack_heartbeats(run)
    assert {number: read_heartbeats(run.attempt(number).heartbeats) for number in (1, 2, 3)} == before
    assert sorted(path.name for path in run.attempt(1).heartbeats.iterdir()) == ["2.txt", "all.jsonl"]
    assert read_c_dump(run.attempt(1).heartbeats, 2) == "Timeout 2\n"
    assert len(list(run.attempt(2).heartbeats.iterdir())) == 8, "it may still run"
