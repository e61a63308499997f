"""The curves of [track] over the attempts of a run: TensorBoard and wandb read them back, each step once."""

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.services import Track
from hpc_gpt.reader.runs.own_run import read_own
from hpc_gpt.report.exports import write_events
from hpc_gpt.trainer.curves import Curves, service_id
from tests.conftest import REPOSITORY
from tests.core.sinks.stand_ins import put_mlflow, put_wandb
from tests.made_runs import add_attempt, make_run, metrics_line
from tests.programs import python
from tests.report.test_wandb import records, rows
from tests.trainer.launch import figures, new_run, settings, train_alone
from tests.waiting import patient

KEY = "0123456789" * 4
FIRST = [metrics_line(step) for step in range(1, 11)]
# From the checkpoint of step 5.
AGAIN = [metrics_line(step, loss=20.0 - step, loss_eval=1.5 if step == 12 else None) for step in range(6, 13)]


def open_curves(run: RunFolder, attempt: Attempt) -> Curves:
    return Curves(run, attempt, run.resolved())


def show(run: RunFolder, lines: list[dict], **more) -> None:
    """An attempt whose rank 0 shows its lines, in this process."""
    attempt = add_attempt(run, lines, **more)
    curves = open_curves(run, attempt)
    curves.add(lines)
    curves.close(patient(60))


def read_back(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def losses(run: RunFolder) -> list[tuple[int, float]]:
    events = read_back(run.path / "tensorboard").Scalars("loss")
    return [(event.step, pytest.approx(event.value)) for event in events]


LOSSES = [*((step, 2 + 4 / step) for step in range(1, 6)), *((step, 20 - step) for step in range(6, 13))]


def test_tensorboard_drops_steps_that_are_trained_again(tmp_path, capsys):
    run = make_run(tmp_path, track__tensorboard=True)
    show(run, FIRST, ended="walltime")
    show(run, AGAIN, resumed_step=5)
    assert losses(run) == LOSSES
    (exported,) = write_events([read_own(run)], tmp_path / "export")
    live, export = read_back(run.path / "tensorboard"), read_back(exported.parent)
    assert live.Tags()["scalars"]
    assert set(live.Tags()["scalars"]) == set(export.Tags()["scalars"])
    for tag in live.Tags()["scalars"]:
        pairs = zip(live.Scalars(tag), export.Scalars(tag), strict=True)
        assert all(own.step == other.step and own.value == pytest.approx(other.value) for own, other in pairs), tag
    content = live.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert (settings["gpus"].number_value, settings["train.lr"].number_value) == (4, run.resolved().train.lr)
    assert capsys.readouterr().out == ""


def test_a_mixture_has_curves_of_its_experts_and_sources(tmp_path):
    run = make_run(tmp_path, experiment="moe-tiny", track__tensorboard=True)
    figures = {"balance_loss": 1.25, "expert_load": 1.5, "experts_dead": 0, "loss_eval": float("nan"), "bpb": 0.75}
    by_source = {"loss_eval_by": {"web": 1.5, "code": float("nan")}, "bpb_by": {"web": 0.5, "code": None}}
    show(run, [metrics_line(1, **figures, **by_source)])
    events = read_back(run.path / "tensorboard")
    wanted = {"balance_loss": [1.25], "expert_load": [1.5], "experts_dead": [0], "loss_eval_by/web": [1.5]}
    wanted |= {"bpb": [0.75], "bpb_by/web": [0.5]}
    assert {name: [event.value for event in events.Scalars(name)] for name in wanted} == wanted
    assert not {"loss_eval", "loss_eval_by/code", "bpb_by/code"} & set(events.Tags()["scalars"])


SHOW = """
import json, sys
from pathlib import Path
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.curves import Curves
run = RunFolder(Path(sys.argv[1]))
attempt = run.attempts()[-1]
curves = Curves(run, attempt, run.resolved())
curves.add([json.loads(line) for line in attempt.metrics.read_text().splitlines()])
curves.close(float(sys.argv[2]))
"""


def show_in_a_process(run: RunFolder, lines: list[dict], before: str = "", **environment: str) -> str:
    """The same in a process of its own, in which packages of the folder `before` come first; gives what it prints."""
    add_attempt(run, lines)
    paths = os.pathsep.join(filter(None, [before, str(REPOSITORY)]))
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    done = python("-c", SHOW, run.path, patient(60), env=env, code=0)
    return done.stdout + done.stderr


@pytest.mark.long
def test_wandb_has_one_run_with_each_step_once(tmp_path):
    run = make_run(tmp_path, track__wandb="gpt")
    given = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "WANDB_RUN_ID": "another"}
    assert [show_in_a_process(run, lines, **given) for lines in (FIRST, AGAIN)] == ["", ""]
    made = sorted(path for path in (run.path / "wandb").iterdir() if path.name.startswith("offline-run-"))
    sent = [[row["_step"] for row in rows(folder)] for folder in made]
    assert sent == [list(range(1, 11)), [11, 12]], "as wandb sync appends them, by their names"
    for folder in made:
        (record,) = records(folder, "run")
        assert (record.run_id, record.project, record.run_group) == (run.run_id, "gpt", "demo")
        assert (record.host, record.display_name) == ("", f"demo/{run.run_id}")
    host = socket.gethostname().encode()
    for path in run.path.rglob("*.wandb"):
        assert KEY.encode() not in path.read_bytes()
        assert len(host) < 5 or host not in path.read_bytes()


def calls(path: Path) -> list[list]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_online_wandb_says_itself_which_steps_it_has(tmp_path):
    run = make_run(tmp_path, track__wandb="gpt")
    said = show_in_a_process(run, FIRST, put_wandb(tmp_path / "own"), CALLS=str(tmp_path / "calls"))
    begun = [["init", run.run_id, "online", "allow"]]
    assert (said, calls(tmp_path / "calls")) == ("", [*begun, ["log", 8], ["log", 9], ["log", 10], ["finish"]])


def test_a_run_by_plain_sbatch_has_its_clusters_name_in_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "north")
    run = make_run(tmp_path)
    assert service_id(run, add_attempt(run, FIRST)) == run.run_id
    for number, wanted in (("4711", "north-4711"), ("4712_3", "north-4712_3")):
        other = RunFolder(run.path.with_name(number))
        shutil.copytree(run.path, other.path)
        shutil.rmtree(other.path / "attempts")
        assert service_id(other, add_attempt(other, FIRST)) == wanted
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "south")
        assert service_id(other, add_attempt(other, AGAIN)) == wanted, "also if a federation moved it"
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "north")
    run.path.rename(older := run.path.with_name("4713"))
    assert service_id(RunFolder(older), add_attempt(RunFolder(older), AGAIN)) == "4713", "it has its id"


@pytest.mark.parametrize(
    ("init", "before", "wanted"),
    [
        ("raise RuntimeError('no\\nnetwork')", "", "it writes into the run folder alone: no network"),
        ("pass", "raise ImportError('no wheel')",
         "10 of 10 steps are not there, but in metrics.jsonl: the curves need the package wandb, which is not "
         "installed: no wheel"),
    ],
)  # fmt: skip
def test_a_fault_of_one_is_a_line_and_the_other_goes_on(init, before, wanted, tmp_path):
    run = make_run(tmp_path, track__wandb="gpt", track__tensorboard=True)
    own = put_wandb(tmp_path / "own", init, before)
    assert show_in_a_process(run, FIRST, own, CALLS=str(tmp_path / "calls")) == f"track: wandb: {wanted}\n"
    assert len(losses(run)) == 10
    if not before:
        _, end, begun, *logged = calls(tmp_path / "calls")
        assert (end, begun) == (["teardown"], ["init", run.run_id, "offline", None])
        assert logged == [*(["log", step] for step in range(1, 11)), ["finish"]]


def test_without_its_server_mlflow_writes_into_the_run_folder(tmp_path):
    run, own = make_run(tmp_path, track__mlflow="gpt"), put_mlflow(tmp_path / "own")
    assert show_in_a_process(run, FIRST, own) == ""
    said = show_in_a_process(run, AGAIN, own, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert said == "track: mlflow: it writes into the run folder alone: no answer of http://127.0.0.1:9\n"
    (kept,) = json.loads((run.path / "mlruns.json").read_text())["runs"]
    assert [step for name, _, _, step in kept["metrics"] if name == "loss"] == list(range(1, 13))


# rank 0's thread never ends this import; the trainer waits a second for it at its end
SLEEPS = "import sys, time; sys.modules['hpc_gpt.trainer.attempt']._CURVES_S = 1.0; time.sleep(1e6)"


@pytest.mark.long
def test_a_service_that_sleeps_costs_no_step_and_no_checkpoint(tmp_path, tokens):
    resolved = settings(tokens, {"tp": 1, "pp": 1, "dp": 1}, steps=6, save_every=3, keep_last=9)
    asked = replace(resolved, track=Track(tensorboard=True, wandb="gpt"))
    own = put_wandb(tmp_path / "own", before=SLEEPS)
    plain, shown = new_run(tmp_path / "plain", resolved), new_run(tmp_path / "shown", asked)
    train_alone(plain)
    log = train_alone(shown, PYTHONPATH=os.pathsep.join((own, str(REPOSITORY)))).stdout
    assert figures(shown) == figures(plain)
    assert [path.name for path in shown.checkpoints.glob("step-*")] == ["step-00000003", "step-00000006"]
    assert shown.attempt(1).ended()["ended"] == "done"
    said = [line for line in log.splitlines() if line.startswith("track:")]
    assert said == ["track: wandb: 6 of 6 steps are not there, but in metrics.jsonl: it has not ended in time"]
    assert [step for step, _ in losses(shown)] == [1, 2, 3, 4, 5, 6]
