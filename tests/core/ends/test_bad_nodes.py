"""The list of bad nodes: kept per cluster, expiring, bounded, safe when many write at once, and never in the way."""

import itertools
import multiprocessing
import os
import time

import pytest

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.bad_nodes import forgive, left_out, listed, note
from hpc_gpt.core.files import state_dir
from hpc_gpt.core.processes.heartbeats import RankHeartbeat, write_heartbeat
from hpc_gpt.launcher.attempts.decisions import ShownJob
from hpc_gpt.launcher.attempts.what_next import decide_next
from tests.made_runs import add_attempt, metrics_line, unsubmitted_run, with_job


def files(cluster="site"):
    return sorted((state_dir() / "nodes" / cluster).glob("*"))


def test_a_failure_is_listed_until_it_expires():
    before = time.time()
    note("site", "n7", "a node of the job died", "run-1", hours=2)
    bad = listed("site")["n7"]
    assert (bad.node, bad.why, bad.run, bad.times) == ("n7", "a node of the job died", "run-1", 1)
    assert before <= bad.since <= time.time()
    assert bad.until - bad.since == pytest.approx(7200)
    assert (list(listed("site", now=bad.until - 1)), listed("site", now=bad.until + 1)) == (["n7"], {})


def test_one_failure_counts_for_its_run_two_for_everyone():
    note("site", "n7", "died", "run-1", hours=1)
    assert (left_out("site", "run-1"), left_out("site", "run-2")) == (["n7"], [])
    note("site", "n7", "died", "run-2", hours=1)
    assert left_out("site", "run-3") == ["n7"]
    bad = listed("site")["n7"]
    assert (bad.times, bad.runs, bad.everyone) == (2, ("run-1", "run-2"), True)


def test_what_was_measured_counts_for_everyone_at_once():
    note("site", "n7", "matmul 41 TFLOP/s, median of its peers 92", "run-1", hours=1, sure=True)
    assert left_out("site", "run-2") == ["n7"]


def test_forgiven_is_forgotten():
    for run in ("run-1", "run-2"):
        note("site", "n7", "died", run, hours=1)
    note("site", "n8", "died", "run-1", hours=1)
    assert forgive("site", "n7")
    assert list(listed("site")) == ["n8"]
    assert not forgive("site", "n7")


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf")])
def test_no_hours_note_nothing(hours):
    note("site", "n7", "died", "run-1", hours)
    assert listed("site") == {}


def test_nothing_grows_for_ever(monkeypatch):
    for number in range(3):
        note("site", f"old{number}", "died", "run-1", hours=1)
    later = itertools.count(time.time() + 3 * 3600)
    monkeypatch.setattr(bad_nodes.time, "time", lambda: next(later))
    for number in range(20):
        note("site", "n7", "died", f"run-{number}", hours=1)
    assert (list(listed("site")), listed("site")["n7"].run) == (["n7"], "run-19")
    assert len(files()) == bad_nodes._NOTES_A_NODE


def test_the_oldest_of_too_many_nodes_go(monkeypatch):
    monkeypatch.setattr(bad_nodes, "_NOTES", 5)
    for number in range(9):
        note("site", f"n{number}", "died", "run-1", hours=1)
    assert list(listed("site")) == ["n4", "n5", "n6", "n7", "n8"]


def write_many(writer):
    for number in range(20):
        note("site", f"n{writer}-{number}", "died", "run-1", hours=1)


def test_many_writers_at_once_lose_nothing():
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(listed("site")) == 40


def test_damaged_notes_are_passed_over_and_taken_away(monkeypatch):
    note("site", "n7", "died", "run-1", hours=1)
    folder = state_dir() / "nodes" / "site"
    for name, text in (("1.json", ""), ("2.json", '{"node": "n9"'), ("3.json", "[]"), (".4.json", "half")):
        (folder / name).write_text(text)
        os.utime(folder / name, (1, 1))
    (folder / "5.json").write_bytes(b"\xff\xfe")
    (folder / "6.json").write_text('{"node": "n9", "why": "", "run": "", "time": NaN, "until": Infinity}')
    assert list(listed("site")) == ["n7"]
    note("site", "n8", "died", "run-1", hours=1)
    assert {path.name for path in files()} >= {"5.json", "6.json"}, "somebody may be writing them"
    assert not {path.name for path in files()} & {"1.json", "2.json", "3.json", ".4.json"}


def test_what_is_no_hosts_name_is_never_on_the_list():
    for name in ("", "n1 n2", "-n1", "n1,n2", "n1\n", "n\x1b[31m", "../x", "n" * 200):
        note("site", name, "died", "run-1", hours=1)
    assert files() == []
    note("site", "n7.cluster-1_a", "died", "run-1", hours=1)
    (there,) = files()
    there.with_name("1.json").write_text(there.read_text().replace("n7.cluster-1_a", "n1 --user=root"))
    os.mkfifo(there.with_name("2.json"))
    assert list(listed("site")) == ["n7.cluster-1_a"]


def test_a_list_that_cannot_be_kept_stops_nobody(monkeypatch, tmp_path, capsys):
    (in_the_way := tmp_path / "a file").write_text("")
    monkeypatch.setenv("HPC_GPT_STATE", str(in_the_way))
    note("site", "n7", "died", "run-1", hours=1)
    assert listed("site") == {}
    assert left_out("site", "run-1") == []
    assert not forgive("site", "n7")
    assert "warning: node n7 is not noted" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "listed"), [(0.0119, ["n3"]), (0.0115, [])])
def test_a_slow_node_is_noted_for_every_run(seconds: float, listed: list[str]) -> None:
    run = with_job(unsubmitted_run("generic-slurm"), "7")
    attempt = add_attempt(run, [metrics_line(5)], "walltime", job_id="7", requeue=True)
    attempt.heartbeats.mkdir()
    for rank, probe_s in enumerate((0.01, 0.01, seconds)):
        write_heartbeat(
            attempt.heartbeats,
            RankHeartbeat(rank, f"n{rank + 1}", 1, 1, 5, "training", 0.0, 300.0, 0.0, probe_s=probe_s),
        )
    decide_next(run, attempt, "error", "", ShownJob(), 1_700_003_600.0)
    cluster = run.resolved().cluster.name
    assert list(bad_nodes.listed(cluster)) == listed
    assert bad_nodes.left_out(cluster, "another run") == listed
    if listed:
        assert "on n3 computes at 0.84 of the median of the other ranks" in bad_nodes.listed(cluster)["n3"].why
