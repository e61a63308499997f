"""What is measured beside the steps: pooled over GPUs, null where nothing was read; and the probe of the device."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpc_gpt.core.runs.heartbeats import RankHeartbeat
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.runs.slow_ranks import Probe, slow_ranks
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.trainer.measurements import DeviceProbe, write_measured
from hpc_gpt.trainer.ranks import Ranks
from hpc_gpt.trainer.supervision.gpus import GpuSums
from tests.made_runs import read_run
from tests.trainer.launch import new_run, settings, train
from tests.waiting import wait_for


def test_what_all_ranks_saw_is_written_once(tmp_path) -> None:
    said: list[Any] = [
        (GpuSums(1, 100.0), 3.5, 2, {0: 1}),
        (GpuSums(1, 50.0), None, 5, {}),
        (GpuSums(), 7.25, 0, {1: 4}),
    ]
    (tmp_path / "attempt.json").write_text('{"started": 1000}')
    cpu = torch.device("cpu")

    def write(is_first: bool, tenth_step: float | None = None) -> None:
        # What grows with the ranks goes to rank 0 alone.
        ranks = cast(Ranks, SimpleNamespace(gather=lambda own: said if is_first else [], is_first=is_first))
        write_measured(Attempt(tmp_path), ranks, GpuSums(), cpu, {}, tenth_step, "flash")

    write(is_first=False)
    assert not Attempt(tmp_path).measured.exists()
    write(is_first=True, tenth_step=1020.25)
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["tenth_step_s"] == 20.25
    # The slowest compiler is what the run has waited for; retries and shards add up.
    assert (found["compile_s"], found["allocator_retries"], found["skipped_shards"]) == (7.25, 7, 5)
    assert (found["gpu_util_mean"], found["attention_used"]) == (75.0, "flash")
    (tmp_path / "measured.json").unlink()
    said[1] = (GpuSums(), None, None, {})
    write(is_first=True)
    found = json.loads((tmp_path / "measured.json").read_text())
    assert (found["allocator_retries"], found["tenth_step_s"]) == (None, None)


def probed(monkeypatch: pytest.MonkeyPatch, command: str | None) -> DeviceProbe:
    if command is not None:
        monkeypatch.setenv("HPC_GPT_PROBE_COMMAND", command)
    probe = DeviceProbe(torch.device("cpu"))
    probe.measure()
    if command is not None:
        wait_for("an answer of the command", lambda: probe.result.probe_s is not None or probe._over)
    return probe


def test_the_command_of_the_preflight_gives_the_figure_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(monkeypatch, """echo '{"matmul_tflops": 3, "probe_s": 0.25}'""").result.probe_s == 0.25


@pytest.mark.parametrize("command", ["exit 3", "echo no", "echo '{}'", """echo '{"error": "no device"}'"""])
def test_a_command_that_gives_none_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    probe = probed(monkeypatch, command)
    assert (probe.result, probe._over) == (Probe(), True)


def test_on_a_cpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(monkeypatch, None).result == Probe()


def test_a_kernel_that_fails_in_its_trial_is_in_the_record(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, settings(tokens, {"tp": 1, "pp": 1, "dp": 2}, Engine("ddp"), steps=3))
    launch = train(run, 2, BROKEN_FLASH_ON="0")
    assert launch.ended == ("done", 3, False), launch.log
    said = "attention: flash failed in a trial{}, so the next kernel runs: CUDA error: no kernel image is available"
    assert [line for line in launch.log.splitlines() if "trial" in line] == ["note: " + said.format(" on 1 of 2 ranks")]
    kept = json.loads((launch.attempt.folder / "trainer.json").read_text())
    assert kept["attention_used"] == "math"
    assert kept["attention_failed"] == {"flash": "CUDA error: no kernel image is available"}
    record = read_run(run)
    assert record.attention_used == "math"
    assert said.format("").replace("kernel runs", "kernel ran") in record.flags


# A rank's probe: the mean time of a product over a second, on the core that CORES gives for the rank.
PRODUCT = """
import json, os, time
import numpy as np
os.sched_setaffinity(0, {json.loads(os.environ["CORES"])[int(os.environ["RANK"])]})
a, count, began = np.ones((192, 192), np.float32), 0, time.perf_counter()
while time.perf_counter() < began + 1:
    a @ a
    count += 1
print(json.dumps({"probe_s": (time.perf_counter() - began) / count}))
"""
LOAD = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() == int(sys.argv[2]): pass"


@pytest.mark.long
def test_a_rank_beside_a_load_on_its_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share one core in turns, and the third has one with many loads: its product gets a part of it."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("CORES", json.dumps([first, first, second]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("HPC_GPT_SLOW_S", "600")
    monkeypatch.setenv("HPC_GPT_PROBE_COMMAND", f"{shlex.quote(sys.executable)} -c {shlex.quote(PRODUCT)}")
    line = [sys.executable, "-c", LOAD, str(second), str(os.getpid())]
    # Each in a session of its own: Linux shares a core between sessions first.
    loads = [subprocess.Popen(line, start_new_session=True) for _ in range(16)]
    try:
        probes = [DeviceProbe(torch.device("cpu")) for _ in range(3)]
        for _ in range(3):
            for rank, probe in enumerate(probes):
                monkeypatch.setenv("RANK", str(rank))
                probe._ask()
    finally:
        for load in loads:
            load.kill()
            load.wait()
    beats = [
        RankHeartbeat(rank, f"n{rank}", 1, 1, 1, "training", 0.0, 0.0, 0.0, probe_s=probe.result.probe_s)
        for rank, probe in enumerate(probes)
    ]
    assert [slow.rank for slow in slow_ranks(beats).ranks][:1] == [2], [probe.result for probe in probes]
