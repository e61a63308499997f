"""What earlier versions made goes on: runs of each engine, a script, a calibrated profile, a bench folder.

`made_at_COMMIT.tar.xz` holds them as that commit left them; of the checkpoints of each run, the newest.
"""

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.snapshot import OLD_NAMES, code_files
from tests import marked
from tests.cli.command import hpc_gpt, in_process
from tests.local.conftest import status_of, wait_until

# {commit: the step at which its run `stopped` was stopped}
COMMITS = {"b498b09": 419, "1424389": 2}
HERE = Path(__file__).parent
DONE = ("ddp", "fsdp", "zero", "zero-alone", "three", "hf", "megatron")
# Each takes the start of a trainer: two in each run, one of them by its own script and code.
RESUMED = ("ddp", "fsdp", "zero", "zero-alone", "three", "hf")


@pytest.fixture(params=COMMITS)
def commit(request) -> str:
    return request.param


@pytest.fixture
def made(commit, tmp_path, monkeypatch) -> Path:
    """The unpacked archive, whose folders the command takes for its own."""
    with tarfile.open(HERE / f"made_at_{commit}.tar.xz") as archive:
        archive.extractall(tmp_path / "made", filter="data")
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "made" / "logs"))
    monkeypatch.setenv("HPC_GPT_CONFIG", str(tmp_path / "made" / "config"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "made"


def run_of(made: Path, name: str) -> Path:
    [run] = (made / "logs" / name).iterdir()
    return run


def test_runs_are_shown_reported_and_compared(made):
    for name in (*DONE, "stopped"):
        run = run_of(made, name)
        kept = json.loads((run / "record.json").read_text())
        [status] = json.loads(in_process("status", run, "--json").stdout)["runs"]
        [record] = json.loads(in_process("report", run, "--json").stdout)["records"]
        why = json.loads(in_process("why", run, "--json").stdout)
        ended = "stopped" if name == "stopped" else "done"
        assert (status["state"], record["ended"], why["ended"]) == (ended, ended, ended)
        kept.pop("sources")
        # That version counted every parameter, those that are only looked up as well.
        assert 0 < record["tflops_model"] < kept.pop("tflops_model")
        # A later version may see more to flag.
        assert set(kept.pop("flags")) <= set(record["flags"])
        assert record["gpu_hours"] is status["gpu_hours"] is kept["gpu_hours"] is None, "of ranks on CPUs"
        # Keys are only ever added, to the tables of settings and to attempts as well.
        settings = {
            name: {key: record["settings"][name][key] for key in table} for name, table in kept["settings"].items()
        }
        attempts = [
            {key: now[key] for key in before} for now, before in zip(record["attempts"], kept["attempts"], strict=True)
        ]
        assert {**{key: record[key] for key in kept}, "settings": settings, "attempts": attempts} == kept
    compared = in_process("compare", run_of(made, "ddp"), run_of(made, "fsdp"))
    assert compared.code == 0, compared.stderr
    assert "ddp -> fsdp" in compared.stdout


@pytest.mark.parametrize("name", marked(RESUMED, [name for name in RESUMED if name != "zero-alone"]))
def test_a_checkpoint_is_taken_up_by_a_run_of_today(made, name):
    parent = run_of(made, name)
    done = hpc_gpt("submit", "--resume", parent, "--until", "steps=8", "--wait")
    assert done.code == 0, done.stderr
    [child] = [run for run in (made / "logs" / name).iterdir() if run != parent]
    assert "resumed after step 6 of 8" in (child / "attempts" / "1" / "log").read_text()
    lines = [json.loads(line) for line in (child / "attempts" / "1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7, 8]


def test_offloaded_states_in_other_groups_give_equal_losses(tmp_path, monkeypatch):
    """ZeRO-3, its optimizer offloaded, in groups of 10^9 numbers; a group is a layer today. Trained to step 8, its
    newest checkpoint is that of step 6."""
    with tarfile.open(HERE / "offloaded_at_b498b09.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    [parent] = (tmp_path / "logs" / "offloaded").iterdir()
    done = hpc_gpt("submit", "--resume", parent, "--until", "steps=9", "--wait")
    assert done.code == 0, done.stderr
    [child] = [run for run in (tmp_path / "logs").glob("*/*") if run != parent]
    assert json.loads((child / "ds_config.json").read_text())["zero_optimization"]["sub_group_size"] < 10**4

    def losses(run: Path) -> dict[int, float]:
        lines = (run / "attempts" / "1" / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines)}

    before, after = losses(parent), losses(child)
    assert sorted(after) == [7, 8, 9]
    assert [after[7], after[8]] == pytest.approx([before[7], before[8]], rel=1e-6)


# What scripts rendered by earlier versions start, or take out of the archive.
STARTED = (
    *("bench.race", "chain.after", "chain.before", "chain.script_end", "doctor.preflight", "ends.notify"),
    *("launch.after", "launch.local.by_hand", "launch.local.queue", "report.track", "runs.snapshot"),
    *("supervision.gpus", "train", "train.export", "train.preflight", "train.script_watch"),
)


def test_names_that_earlier_scripts_start_are_there():
    specimens = " ".join(path.read_text(encoding="utf-8") for path in HERE.glob("*.sh"))
    assert set(re.findall(r"-m hpc_gpt\.([\w.]+\w)", specimens)) <= {*STARTED}
    program = (
        "import sys\nfrom importlib.util import find_spec\nprint(*(find_spec(name).origin for name in sys.argv[1:]))"
    )
    line = [sys.executable, "-c", program, *(f"hpc_gpt.{name}" for name in STARTED)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == len(STARTED)
    assert {*OLD_NAMES} < {*code_files()}


@pytest.mark.long(but="first")
def test_a_stopped_run_goes_on_by_its_own_script_and_code(made, commit):
    run, stopped_at = run_of(made, "stopped"), COMMITS[commit]
    resolved = json.loads((run / "resolved.json").read_text())
    assert resolved["train"]["steps"] == 100000
    assert hpc_gpt("submit", "--resume", run).code == 0
    folder = RunFolder(run)
    wait_until(lambda: (status_of(folder).step or 0) > stopped_at)
    assert hpc_gpt("cancel", run, "--yes").code == 0
    wait_until(lambda: status_of(folder).state == "cancelled")
    assert f"resumed after step {stopped_at} of 100000" in folder.attempts()[1].log.read_text()


def test_a_bench_folder_is_reported(made):
    records = json.loads(in_process("report", made / "logs" / "tiny-bench", "--json").stdout)["records"]
    assert {record["name"] for record in records} == {"tiny-ddp", "tiny-fsdp"}


def test_a_calibrated_profile_predicts(made):
    asked = ("plan", "--model", "gpt2-xl", "--gpus", "8", "--cluster", "a100-80g-8", "--json")
    calibrated = json.loads(in_process(*asked).stdout)
    (made / "config" / "clusters" / "a100-80g-8.toml").unlink()
    assert json.loads(in_process(*asked).stdout) != calibrated
