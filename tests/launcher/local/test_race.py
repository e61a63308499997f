"""Races on this machine, with ranks that write the metrics of a training at once: a second a visit."""

import json
import re
import shlex
import sys
from dataclasses import replace

import pytest

from hpc_gpt.core.files import config_dir, logs_dir
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.record import Record
from hpc_gpt.report.measured_rows import MeasuredRow
from tests.cli.command import error_of, hpc_gpt, in_process
from tests.command.mine import PROGRAMS
from tests.launcher.local.conftest import newest
from tests.made_runs import make_run
from tests.measured_rows import tables_of

RECORD = Record(ended="done", step_s=0.1, gpus=1, rounds=3)
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
name=$(sed -n 's/^ *"row": "\\(.*\\)",*$/\\1/p' "$HPC_GPT_RUN/resolved.json") step_s=0.1 loss=5.0
attempt="$HPC_GPT_RUN/attempts/$HPC_GPT_ATTEMPT"
case "$name" in
oom) echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." && exit 1 ;;
bad*) echo "ValueError: no" && exit 1 ;;
slow) step_s=0.2 ;;
other) loss=6.0 ;;
esac
for step in 1 2 3 4 5 6 7 8 9 10; do
  printf '{"step": %d, "loss": %s, "step_s": %s, "tokens": %d, "time": %d}\\n' $step $loss $step_s $((step * 256)) $step
done >"$attempt/metrics.jsonl"
sleep 0.3
printf '{"ended": "done", "cause": null, "step": 10, "time": 1, "requeue": false}' >"$attempt/ended.json"
"""


@pytest.fixture
def race(tmp_path, rank_template):
    """Submits a race of rows by name, and gives its id and what the command said."""

    def submit(rows: str, *options: object, code: int = 0) -> tuple[str, str]:
        file = tmp_path / "tiny.toml"
        tables = {"never": '{ layout.pp = 8, impossible = "pp8 needs 8 GPUs" }'}
        file.write_text(FILE + "\n".join(f'"{row}" = {tables.get(row, "{}")}' for row in rows.split()))
        words = ("submit", file, "--race", "--cluster", "local", "--template", rank_template(RANKS))
        done = hpc_gpt(*words, *options)
        assert done.code == code, done.stderr
        return str(newest().sweep_id), done.stdout + done.stderr

    return submit


@pytest.mark.long(always=True)
def test_rows_are_measured_in_turns_and_failed_ones_have_a_cause(race):
    race_id, said = race("quick slow oom other never", "--rounds", 2, code=3)
    runs = sorted(list_runs(logs_dir()), key=lambda run: run.attempts()[0].started()["started"])
    order = [(run.sweep_note()["round"], run.resolved().row) for run in runs]
    expected = [
        (0, "quick"),
        (0, "slow"),
        (0, "oom"),
        (0, "other"),
        (1, "slow"),
        (1, "oom"),
        (1, "other"),
        (1, "quick"),
    ]
    assert order == expected
    heading, *lines = in_process("report", race_id).stdout.splitlines()
    assert "x leader" in heading
    rows = {line.split()[0]: line for line in lines[:5]}
    assert list(rows) == ["quick", "slow", "oom", "other", "never"]
    assert re.search(r"2,560 +1\.000 +2 ", rows["quick"])
    assert re.search(r"1,280 +2\.000 +2 ", rows["slow"])
    assert "CUDA out of memory" in rows["oom"]
    assert "its loss at step 1 is 1 from the median row's" in rows["other"]
    assert "pp8 needs 8 GPUs" in rows["never"]
    assert f"winner: quick ({race_id}#1), the fastest row" in lines
    assert f"winner: quick ({race_id}#1), the fastest row" in said
    (line,) = json.loads(in_process("status", "--json", race_id).stdout)["runs"][:1]
    assert line["sweep_id"] == race_id
    records = json.loads(in_process("report", "--json", race_id).stdout)["records"]
    assert [(record["run"], record["ended"], record["rounds"]) for record in records] == [
        (f"{race_id}#1", "done", 2),
        (f"{race_id}#2", "done", 2),
        (f"{race_id}#3", "gpu_memory", 0),
        (f"{race_id}#4", "done", 2),
        (f"{race_id}#5", "refused", None),
    ]


@pytest.mark.long
def test_its_rows_are_compared_in_pairs_of_rounds(race):
    race_id, _ = race("quick slow", "--rounds", 3)
    compared = in_process("compare", f"{race_id}#1", f"{race_id}#2", code=0).stdout
    assert "the interval comes from the 3 ratios of rounds, which were measured in turns" in compared
    assert "slower" in compared
    assert in_process("compare", race_id, code=0).stdout == compared


def next_of(text: str) -> tuple[list[str], ...]:
    """The words of the next commands, without `hpc-gpt`."""
    return tuple(shlex.split(line)[2:] for line in text.splitlines() if line.startswith("next: hpc-gpt submit"))


@pytest.mark.long
def test_its_end_names_what_trains_with_the_winner(race, tmp_path):
    race_id, said = race("slow quick", "--rounds", 1, "--set", "train.steps=1", "--set", "name=my tiny")
    (words,) = next_of(said)
    template = words[words.index("--template") + 1]
    own = ["--set", "train.steps=1", "--set", "name=my tiny"]
    expected = ["submit", str(tmp_path / "tiny.toml"), "--row", "quick", "--cluster", "local", "--template", template]
    assert words == [*expected, *own]
    assert next_of(in_process("report", race_id).stdout) == (words,)
    hpc_gpt(*words, code=0)
    made = newest().resolved()
    assert (made.name, made.row, made.train.steps) == ("my tiny", "quick", 1)
    assert "round" not in newest().sweep_note()


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
    race_id, said = race("quick slow", "--rounds", 1, "--cluster", "mine", "--set", "train.dtype=bf16")
    (line,) = [line for line in said.splitlines() if line.startswith("next: hpc-gpt plan --calibrate")]
    words = shlex.split(line.removeprefix("next: hpc-gpt "))
    assert words == ["plan", "--calibrate", str(newest().path.parent / race_id), "--cluster", "mine"]
    assert line in in_process("report", race_id).stdout
    in_process(*words, code=0)


def test_a_race_of_0_4_is_shown_and_not_resumed() -> None:
    run = make_run(logs_dir())
    tables = json.loads((run.path / "resolved.json").read_text()) | {"race": 6, "version": "0.4.0"}
    (run.path / "resolved.json").chmod(0o600)
    (run.path / "resolved.json").write_text(json.dumps(tables))
    records = [replace(RECORD, run=f"{run.run_id}#{at}", tokens_per_s=speed) for at, speed in ((1, 40.0), (2, 20.0))]
    measured = [MeasuredRow(name, one, (one.tokens_per_s,) * 3) for name, one in zip("ab", records, strict=True)]
    rows = [{"name": name, "ratio": ratio} for name, ratio in (("a", 1.0), ("b", 2.0))]
    result = {"winner": f"{run.run_id}#1", "why": "the fastest row", "is_over": True, "rows": rows}
    (run.path / "bench.json").write_text(json.dumps(tables_of(measured, run.path) | {"race": result}))
    assert f"winner: a ({run.run_id}#1), the fastest row" in in_process("report", run.run_id, code=0).stdout
    (line,) = json.loads(in_process("status", "--json", run.run_id, code=0).stdout)["runs"]
    assert (line["run"], line["step"]) == (run.run_id, 6)
    assert "3 rounds each" in in_process("compare", f"{run.run_id}#1", f"{run.run_id}#2", code=0).stdout
    refused = in_process("submit", "--resume", run.run_id)
    assert (refused.code, error_of(refused)[0]) == (2, f"run {run.run_id} has race = 6, gone since 0.5")


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
    done = hpc_gpt("submit", file, "--race", "--rounds", 2, "--steps", 10, "--cluster", "local", code=0)
    race_id = newest().sweep_id
    assert f"winner: short ({race_id}#2)" in done.stdout
    assert "nobody checked that a step is the same work" in done.stdout
    records = json.loads(in_process("report", "--json", race_id).stdout)["records"]
    assert [record["ended"] for record in records] == ["done", "done"]
    assert records[0]["step_s"] > 0.2 > records[1]["step_s"] > 0.05
    ended = [run.attempts()[0].ended() for run in list_runs(logs_dir())]
    assert all("the 15 steps of its visit" in each["cause"] for each in ended)
    (words,) = next_of(done.stdout)
    assert words == ["submit", str(file), "--row", "short", "--cluster", "local"]
    both = in_process("submit", "--race", "--resume", "x", "--set", "command.values.pause=0.1")
    assert (both.code, error_of(both)[0]) == (2, "--race and --resume exclude each other")
