"""GPU figures in heartbeats: read by one rank of a node, beside its steps, from a library in NVML's place."""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import field, fields, make_dataclass
from pathlib import Path

import pytest

from hpc_gpt.core.runs.heartbeats import LINE_BYTES, GpuFigures, RankHeartbeat, read_heartbeats, write_heartbeat
from hpc_gpt.core.runs.stored import read_lines_as
from hpc_gpt.trainer.supervision.gpus import wait_until_free
from tests.amd_gpus import MODULE, amd_sysfs
from tests.trainer.supervision.nvml import nvml_environment

# Steps of a rank under a watchdog that writes each second; prints how long each took, and how often the heartbeat of
# the rank was written.
RANK = """
import json, sys, time
from pathlib import Path
from hpc_gpt.core.runs.heartbeats import read_heartbeats
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.supervision import watchdog
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat
watchdog._START_S = 0.0  # the second rank need not wait for a first one: there is none
attempt, heart = RunFolder(Path(sys.argv[1])).new_attempt(), Heartbeat(20.0, 20.0)
watchdog.Watchdog(attempt, 0, 1, heart, print).start()
seconds, until = [], time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    began = time.thread_time()
    sum(range(100_000))
    seconds.append(time.thread_time() - began)
    heart.stepped(len(seconds))
print(json.dumps([seconds, read_heartbeats(attempt.heartbeats)[0].beat]))
"""


def step_times(folder: Path, seconds: float, **more: str) -> tuple[list[float], int, RankHeartbeat]:
    """CPU seconds of each step, how many heartbeats were written meanwhile, and the last."""
    folder.mkdir()
    line = [sys.executable, "-c", RANK, str(folder), str(seconds)]
    done = subprocess.run(line, env={**os.environ, **more}, capture_output=True, text=True, check=True)
    times, beats = json.loads(done.stdout)
    return times, beats, read_heartbeats(folder / "attempts" / "1" / "beats")[0]


def test_the_clock_of_a_gpu_and_what_holds_it_down(tmp_path: Path) -> None:
    lines = "from hpc_gpt.trainer.supervision.gpus import read_clock; print([read_clock(index) for index in range(3)])"
    environment = {**os.environ, **nvml_environment(tmp_path / "lib", 2), "HPC_GPT_SYSFS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[(1001.0, ''), (1002.0, 'power cap, heat'), (None, '')]\n"


def test_the_first_rank_of_a_node_alone_reads_its_gpus(tmp_path: Path) -> None:
    two = nvml_environment(tmp_path / "lib", 2)
    _, _, first = step_times(tmp_path / "first", 2.5, **two)
    assert first.gpu_figures == [GpuFigures(91, 10.0, 80.0, None, 61), GpuFigures(92, 20.0, 80.0, None, 62)]
    _, _, second = step_times(tmp_path / "second", 2.5, **two, LOCAL_RANK="1")
    _, _, none = step_times(tmp_path / "none", 2.5, LD_LIBRARY_PATH="")
    assert (second.gpus, none.gpus) == (None, None)
    _, _, hidden = step_times(tmp_path / "hidden", 2.5, **two, CUDA_VISIBLE_DEVICES="")
    assert hidden.gpus is None
    _, _, one = step_times(tmp_path / "one", 2.5, **two, CUDA_VISIBLE_DEVICES="1")
    assert [gpu.util for gpu in one.gpu_figures] == [92]


def test_steps_and_heartbeats_do_not_wait_for_a_slow_driver(tmp_path: Path) -> None:
    slow = nvml_environment(tmp_path / "lib", 8, ms=60_000)
    without, beats, _ = step_times(tmp_path / "without", 4.0, LD_LIBRARY_PATH="")
    with_, beats_with, last = step_times(tmp_path / "with", 4.0, **slow)
    assert last.gpus is None  # it has not answered
    assert min(beats, beats_with) >= 3
    assert statistics.median(with_) == pytest.approx(statistics.median(without), rel=0.25)


def test_sixteen_gpus_fit_in_the_line_and_more_are_left_out(tmp_path: Path) -> None:
    long = {"host": "h" * 40, "place": "p" * 120, "collective": "c" * 120}
    beat = RankHeartbeat(beat=1, step=10**6, phase="evaluating", quiet_s=1e5, limit_s=1e5, time=time.time(),
                         rank=16383, pid=4_000_000, elapsed_s=1e6, probe_s=0.123456789, **long)  # fmt: skip
    gpus = (GpuFigures(100, 191.9, 191.9, 1000, 100),)
    for count, kept in ((16, 16), (64, 0)):
        heartbeat = RankHeartbeat(**{**vars(beat), "gpus": count * gpus})
        write_heartbeat(tmp_path, heartbeat)
        (read,) = read_heartbeats(tmp_path).values()
        assert (read.place, len(read.gpu_figures)) == ("p" * 120, kept)
        assert (tmp_path / "16383.json").stat().st_size == LINE_BYTES


def test_an_earlier_program_reads_it_and_odd_gpus_are_left_out(tmp_path: Path) -> None:
    beat = RankHeartbeat(3, "n1", 4711, 1, 17, "training", 0.5, 300.0, 1e9, gpus=(GpuFigures(90, 1.0, 80.0, None, 60),))
    write_heartbeat(tmp_path, beat)
    newer = ("gpus", "elapsed_s", "probe_first_s", "clock_mhz", "throttle")
    known = [entry for entry in fields(RankHeartbeat) if entry.name not in newer]
    before = make_dataclass("Before", [(entry.name, entry.type, field(default=entry.default)) for entry in known])
    assert [each.step for each in read_lines_as(before, tmp_path / "3.json")] == [17]
    (tmp_path / "3.json").write_text(json.dumps({**vars(beat), "gpus": [[90, 1.0]]}))
    assert read_heartbeats(tmp_path)[3].gpu_figures == []


FREE = """
import sys
from hpc_gpt.trainer.supervision.gpus import wait_until_free
print(wait_until_free(float(sys.argv[1])))
"""


def what_is_held(limit_s: float, environment: dict[str, str]) -> str:
    line = [sys.executable, "-c", FREE, str(limit_s)]
    # A test before may have made this process a rank.
    own = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")} | environment
    return subprocess.run(line, env=own, capture_output=True, text=True, check=True).stdout


def test_of_gpus_whose_memory_stays_in_use_it_says_which(tmp_path: Path) -> None:
    two = nvml_environment(tmp_path / "lib", 2)
    said = what_is_held(0.1, two)
    assert said.startswith("10 of 80 GiB of GPU 0, 20 of 80 GiB of GPU 1 are in use, 0.1 s after the last ranks")
    own = {**two, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert what_is_held(0.1, own).startswith("20 of 80 GiB of GPU 1 are")
    assert what_is_held(60, {**two, "STAND_IN_NVML_HELD": str(tmp_path / "none")}) == "\n"
    assert what_is_held(60, {"LD_LIBRARY_PATH": ""}) == "\n"
    slow = nvml_environment(tmp_path / "slow", 1, ms=60_000)
    assert "has not answered" in what_is_held(0.1, slow)


def test_amds_gpus_are_read_from_the_kernel(tmp_path: Path) -> None:
    here = {"HPC_GPT_SYSFS": str(amd_sysfs(tmp_path / "sys", *MODULE)), "LD_LIBRARY_PATH": ""}
    _, _, first = step_times(tmp_path / "first", 2.5, **here, ROCR_VISIBLE_DEVICES="0,1")
    assert first.gpu_figures == [GpuFigures(97, 40.0, 64.0, 412, 61), GpuFigures(97, 40.0, 64.0, None, 61)]
    _, _, one = step_times(tmp_path / "one", 2.5, **here, ROCR_VISIBLE_DEVICES="1")
    assert [gpu.power_w for gpu in one.gpu_figures] == [None]


def test_a_visit_waits_until_amds_gpus_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {**MODULE[1], "mem_info_vram_used": 300 * 2**20}
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tmp_path, MODULE[0], free)))
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert wait_until_free(0.1) == ""
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    assert wait_until_free(0.1).startswith("40 of 64 GiB of GPU 0 are in use, 0.1 s after the last ranks")
