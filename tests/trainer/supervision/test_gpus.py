"""GPU figures in heartbeats: read by one rank of a node, beside its steps, from a library in NVML's place."""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.core.processes.heartbeats import LINE_BYTES, RankHeartbeat, read_heartbeats, write_heartbeat
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_lines_as
from hpc_gpt.trainer.supervision import gpus
from hpc_gpt.trainer.supervision.gpus import GpuReader, GpuSums, read_clock, summarise, wait_until_free
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat
from hpc_gpt.trainer.supervision.watchdog import Watchdog
from tests.amd_gpus import MODULE, amd_sysfs
from tests.trainer.supervision.nvml import nvml_environment
from tests.waiting import wait_for


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process a driver of so many NVIDIA GPUs, each question of which takes `ms`; none to begin with."""
    where: list[Path] = []

    def load(name: str) -> ctypes.CDLL:
        if not where:
            raise OSError(name)
        return ctypes.CDLL(str(where[0] / name))

    def give(count: int, ms: int = 0) -> None:
        own = nvml_environment(tmp_path / "lib", count, ms)
        where.append(Path(own.pop("LD_LIBRARY_PATH")))
        for name, value in own.items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(gpus, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": load}))
    monkeypatch.setenv("HPC_GPT_SYSFS", str(tmp_path))
    for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return give


def read_all() -> list[GpuFigures]:
    return [read().figures for read in gpus._gpus()]


def test_the_clock_of_a_gpu_and_what_holds_it_down(driver: Callable[..., None]) -> None:
    driver(2)
    assert [read_clock(index) for index in range(3)] == [(1001.0, ""), (1002.0, "power cap, heat"), (None, "")]


def test_the_gpus_of_a_job_are_those_it_may_use(driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_all() == []
    driver(2)
    both = [GpuFigures(91, 10.0, 80.0, None, 61), GpuFigures(92, 20.0, 80.0, None, 62)]
    assert read_all() == both
    instance = [GpuFigures(93, 30.0, 80.0, None, 63)]
    by_uuid = (("GPU-a2", both[1:]), ("GPU-a20,GPU-a1", both[::-1]), ("MIG-c7", instance), ("GPU-a,0", both[:1]))
    for visible, found in (("", []), ("1", both[1:]), *by_uuid):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert read_all() == found


# A rank that makes steps under a watchdog until it has three heartbeats, and its GPUs if any are to come; prints them.
RANK = """
import os, sys, time
from pathlib import Path
from hpc_gpt.core.processes.heartbeats import read_heartbeats
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat
from hpc_gpt.trainer.supervision.watchdog import Watchdog
attempt, heart, beat = RunFolder(Path(sys.argv[1])).new_attempt(), Heartbeat(20.0, 20.0), None
Watchdog(attempt, 0, 1, heart, print).start()
while beat is None or beat.beat < 3 or not beat.step or (sys.argv[2] == "read" and beat.gpus is None):
    heart.stepped(heart.step + 1)
    time.sleep(0.1)
    beat = read_heartbeats(attempt.heartbeats).get(0)
print(beat.gpu_figures, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("ms", "found"), [(0, [GpuFigures(91, 10.0, 80.0, None, 61)]), (3_600_000, [])], ids=["read", "never answer"]
)
def test_neither_steps_nor_heartbeats_wait_for_the_driver(tmp_path: Path, ms: int, found: list[GpuFigures]) -> None:
    own = os.environ | nvml_environment(tmp_path / "lib", 1, ms)
    line = [sys.executable, "-c", RANK, str(tmp_path / "run"), "read" if found else "never answer"]
    assert subprocess.run(line, env=own, capture_output=True, text=True, check=True).stdout == f"{found}\n"


def test_the_other_ranks_of_a_node_read_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    started: list[GpuReader] = []
    monkeypatch.setattr(GpuReader, "start", lambda reader: started.append(reader))
    dogs = [Watchdog(RunFolder(tmp_path).new_attempt(), 1, 2, Heartbeat(20.0, 20.0), print)]
    monkeypatch.setenv("LOCAL_RANK", "0")
    dogs.append(Watchdog(RunFolder(tmp_path).new_attempt(), 0, 2, Heartbeat(20.0, 20.0), print))
    for dog in dogs:
        dog.start()
        dog._over.set()
    assert started == [dogs[1].gpus]


def test_readings_of_all_gpus_are_pooled() -> None:
    busy, idle = GpuSums(1, 100.0, 10000.0, 1700.0, 600.0), GpuSums(1, 60.0, 3600.0, 1400.0, 300.0)
    busy = GpuSums.total([busy, GpuSums(1, 80.0, 6400.0, 1700.0, 640.0)])
    found = summarise([busy, idle])
    assert found["gpu_util_mean"] == 80.0
    assert found["gpu_util_spread"] == 16.33  # sqrt((20^2 + 0 + 20^2) / 3)
    assert (found["sm_clock_mhz"], found["power_w"]) == (1600.0, 513.33)
    assert set(summarise([GpuSums()]).values()) == {None}


def test_the_gpus_of_the_ranks_count_from_the_warm_up_on(driver: Callable[..., None], monkeypatch) -> None:
    driver(3)
    monkeypatch.setattr(gpus, "_EVERY_S", 0.01)
    reader = GpuReader()
    reader.start()
    wait_for("a reading", reader.latest)
    assert reader.sums == GpuSums()
    reader.begin(2)
    wait_for("three readings of two GPUs", lambda: reader.sums.readings >= 6)
    sums = reader.sums
    times = sums.readings // 2
    assert sums == GpuSums(2 * times, times * 183.0, times * (91.0**2 + 92.0**2), times * 2003.0, 0.0, 2 * times)


def test_amds_second_die_has_no_power(tmp_path: Path, driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tmp_path / "sys", *MODULE)))
    first, second = (GpuSums.of(read()) for read in gpus._gpus())
    assert ((first.power_w, first.powerless), (second.power_w, second.powerless)) == ((412.0, 0), (0.0, 1))
    found = summarise([first, second])
    assert (found["gpu_util_mean"], found["sm_clock_mhz"], found["power_w"]) == (97.0, 1700.0, 412.0)
    assert summarise([second])["power_w"] is None


def test_sixteen_gpus_fit_in_the_line_and_more_are_left_out(tmp_path: Path) -> None:
    long = {"host": "h" * 40, "place": "p" * 120, "collective": "c" * 120}
    beat = RankHeartbeat(beat=1, step=10**6, phase="evaluating", quiet_s=1e5, limit_s=1e5, time=time.time(),
                         rank=16383, pid=4_000_000, elapsed_s=1e6, probe_s=0.123456789, **long)  # fmt: skip
    figures = (GpuFigures(100, 191.9, 191.9, 1000, 100),)
    for count, kept in ((16, 16), (64, 0)):
        heartbeat = RankHeartbeat(**{**vars(beat), "gpus": count * figures})
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


def test_of_gpus_whose_memory_stays_in_use_it_says_which(tmp_path: Path, driver, monkeypatch) -> None:
    assert wait_until_free(600) == ""
    driver(2)
    held = (
        "10 of 80 GiB of GPU 0, 20 of 80 GiB of GPU 1 are in use, 0.1 s after the last ranks: something else runs there"
    )
    assert wait_until_free(0.1) == held
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert wait_until_free(0.1).startswith("20 of 80 GiB of GPU 1 are")
    monkeypatch.setenv("STAND_IN_NVML_HELD", str(tmp_path / "none"))
    assert wait_until_free(600) == ""
    monkeypatch.setenv("STAND_IN_NVML_MS", "60000")
    assert "has not answered" in wait_until_free(0.1)


def test_amds_gpus_are_read_from_the_kernel(tmp_path: Path, driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tmp_path / "sys", *MODULE)))
    second = GpuFigures(97, 40.0, 64.0, None, 61)
    for visible, found in (("0,1", [GpuFigures(97, 40.0, 64.0, 412, 61), second]), ("1", [second])):
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", visible)
        assert read_all() == found


def test_a_visit_waits_until_amds_gpus_are_free(tmp_path: Path, driver, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {**MODULE[1], "mem_info_vram_used": 300 * 2**20}
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tmp_path, MODULE[0], free)))
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert wait_until_free(600) == ""
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    assert wait_until_free(0.1).startswith("40 of 64 GiB of GPU 0 are in use, 0.1 s after the last ranks")
