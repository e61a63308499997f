"""Peers: as the options name them, how their commands run and end, and their logs as records."""

from __future__ import annotations

import os
import shlex
import signal
import statistics
import subprocess
import sys
import time

import pytest

from hpc_gpt.bench.peer import PeerEnd, add_peers, measure_peer, number_of, read_peer, read_peers, run_peer
from hpc_gpt.bench.preparation import BenchCell
from hpc_gpt.errors import ConfigError, RunFolderError
from tests.conftest import REPOSITORY


def test_a_command_may_hold_anything_a_shell_does():
    command = "cd ~/nanoGPT && X=1 python train.py --a=b | tee out"
    assert read_peers([f"nanogpt={command}"], []) == [BenchCell("nanogpt", command=command)]


def test_a_pattern_is_for_all_peers_or_for_the_one_it_names():
    peers = read_peers(["a=run a", "b=run b", "c=run c"], [r"tok=(\d+)", r"b=rate (\S+)"])
    assert [(peer.name, peer.pattern) for peer in peers] == [
        ("a", r"tok=(\d+)"),
        ("b", r"rate (\S+)"),
        ("c", r"tok=(\d+)"),
    ]


@pytest.mark.parametrize(
    ("peers", "patterns", "words"),
    [
        (["python train.py"], [], ["'python train.py' is not NAME='COMMAND'"]),
        (["=python train.py"], [], ["'=python train.py' is not NAME='COMMAND'"]),
        (["a b=x"], [], ["the name 'a b' is not of letters"]),
        (["../x=x"], [], ["the name '../x' is not of letters"]),
        (["a= "], [], ["peer a has no command"]),
        (["a=x", "b=x", "a=y"], [], ["two are called a"]),
        (["a=x"], ["tok/s"], ["'tok/s' has no group"]),
        (["a=x"], [r"(\d+) (tok|seq)/s"], ["has 2 groups"]),
        (["a=x"], ["(unclosed"], ["'(unclosed' is no regular expression: missing )"]),
        (["a=x"], ["a=(x)", "a=(y)"], ["peer a has two"]),
        (["nanogpt=x"], ["(x)", "nanogtp=(y)"], ["two without a peer's name; did you mean nanogpt?"]),
        ([], ["(x)"], ["there is no --peer"]),
        (["a", "b c=x"], ["x"], ["'a' is not NAME", "the name 'b c'", "'x' has no group"]),
    ],
)
def test_every_fault_is_reported_with_what_to_do(peers, patterns, words):
    with pytest.raises(ConfigError) as refusal:
        read_peers(peers, patterns)
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert "--peer" in refusal.value.hint


def test_a_secret_in_a_faulty_value_is_not_repeated():
    with pytest.raises(ConfigError) as refusal:
        read_peers(["python train.py --hub_token hf_plantedplantedplanted1"], [])
    assert "planted" not in str(refusal.value)


def test_a_peer_comes_after_our_rows_and_has_none_of_their_names():
    ours, peers = [BenchCell("ddp")], read_peers(["nanogpt=x"], [])
    assert [cell.name for cell in add_peers(ours, peers)] == ["ddp", "nanogpt"]
    with pytest.raises(ConfigError, match="--peer ddp: one of our rows"):
        add_peers(ours, read_peers(["ddp=x"], []))


BENCH = """
import sys
from pathlib import Path
from hpc_gpt.bench.peer import run_peer
run_peer(sys.argv[1], Path(sys.argv[2]))
"""


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def poll(condition, seconds=240.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_users_shell_runs_the_command_as_it_is_given_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREETING", "two  words")
    log = tmp_path / "log"
    end = run_peer('echo "$GREETING"; pwd; echo wrong >&2; exit 7', log)
    assert end.code == 7
    assert log.read_text().splitlines() == ["two  words", str(tmp_path), "wrong"]


def test_without_a_shell_that_is_there_it_is_the_systems(tmp_path, monkeypatch):
    monkeypatch.setenv("SHELL", "/no/such/shell")
    assert run_peer("echo here", tmp_path / "log").code == 0


def test_a_log_is_never_written_over(tmp_path):
    log = tmp_path / "log"
    log.write_text("kept\n")
    with pytest.raises(RunFolderError, match="cannot write"):
        run_peer("echo new", log)
    assert log.read_text() == "kept\n"


def test_what_a_command_leaves_running_is_ended_with_it(tmp_path):
    log = tmp_path / "log"
    assert run_peer("sleep 300 >/dev/null & echo $!", log).code == 0
    assert not lives(log.read_text().strip())


def test_ctrl_c_ends_the_whole_group(tmp_path):
    log = tmp_path / "log"
    line = [sys.executable, "-c", BENCH, "sleep 300 & echo $!; wait", str(log)]
    bench = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE)
    poll(lambda: log.exists() and log.read_text().endswith("\n"))
    child = log.read_text().strip()
    assert lives(child)
    bench.send_signal(signal.SIGINT)
    _, errors = bench.communicate(timeout=300)
    assert b"KeyboardInterrupt" in errors
    assert not lives(child)


def test_a_group_that_takes_no_notice_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_gpt.bench.peer.GRACE_S", 0.3)
    log = tmp_path / "log"
    started = "trap '' TERM; (trap '' TERM; while :; do sleep 0.1; done) >/dev/null & echo $!"
    assert run_peer(started, log).code == 0
    assert not lives(log.read_text().strip())


def test_a_ctrl_c_while_it_is_started_ends_it_as_well(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("hpc_gpt.bench.peer.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_peer("sleep 300", tmp_path / "log")
    assert not lives(started[0])


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
    return measure_peer(BenchCell("peer", command=python(program), pattern=pattern), tmp_path / "peer-round1.log", 1)


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
    assert any("the latter is used" in flag for flag in record.flags)


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
    record = measure_peer(BenchCell("peer", command=command), tmp_path / "log", 1)
    assert record.ended == ended
    assert record.cause.startswith(words)


def test_no_secret_of_the_environment_is_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    program = "import os; print('using', os.environ['WANDB_API_KEY'], '--hub_token', 'abcabcabc'); raise SystemExit(1)"
    command = f"HF_TOKEN=plantedplanted {python(program)} {SECRET}"
    record = measure_peer(BenchCell("peer", command=command), tmp_path / "log", 1)
    text = record.to_json()
    assert record.cause == "exit status 1: using [removed] --hub_token [removed]"
    for planted in (SECRET, "plantedplanted", "abcabcabc"):
        assert planted not in text.replace("'abcabcabc'", "")


def test_a_pattern_reads_a_bar_that_overwrites_itself_and_bytes_that_are_no_text(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\xff\xfe 10.0k tok/s\r 20.0k tok/s\r 30.0k tok/s\n")
    record = read_peer(BenchCell("peer", command="x", pattern=r"([\d.]+k) tok/s"), log, PeerEnd(0, 1.0))
    assert record.tokens_per_s == 25e3


@pytest.mark.parametrize("text", ["", None, "inf", "1e999", "-5", "0", "5 %", "0x10"])
def test_what_is_no_speed_is_none(text):
    assert number_of(text) is None
