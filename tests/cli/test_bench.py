"""hpc-gpt bench: three real benches of a tiny model on this machine, what they leave, and what is refused."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.cli.bench import signals_as_ctrl_c
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import logs_dir, read_json, read_json_lines
from hpc_gpt.core.process import is_alive
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.bench import measurement
from tests.cli.command import hpc_gpt, in_process, said_of
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, metrics_line
from tests.waiting import LIMIT_S, wait_for

SMALL = ("bench", "--smoke", "--set", "engine.compile=none")
# A CPU takes seconds for a step of many bf16 samples.
QUICK = (*SMALL, "--set", "train.dtype=fp32")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def benches() -> list[Path]:
    """The folders of the benches in the test's own logs."""
    return sorted(logs_dir().glob("*-bench/*"))


def limited(*arguments: object, gib: int) -> subprocess.CompletedProcess[str]:
    """The command where no process may have more memory than so much: ulimit -v."""
    return subprocess.run(
        [sys.executable, "-m", "hpc_gpt", *map(str, arguments)],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(REPOSITORY)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (gib * 2**30, gib * 2**30)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_engines_in_two_rounds():
    cells = ("--engines", "ddp,fsdp")
    done = hpc_gpt(*SMALL, *cells, "--rounds", 2, "--steps", 10, "--json", environment=ONE_THREAD, code=0)
    page = json.loads(done.stdout)
    (folder,) = benches()
    assert json.loads((folder / "bench.json").read_text()) == page
    assert [row["cell"] for row in page["rows"]] == ["ddp", "fsdp"]
    for record, row in zip(page["records"], page["rows"], strict=True):
        assert record["run"] == row["run"]
        assert record["rounds"] == len(row["tokens_per_s"]) == len(row["tenth_step_s"]) == 2
        assert min(row["tokens_per_s"]) <= record["tokens_per_s"] <= max(row["tokens_per_s"])
        for key in ("tflops_seed", "tflops_hardware", "tflops_model", "tokens_per_s_spread", "matmul_tflops_before",
                    "matmul_tflops_after", "attention_used", "config_hash", "step_s"):  # fmt: skip
            assert record[key], key
        assert record["versions"]["torch"]
        assert record["settings"]["data"]["source"] == "random"
        assert (record["ended"], record["device"], record["mfu"]) == ("done", None, None)
        assert (record["memory_allocated_gib"], record["predicted_memory_gib"] > [0.0005]) == (None, True)
        assert "none is named here" in record["sources"]["predicted_memory_gib"]
    assert page["rows"][1]["ratio"] == page["records"][1]["tokens_per_s"] / page["records"][0]["tokens_per_s"]
    begun = [run.resolved().engine.name for run in sorted(list_runs(folder), key=lambda run: run.run_id[:15])]
    assert begun == ["ddp", "fsdp", "fsdp", "ddp"]
    tenth_steps_s = [seconds for row in page["rows"] for seconds in row["tenth_step_s"]]
    for run in list_runs(folder):
        assert not any(run.checkpoints.rglob("*.pt"))
        steps = read_json_lines(run.attempts()[0].metrics)
        assert len(steps) == 10
        tenth_step_s = read_json(run.attempts()[0].folder / "measured.json")["tenth_step_s"]
        assert tenth_step_s > sum(step["step_s"] for step in steps), "from the start of the run, not of its training"
        tenth_steps_s.remove(tenth_step_s)
    assert tenth_steps_s == []
    (command,) = [line for line in said_of(done) if line.startswith("next: ")]
    words = shlex.split(command.removeprefix("next: hpc-gpt "))
    assert words == ["report", folder.name]
    assert json.loads(in_process(*words, "--json").stdout)["records"] == page["records"]
    shown = in_process("compare", f"{folder.name}#1", f"{folder.name}#2", code=0)
    assert "engine" in shown.stdout
    assert "medians of 2 rounds each" in shown.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_micro_batch_out_of_memory_is_marked_others_go_on():
    done = limited(*QUICK, "--mbs", "250000,1", "--rounds", 1, "--steps", 3, gib=5)
    heading, large, small, *_ = done.stdout.splitlines()
    assert heading.startswith("Cell")
    assert "OOM" in large
    assert "host_memory" in large
    assert "OOM" not in small
    assert small.split()[:4] == ["ddp", "mbs", "1", "1.000"]
    assert done.returncode == 3
    assert "Error: ddp mbs 250000 ended as host_memory\n" in done.stderr
    assert "try --mbs 125000" in done.stderr
    rows = json.loads((benches()[0] / "bench.json").read_text())
    assert [record["ended"] for record in rows["records"]] == ["host_memory", "done"]
    assert [row["ratio"] for row in rows["rows"]] == [None, 1.0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_interrupted_bench_keeps_rows_and_leaves_no_process():
    command = [sys.executable, "-m", "hpc_gpt", *QUICK, "--mbs", "1,128", "--rounds", "1", "--steps", "300"]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        run = _second_run(process)
    finally:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, stderr
    assert "ddp" in stdout
    (bench,) = benches()
    (row,) = json.loads((bench / "bench.json").read_text())["rows"]
    assert row["cell"] == "ddp mbs 1"
    assert str(bench) in stderr
    assert "1 of 2 rows" in stderr
    assert "Ctrl-C: the run is asked to stop, unsaved: train.save_last is false; once more cancels" in stderr
    (line,) = run.submissions()
    assert not is_alive(line["pid"], line["pid_start"])
    ranks = [json.loads(path.read_text()) for path in (run.attempts()[0].ranks).iterdir()]
    assert ranks
    assert not any(is_alive(rank["pid"], rank["pid_start"]) for rank in ranks)
    assert run.attempts()[0].ended()["ended"] == "stopped"


def _second_run(process: subprocess.Popen[str]) -> RunFolder:
    """The bench's second run once its rank has trained a step: heartbeats say so, too, but come some seconds apart."""

    def second() -> RunFolder | None:
        assert process.poll() is None, "no second run"
        runs = list_runs(benches()[0])[1:] if benches() else []
        return next((run for run in runs if run.attempts() and run.attempts()[0].last_metrics().get("step")), None)

    return wait_for("the second run", second)


def test_logs_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("a file\n")
    done = in_process("bench", "--smoke", environment={"HPC_GPT_LOGS": str(tmp_path / "file")}, code=1)
    assert "Error: cannot make a run folder" in done.stderr
    assert "hint: set HPC_GPT_LOGS" in done.stderr


def test_a_disk_that_fills_up_between_two_rows_keeps_the_first(monkeypatch):
    """What the second run's folder meets, as create_run tells it; the first run is made, not trained."""
    written = []
    write_run = measurement.write_run

    def full_after_the_first(*arguments):
        if written:
            raise RunFolderError("cannot write in logs: No space left on device", "is the disk full?")
        written.append(write_run(*arguments))
        return written[0]

    monkeypatch.setattr(measurement, "write_run", full_after_the_first)
    monkeypatch.setattr(
        measurement, "start_run", lambda run, resolved: add_attempt(run, [metrics_line(step) for step in (1, 2, 3)])
    )
    monkeypatch.setattr(measurement, "follow", lambda runs, words, interrupts: None)
    monkeypatch.setattr(measurement, "_wait_until_gone", lambda run: None)
    done = in_process(*SMALL, "--mbs", "1,2", "--rounds", "1", "--steps", "3", code=1)
    assert done.stdout.startswith("ddp mbs 1\n")
    assert "Error: cannot write in logs: No space left on device\n\nhint: is the disk full?\n" in done.stderr
    assert len(json.loads((benches()[0] / "bench.json").read_text())["records"]) == 1


@pytest.mark.parametrize("what", [signal.SIGTERM, signal.SIGHUP])
def test_what_would_end_the_command_alone_ends_the_run_too(what):
    before = signal.signal(what, signal.SIG_DFL)
    try:
        with signals_as_ctrl_c(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(what)
        assert signal.getsignal(what) is signal.SIG_DFL
        signal.signal(what, signal.SIG_IGN)  # as nohup does
        with signals_as_ctrl_c():
            signal.raise_signal(what)
        assert signal.getsignal(what) is signal.SIG_IGN
    finally:
        signal.signal(what, before)
