"""The tracker on a metrics.jsonl that grows: TensorBoard reads its files back, wandb's own file has its run."""

import json
import os
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.records.own_run import read_own
from hpc_gpt.report.exports import write_events
from hpc_gpt.report.track import Tracker
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, make_run, metrics_line, with_attempt
from tests.programs import python
from tests.report.test_wandb import records, rows
from tests.trainer.filling import fill

KEY = "0123456789" * 4


def two_attempts(run: RunFolder, track=lambda number: None) -> None:
    """Steps 1 to 10, then from the checkpoint of step 5 again 6 to 12."""
    add_attempt(run, 10, ended="walltime")
    track(1)
    again = [metrics_line(step, loss=20.0 - step, loss_eval=1.5 if step == 12 else None) for step in range(6, 13)]
    add_attempt(run, again, resumed_step=5)
    track(2)


def losses(run: RunFolder) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars("loss")]


LOSSES = [*((step, 2 + 4 / step) for step in range(1, 6)), *((step, 20 - step) for step in range(6, 13))]


def in_this_process(run: RunFolder):
    def track(number: int) -> None:
        tracker = Tracker(run, number)
        tracker.send()
        tracker.close()

    return track


def test_a_mixtures_experts_have_curves(tmp_path):
    run = make_run(tmp_path, experiment="moe-tiny", track__tensorboard=True)
    figures = {"balance_loss": 1.25, "expert_load": 1.5, "experts_dead": 0}
    add_attempt(run, [metrics_line(step, **figures) for step in (1, 2)])
    in_this_process(run)(1)
    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert {name: [event.value for event in events.Scalars(name)] for name in figures} == {
        name: [figure, figure] for name, figure in figures.items()
    }


def test_a_resumption_makes_tensorboard_drop_steps_trained_again(tmp_path):
    run = make_run(tmp_path, track__tensorboard=True)
    two_attempts(run, in_this_process(run))
    assert losses(run) == LOSSES
    files = sorted((run.path / "tensorboard").iterdir())
    starts = [
        event.step
        for event in EventFileLoader(str(files[1])).Load()
        if event.HasField("session_log") and event.session_log.status == SessionLog.START
    ]
    assert starts == [6]
    (exported,) = write_events([read_own(run)], tmp_path / "export")
    both = [EventAccumulator(str(folder)) for folder in (run.path / "tensorboard", exported.parent)]
    for events in both:
        events.Reload()
    live, export = both
    assert live.Tags()["scalars"] == export.Tags()["scalars"]
    for tag in live.Tags()["scalars"]:
        pairs = zip(live.Scalars(tag), export.Scalars(tag), strict=True)
        assert all(own.step == other.step and own.value == pytest.approx(other.value) for own, other in pairs), tag


def test_lines_are_sent_when_whole_or_by_the_next_attempt(tmp_path):
    run = make_run(tmp_path, track__tensorboard=True)
    first = add_attempt(run, [metrics_line(1), '{"step": 2, "loss": 4'])
    tracker = Tracker(run, 1)
    assert losses(run) == LOSSES[:1]
    with first.metrics.open("a") as file:
        file.write(".0}\n" + '{"step": 3')
    tracker.send()
    assert losses(run) == LOSSES[:2]
    with first.metrics.open("a") as file:
        file.write(', "loss": 3.0}\n{"step": 4, "loss": 2.0}\n')
    # It was killed. The next attempt has not trained yet.
    add_attempt(run, [], ended=None)
    Tracker(run, 2)
    assert losses(run) == [*LOSSES[:2], (3, 3.0), (4, 2.0)]
    note = run.attempt(2).folder / "track.json"
    assert f'"pid": {os.getpid()}, "step": 4' in note.read_text()


def test_on_a_full_disk_no_row_is_lost_or_sent_twice(tmp_path, small_disk, capsys):
    run = make_run(small_disk, track__tensorboard=True)
    attempt = add_attempt(run, [metrics_line(step) for step in (1, 2)])
    filler = fill(small_disk)
    tracker = Tracker(run, 1)
    for _ in range(2):
        tracker.send()
        assert tracker.runs
    assert re.fullmatch(
        r"track: tensorboard: waits for space on the disk: .*No space left.*\n", capsys.readouterr().out
    )
    filler.unlink()
    tracker.send()
    assert losses(run) == LOSSES[:2]
    with attempt.metrics.open("a") as file:
        file.writelines(f"{json.dumps(metrics_line(step))}\n" for step in (3, 4, 5))
    filler = fill(small_disk)
    tracker.send()
    filler.unlink()
    tracker.send()
    tracker.close()
    assert losses(run) == LOSSES[:5]
    assert '"step": 5' in attempt.track.read_text()


def track_in_a_process(run: RunFolder, number: int, **environment: str) -> str:
    """The tracker as job.sh starts it, after the ranks; gives what it prints."""
    run.attempt(number).ranks_ended.touch()
    paths = os.pathsep.join([environment.pop("before", str(REPOSITORY)), str(REPOSITORY)])
    done = python(
        "-m",
        "hpc_gpt.report.track",
        run.path,
        number,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        code=0,
    )
    return done.stdout + done.stderr


@pytest.mark.long
def test_wandb_gets_each_step_once_in_one_run(tmp_path):
    run = make_run(tmp_path, track__wandb="gpt")
    said = []
    given = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "WANDB_RUN_ID": "another"}
    two_attempts(run, lambda number: said.append(track_in_a_process(run, number, **given)))
    assert said == ["", ""]
    made = sorted(path for path in (run.path / "wandb").iterdir() if path.name.startswith("offline-run-"))
    sent = [[row["_step"] for row in rows(folder)] for folder in made]
    assert sent == [list(range(1, 11)), [11, 12]], "as wandb sync appends them, by their names"
    for folder in made:
        (record,) = records(folder, "run")
        assert (record.run_id, record.project, record.run_group) == (run.run_id, "gpt", "demo")
    assert not any(KEY.encode() in path.read_bytes() for path in run.path.rglob("*") if path.is_file())


STAND_IN = """
class Settings:
    def __init__(self, **settings): pass
def init(**given):
    import os, sys, time
    open(os.environ["CALLS"], "a").write(f"init {given['id']} {given['resume']}\\n")
    return Run()
class Run:
    offline = disabled = False
    starting_step = 8
    def log(self, row, step):
        open(__import__("os").environ["CALLS"], "a").write(f"{step}\\n")
        {log}
    def finish(self):
        pass
"""


def stand_in(folder: Path, log: str = "pass", module: str = "") -> str:
    """A folder with a wandb that has steps 1 to 7 on its server, and notes what comes."""
    folder.mkdir()
    (folder / "wandb.py").write_text(module + STAND_IN.replace("{log}", log))
    return str(folder)


def test_online_wandb_says_itself_which_steps_it_has(tmp_path):
    run = with_attempt(make_run(tmp_path, track__wandb="gpt"), 10)
    track_in_a_process(run, 1, before=stand_in(tmp_path / "own"), CALLS=str(tmp_path / "calls"))
    assert (tmp_path / "calls").read_text().split("\n") == [f"init {run.run_id} allow", "8", "9", "10", ""]


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("log", "module", "words"),
    [
        ("raise RuntimeError('no\\nnetwork')", "", "no network"),
        ("pass", "raise ImportError('no wheel')",
         "the export needs the package wandb, which is not installed: no wheel (pip install 'hpc-gpt[wandb]')"),
    ],
)  # fmt: skip
def test_a_fault_of_one_is_a_line_and_the_other_goes_on(log, module, words, tmp_path):
    run = with_attempt(make_run(tmp_path, track__wandb="gpt", track__tensorboard=True), 10)
    own = stand_in(tmp_path / "own", log, module)
    said = track_in_a_process(run, 1, before=own, CALLS=str(tmp_path / "calls"))
    assert said == f"track: wandb: {words}; the run goes on without it\n"
    assert len(losses(run)) == 10


def test_a_run_that_is_gone_is_a_line(tmp_path):
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    gone = "the run folder does not exist any more (was it moved or deleted? name its new place)"
    said = track_in_a_process(RunFolder(tmp_path), 1)
    assert said == f"track: {tmp_path}: {gone}; the run goes on without it\n"
