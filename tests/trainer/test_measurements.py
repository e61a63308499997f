"""What is measured beside the steps: pooled over GPUs, null where nothing was read; and the probe of the device."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpc_gpt.core.processes.slow_ranks import LEAST_PROBES, Probe
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.trainer.measurements import DeviceProbe, write_measured
from hpc_gpt.trainer.ranks import Ranks
from hpc_gpt.trainer.supervision.gpus import GpuSums
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
        write_measured(Attempt(tmp_path), ranks, GpuSums(), cpu, {}, tenth_step)

    write(is_first=False)
    assert not Attempt(tmp_path).measured.exists()
    write(is_first=True, tenth_step=1020.25)
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["tenth_step_s"] == 20.25
    # The slowest compiler is what the run has waited for; retries and shards add up.
    assert (found["compile_s"], found["allocator_retries"], found["skipped_shards"]) == (7.25, 7, 5)
    assert found["gpu_util_mean"] == 75.0
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


@pytest.mark.parametrize("step_s", [6.6, 70.0])
def test_a_gpu_has_its_figure_however_long_a_step_is(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    probe, now = DeviceProbe(cast(Any, SimpleNamespace(type="cuda", index=0))), 0.0
    monkeypatch.setattr(DeviceProbe, "_time_product", lambda own: own._add(0.01))
    monkeypatch.setattr(DeviceProbe, "_read_clock", lambda own: None)
    monkeypatch.setattr("hpc_gpt.trainer.measurements.time.monotonic", lambda: now)
    for _ in range(int(LEAST_PROBES * max(30.0, step_s) / step_s) + LEAST_PROBES):
        now += step_s
        probe.measure()
    assert probe.result.probe_s == 0.01


def test_on_a_cpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(monkeypatch, None).result == Probe()
