"""Races on this machine, with ranks that write the metrics of a training at once: a second a visit."""

import json
import re
import shlex
import sys
import time
from typing import Any

import pytest

from hpc_gpt.core.files import config_dir, logs_dir
from hpc_gpt.core.runs.race import read_visits
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.cli.command import error_of, hpc_gpt, in_process
from tests.command.mine import PROGRAMS
from tests.launcher.local.conftest import newest
from tests.trainer.supervision.nvml import nvml_environment
from tests.waiting import wait_for

FILE = """
name = "tiny"
[model]
hidden = 32
layers = 4
heads = 4
vocab = 256
seq = 32
[data]
source = "random"
[engine]
name = "ddp"
[layout]
gpus = 1
micro_batch = 2
global_batch = 8
[train]
dtype = "fp32"
lr = 1e-3
[rows]
"""
LARGE = """
name = "large"
model.preset = "gpt2-xl"
data.source = "random"
engine.name = "fsdp"
layout = { gpus = 8, global_batch = 64 }
train = { dtype = "bf16", steps = 200000 }
[rows]
"""
# What a row's name says: its step time, its loss, or how it fails.
RANKS = """
trap '' USR2
name=$(basename "$(dirname "$HPC_GPT_RUN")") step_s=0.1 loss=5.0
attempt="$HPC_GPT_RUN/attempts/$HPC_GPT_ATTEMPT"
case "$name" in
*-oom) echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." && exit 1 ;;
*-bad*) echo "ValueError: no" && exit 1 ;;
*-slow) step_s=0.2 ;;
*-quick) sleep 3 ;; # the leader: a visit of thrice its time is over
*-other) loss=6.0 ;;
*-waits) while [ ! -e "$HPC_GPT_RUN/../../go" ]; do sleep 0.1; done ;;
*-holds) touch "$HELD" ;;
*-after) [ ! -e "$HELD" ] || exit 1 ;;
*-hang) [ "$(ls -d "$HPC_GPT_RUN"/../* | wc -l)" = 1 ] || sleep 1000 ;;
esac
for step in 1 2 3 4 5 6 7 8 9 10; do
  printf '{"step": %d, "loss": %s, "step_s": %s, "tokens": %d, "time": %d}\\n' $step $loss $step_s $((step * 256)) $step
done >"$attempt/metrics.jsonl"
sleep 0.3
printf '{"ended": "done", "cause": null, "step": 10, "time": 1, "requeue": false}' >"$attempt/ended.json"
"""


@pytest.fixture
def race(tmp_path, rank_template):
    """Submits a race of rows by name, and gives its folder and what the command said."""

    def submit(rows: str, *options: object, code: int = 0) -> tuple[RunFolder, str]:
        file = tmp_path / "tiny.toml"
        tables = {"never": '{ layout.pp = 8, impossible = "pp8 needs 8 GPUs" }'}
        file.write_text(FILE + "\n".join(f'"{row}" = {tables.get(row, "{}")}' for row in rows.split()))
        words = ("submit", file, "--race", "--cluster", "local", "--template", rank_template(RANKS))
        done = hpc_gpt(*words, *options)
        assert done.code == code, done.stderr
        return newest(), done.stdout + done.stderr

    return submit


def page_of(run: RunFolder) -> dict[str, Any]:
    page: dict[str, Any] = json.loads((run.path / "bench.json").read_text())
    return page


def names_of(run: RunFolder) -> list[str]:
    rows = page_of(run)["race"]["rows"]
    return [rows[visit.row]["name"] for visit in read_visits(run) if not visit.dropped]


@pytest.mark.long(always=True)
def test_rows_are_measured_in_turns_and_failed_ones_have_a_cause(race):
    run, said = race("quick slow oom other hang never", "--rounds", 2, "--wait")
    assert names_of(run) == ["quick", "slow", "oom", "other", "hang", "other", "hang", "quick"]
    page = page_of(run)
    assert [record["ended"] for record in page["records"]] == ["done", "done", "gpu_memory", "done", "done", "refused"]
    notes = [row["note"] or "" for row in page["race"]["rows"]]
    assert "100% behind" in notes[1]
    assert "loss at step 1 is 1 from the median row's" in notes[3]
    hung = [visit for visit in read_visits(run) if visit.ended == "hang"]
    assert len(hung) == 1
    assert hung[0].limit_s < hung[0].seconds
    assert page["race"]["winner"] == f"{run.run_id}#1"
    assert f"winner: quick ({run.run_id}#1)" in said
    assert [run.run_id for run in [newest()]] == [json.loads(in_process("status", "--json").stdout)["runs"][0]["run"]]
    # The race is one run, and its rows by its name.
    assert in_process("report", logs_dir()).stdout.count("tiny-") == 1
    shown = in_process("report", run.run_id).stdout
    assert "winner: quick" in shown
    assert "pp8 needs 8 GPUs" in shown
    compared = in_process("compare", f"{run.run_id}#1", f"{run.run_id}#2", code=0)
    assert "both belong to job" not in compared.stdout


@pytest.mark.long
def test_stop_ends_it_after_the_visit_and_resume_continues(race):
    run, _ = race("quick waits", "--rounds", 1)
    wait_for("two visits have begun", lambda: len(read_visits(run)) == 2)
    in_process("stop", run.run_id, code=0)
    (run.path / "go").touch()
    wait_for("it has ended", lambda: run.attempts()[-1].ended())
    assert run.attempts()[-1].ended()["ended"] == "stopped"
    assert [visit.ended for visit in read_visits(run)] == ["done", "done"]
    done = hpc_gpt("submit", "--resume", run.run_id, "--wait", code=0)
    assert f"resumes {run.run_id} after 2 visits of 2" in done.stderr
    assert len(read_visits(run)) == 2
    assert page_of(run)["race"]["is_over"]


@pytest.mark.long
def test_cancel_drops_the_visit_and_resume_begins_it_again(race):
    run, _ = race("quick waits", "--rounds", 1)
    wait_for("two visits have begun", lambda: len(read_visits(run)) == 2)
    in_process("cancel", run.run_id, code=0)
    wait_for("it has ended", lambda: run.attempts()[-1].ended())
    assert run.attempts()[-1].ended()["ended"] == "cancelled"
    assert [visit.dropped for visit in read_visits(run)] == [False, True]
    assert "next: " not in in_process("report", run.run_id).stdout, "it is not over"
    (run.path / "go").touch()
    hpc_gpt("submit", "--resume", run.run_id, "--wait", code=0)
    assert [visit.dropped for visit in read_visits(run)] == [False, True, False]


def next_of(text: str) -> tuple[list[str], ...]:
    """The words of the next commands, without `hpc-gpt`."""
    return tuple(shlex.split(line)[2:] for line in text.splitlines() if line.startswith("next: hpc-gpt submit"))


@pytest.mark.long
def test_its_end_names_what_trains_with_the_winner(race, tmp_path):
    run, said = race("slow quick", "--rounds", 1, "--wait", "--set", "train.steps=1", "--set", "name=my tiny")
    (words,) = next_of(said)
    template = words[words.index("--template") + 1]
    own = ["--set", "train.steps=1", "--set", "name=my tiny"]
    expected = ["submit", str(tmp_path / "tiny.toml"), "--row", "quick", "--cluster", "local", "--template", template]
    assert words == [*expected, *own]
    assert next_of(in_process("report", run.run_id).stdout) == (words,)
    assert page_of(run)["race"]["submit"].endswith("--set train.steps=1 --set 'name=my tiny'")
    hpc_gpt(*words, code=0)
    made = newest().resolved()
    assert (made.name, made.row, made.train.steps, made.race) == ("my tiny", "quick", 1, 0)


def test_its_share_of_the_forecast_is_said_before_it_is_queued(tmp_path):
    profile = config_dir() / "clusters" / "mine.toml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text('extends = "h100-80g-8"\n')
    file = tmp_path / "tiny.toml"
    rows = '"a" = { layout.micro_batch = 2 }\n"b" = { layout.micro_batch = 4 }'
    file.write_text(LARGE + rows)
    words = ("submit", file, "--race", "--cluster", "mine", "--time", "10:00:00")
    said = in_process(*words, "--max-gpu-hours", 500, "--dry-run").stderr
    (line,) = [line for line in said.splitlines() if line.startswith("race: 6 visits at most, 3 for each of 2 rows, ")]
    hours, share = re.search(r" and ([\d.]+) GPU-hours at most, ([\d.]+)% of the forecast$", line).groups()
    one = in_process("submit", file, "--row", "a", *words[3:], "--max-gpu-hours", 500, "--dry-run").stdout
    forecast = float(re.search(r"([\d.]+) GPU-hours on 8 GPUs", one)[1])
    assert float(hours) / float(share) * 100 == pytest.approx(forecast, rel=0.05)
    refused = in_process(*words, "--max-gpu-hours", 1)
    message, hint = error_of(refused)
    assert (refused.code, message) == (2, f"the race may take {hours} GPU-hours, more than --max-gpu-hours 1")
    assert "--rounds, --steps or --top" in hint
    assert not logs_dir().exists()


@pytest.mark.long
def test_its_end_names_what_calibrates_plan(race, own_folders):
    profile = config_dir() / "clusters" / "mine.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text('extends = "local"\ndevice = "a100-80g"\nfabric = "nvlink"\n')
    run, said = race("quick slow", "--rounds", 1, "--wait", "--cluster", "mine", "--set", "train.dtype=bf16")
    (line,) = [line for line in said.splitlines() if line.startswith("next: hpc-gpt plan --calibrate")]
    words = shlex.split(line.removeprefix("next: hpc-gpt "))
    assert words == ["plan", "--calibrate", str(run.path), "--cluster", "mine"]
    assert line in in_process("report", run.run_id).stdout
    in_process(*words, code=0)


@pytest.mark.long
def test_a_visit_begins_once_the_memory_of_the_last_one_is_free(race, tmp_path, monkeypatch):
    for name, value in nvml_environment(tmp_path / "lib", 1).items():
        monkeypatch.setenv(name, value)
    for name in ("HELD", "STAND_IN_NVML_HELD"):
        monkeypatch.setenv(name, str(tmp_path / "held"))
    run, _ = race("holds after", "--rounds", 1)
    wait_for("two visits have begun", lambda: len(read_visits(run)) == 2)
    time.sleep(2)  # the ranks of the second visit, which fail while the memory is held, would have started
    (tmp_path / "held").unlink()
    wait_for("it has ended", lambda: run.attempts()[-1].ended())
    assert [visit.ended for visit in read_visits(run)] == ["done", "done"]


PROGRAM = """
name = "nano"
[engine]
name = "command"
[layout]
gpus = 1
[command]
run = "{python} train.py --max_iters=100000 --save_every=100000 --step_s={{pause}} --out_dir={{run}}/out"
workdir = "{folder}"
snapshot = false
[rows]
"long" = {{ command.values.pause = 0.2 }}
"short" = {{ command.values.pause = 0.05 }}
"""


@pytest.mark.long
def test_a_program_in_nanogpts_manner_races_with_two_values(tmp_path):
    file = tmp_path / "nano.toml"
    file.write_text(PROGRAM.format(python=sys.executable, folder=PROGRAMS))
    done = hpc_gpt("submit", file, "--race", "--rounds", 2, "--steps", 10, "--cluster", "local", "--wait", code=0)
    run = newest()
    page = page_of(run)
    assert page["race"]["winner"] == f"{run.run_id}#2"
    assert [record["ended"] for record in page["records"]] == ["done", "done"]
    assert page["records"][0]["step_s"] > 0.2 > page["records"][1]["step_s"] > 0.05
    assert "nobody checked that a step is the same work" in done.stdout
    ended = [RunFolder(run.path / visit.place).attempts()[0].ended() for visit in read_visits(run)]
    assert all("the 15 steps of a race's visit" in each["cause"] for each in ended)
    (words,) = next_of(done.stdout)
    assert words == ["submit", str(file), "--row", "short", "--cluster", "local"]
    # Its rows are what it compares: neither --set nor another --race changes them.
    again = in_process("submit", "--resume", run.run_id, "--set", "command.values.pause=0.1")
    assert (again.code, error_of(again)[0]) == (2, f"{run.run_id} is a race, which resumes as it is")
    both = in_process("submit", "--race", "--resume", run.run_id, "--set", "command.values.pause=0.1")
    assert (both.code, error_of(both)[0]) == (2, "--race and --resume exclude each other")
    assert len(run.attempts()) == 1
