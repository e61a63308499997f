"""A run that is measured saves no checkpoint at its end, and has real ranks."""

from pathlib import Path

from hpc_gpt.core.settings.experiment import Engine
from tests.made_runs import read_run
from tests.trainer.launch import figures, new_run, settings, train

ALONE = {"tp": 1, "pp": 1, "dp": 1}


def test_a_measured_run_saves_nothing_and_computes_the_same(tmp_path: Path, tokens: Path) -> None:
    engine = Engine(name="ddp")
    plain = new_run(tmp_path / "plain", settings(tokens, ALONE, engine, steps=3))
    train(plain, 1)
    run = new_run(tmp_path / "run", settings(tokens, ALONE, engine, steps=3, save_last=False))
    launch = train(run, 1)
    assert launch.ended == ("done", 3, False), launch.log
    assert "not saved after step 3: train.save_last is false" in launch.log
    assert not list(run.checkpoints.glob("*"))
    ended, measured = (
        path.stat().st_mtime_ns for path in (launch.attempt.folder / "ended.json", launch.attempt.measured)
    )
    assert ended <= measured, "the end first: a collective comes between them"
    assert figures(run) == figures(plain)
    assert read_run(run).ended == "done"
