"""A peer's log as a record: by the log readers or by the user's pattern, and what is said of one that failed."""

from __future__ import annotations

import shlex
import statistics
import sys

import pytest

from hpc_gpt.bench.cell import Cell
from hpc_gpt.bench.peer_log import measure_peer, number_of, read_peer
from hpc_gpt.bench.peer_process import PeerEnd

NANOGPT = """
print("tokens per iteration will be: 16,384")
print("number of parameters: 124.34M")
for step in range(20):
    print(f"iter {step}: loss {9 - step / 10:.4f}, time {900 if step == 0 else 50 + step % 3:.2f}ms, mfu 30.00%")
"""
OWN = """
for step in range(12):
    print(f"[{step}] speed=<{100 if step < 5 else 5000 + step:,}>")
"""
OUT_OF_MEMORY = """
import sys
print("iter 0: loss 9.1, time 50.00ms, mfu -100.00%")
sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
"""
# A made-up one that no shape gives away.
SECRET = "opensesame-1234"


def python(program):
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"


def measured(tmp_path, program, pattern=None):
    return measure_peer(Cell("peer", command=python(program), pattern=pattern), tmp_path / "peer-round1.log", 1)


def test_the_log_readers_find_the_speed_of_a_program_they_know(tmp_path):
    record = measured(tmp_path, NANOGPT)
    assert (record.name, record.run, record.dialect, record.engine) == ("peer", "peer-round1", "nanogpt", "nanogpt")
    assert record.tokens_per_s == pytest.approx(16384 / 0.051, rel=0.03)
    assert (record.ended, record.cause) == ("done", None)
    assert (record.loss_first, record.loss_last) == (9.0, 7.1)
    assert record.settings["command"].startswith(sys.executable)
    assert not [flag for flag in record.flags if "--peer-pattern" in flag]


def test_a_pattern_gives_the_median_without_the_first_few(tmp_path):
    record = measured(tmp_path, OWN, r"speed=<([\d,]+)>")
    assert record.tokens_per_s == statistics.median(range(5005, 5012))
    assert (record.steps_used, record.warmup_steps, record.dialect) == (7, 5, None)
    assert "median of 7 lines, 5 before them left out; first peer-round1.log:1" in record.sources["tokens_per_s"]
    assert record.ended == "done"


def test_a_pattern_wins_over_the_readers_and_a_difference_is_said(tmp_path):
    record = measured(tmp_path, NANOGPT, r"mfu ([\d.]+)%")
    assert (record.tokens_per_s, record.dialect) == (30.0, "nanogpt")
    assert any("its figure is taken" in flag for flag in record.flags)


def test_a_pattern_that_finds_nothing_is_said(tmp_path):
    record = measured(tmp_path, OWN, r"(\d+) tok/s")
    assert (record.tokens_per_s, record.ended) == (None, "done")
    assert any("finds no number in any line of peer-round1.log" in flag for flag in record.flags)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pass", "no log reader knows a line of peer-round1.log"),
        (OWN, "no log reader knows a line of peer-round1.log"),
        ("for n in range(9): print(f'step {n}: loss {9 - n}.5')", "no log reader finds tokens/s in peer-round1.log"),
    ],
)
def test_a_log_without_a_speed_asks_for_a_pattern(tmp_path, program, words):
    record = measured(tmp_path, program)
    assert (record.tokens_per_s, record.ended) == (None, "done")
    (flag,) = [flag for flag in record.flags if "--peer-pattern" in flag]
    assert flag.startswith(words)


def test_a_command_that_fails_says_its_last_lines(tmp_path):
    record = measured(tmp_path, "print('one'); print('two'); print('three'); print('four'); raise SystemExit(3)")
    assert (record.ended, record.cause) == ("error", "exit status 3: two | three | four")


def test_a_command_that_fails_says_the_first_cause_that_its_log_tells(tmp_path):
    record = measured(tmp_path, OUT_OF_MEMORY)
    assert record.ended == "gpu_memory"
    assert record.cause.startswith("exit status 1: ")
    assert "CUDA out of memory" in record.cause


@pytest.mark.parametrize(
    ("command", "ended", "words"),
    [
        ("no-such-program --now", "user_error", "exit status 127: "),
        ("exit 5", "error", "exit status 5: it printed nothing"),
        ("kill -9 $$", "error", "signal SIGKILL: it printed nothing"),
    ],
)
def test_a_command_that_never_came_to_a_line(tmp_path, command, ended, words):
    record = measure_peer(Cell("peer", command=command), tmp_path / "log", 1)
    assert record.ended == ended
    assert record.cause.startswith(words)


def test_no_secret_of_the_environment_is_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    program = "import os; print('using', os.environ['WANDB_API_KEY'], '--hub_token', 'abcabcabc'); raise SystemExit(1)"
    command = f"HF_TOKEN=plantedplanted {python(program)} {SECRET}"
    record = measure_peer(Cell("peer", command=command), tmp_path / "log", 1)
    text = record.to_json()
    assert record.cause == "exit status 1: using [removed] --hub_token [removed]"
    for planted in (SECRET, "plantedplanted", "abcabcabc"):
        assert planted not in text.replace("'abcabcabc'", "")


def test_a_pattern_reads_a_bar_that_overwrites_itself_and_bytes_that_are_no_text(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\xff\xfe 10.0k tok/s\r 20.0k tok/s\r 30.0k tok/s\n")
    record = read_peer(Cell("peer", command="x", pattern=r"([\d.]+k) tok/s"), log, PeerEnd(0, 1.0))
    assert record.tokens_per_s == 25e3


@pytest.mark.parametrize("text", ["", None, "inf", "1e999", "-5", "0", "5 %", "0x10"])
def test_what_is_no_speed_is_none(text):
    assert number_of(text) is None
