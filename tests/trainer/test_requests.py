"""Real ranks that are asked to save, to stop and to go back to the queue, by files in the attempt's folder."""

from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.processes.requests import answer_of, open_requests, write_request
from tests.trainer.launch import LOCAL, Launch, lines, new_run, settings

LONG = 1_000_000
PP2 = {"tp": 1, "pp": 2, "dp": 1}


def test_all_save_at_one_step_and_go_on_then_stop(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, settings(tokens, PP2, steps=LONG))
    launch = Launch(run, 2)
    launch.await_words("step 3/")
    requests = [write_request(launch.attempt, "save") for _ in range(2)]
    launch.await_state(lambda: all(answer_of(launch.attempt, request) for request in requests), "answer")
    answers = [answer_of(launch.attempt, request) for request in requests]
    step = answers[-1]["step"]
    assert all(said["done"] for said in answers)
    assert (run.checkpoints / f"step-{step:08d}" / "complete.json").is_file()
    assert f"saved after step {step}" in launch.log
    launch.await_words(f"step {step + 3}/")
    write_request(launch.attempt, "stop")
    assert launch.wait() == [0] * 2, launch.log
    ended, last, requeue = launch.ended
    assert (ended, requeue) == ("stopped", False)
    assert launch.attempt.ended()["cause"] == "hpc-gpt stop"
    assert last > step + 2
    saved = [path.name for path in sorted(run.checkpoints.glob("step-*"))]
    assert saved[-1] == f"step-{last:08d}"
    assert len(saved) <= 3, "what was asked for twice within a second is one save, or two"
    assert [line["step"] for line in lines(run)] == list(range(1, last + 1))


def test_a_requeue_leaves_the_mark_where_the_profile_has_a_queue(tmp_path: Path, tokens: Path) -> None:
    resolved = settings(tokens, PP2, steps=LONG)
    run = new_run(tmp_path, replace(resolved, cluster=replace(LOCAL, chain="requeue")))
    attempt = run.new_attempt()
    write_request(attempt, "requeue")  # before a rank has started
    launch = Launch(run, 2, attempt)
    assert launch.wait() == [0, 0], launch.log
    ended, step, requeue = launch.ended
    assert (ended, requeue) == ("requeued", True)
    assert (run.checkpoints / f"step-{step:08d}").is_dir()
    assert [request.verb for request in open_requests(attempt)] == ["requeue"]
