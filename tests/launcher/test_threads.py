"""The threads of a local run's ranks, and how they wait: chosen by the script as it starts, for the CPUs there are."""

import os
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.render import render_script
from tests.programs import put

RANKS = 4
OURS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
V1 = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}


def rank_environment(
    folder: Path,
    cpus: int,
    quota: dict[str, str] | None = None,
    given: dict[str, str] | None = None,
    runnable: int = 100,
) -> dict[str, str]:
    """OURS as a rank gets them on a machine of so many CPUs and runnable threads, with these files of its cgroup."""
    script = render_script(resolve(load_experiment("demo", {"layout.gpus": RANKS}), load_profile("local")))
    cgroup = folder / "cgroup"
    for name, text in (quota or {}).items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(f"{text}\n")
    assert "cgroup=/sys/fs/cgroup\n" in script
    (loads := folder / "loadavg").write_text(f"0.10 0.20 0.30 {runnable}/900 4711\n")
    assert "</proc/loadavg " in script
    script = script.replace("/sys/fs/cgroup", str(cgroup)).replace("/proc/loadavg", str(loads))
    (folder / "job.sh").write_text(script)
    for name, text in (("nproc", f"echo {cpus}"), ("python", 'printf "%s=%s\\n" ' + " ".join(
        f'{name} "${name}"' for name in OURS
    ))):  # fmt: skip
        put(folder / name, f"#!/bin/sh\n{text}\n")
    environment = {name: text for name, text in os.environ.items() if name not in OURS} | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HPC_GPT_PYTHON": str(folder / "python"),
        "HPC_GPT_RUN": str(folder),
        "SUBMITIT_LOCAL_GLOBALID": "0",
        **(given or {}),
    }
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert not done.stderr
    return dict(line.split("=") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("cpus", "quota", "threads"),
    [
        (64, {}, 16),
        (6, {}, 1),
        (64, {"cpu.max": "1150000 100000"}, 3),
        (64, {"cpu.max": "50000 100000"}, 1),
        (8, {"cpu.max": "6400000 100000"}, 2),
        (64, V1 | {"cpu/cpu.cfs_quota_us": "800000"}, 2),
        (64, {"cpu.max": "nonsense"}, 16),
    ],
)
def test_each_rank_has_an_even_share_of_the_cpus_it_may_use(tmp_path, cpus, quota, threads):
    assert rank_environment(tmp_path, cpus, quota)["OMP_NUM_THREADS"] == str(threads)


def test_a_waiting_thread_soon_sleeps_where_others_run(tmp_path):
    assert 0 < int(rank_environment(tmp_path, 64, runnable=RANKS + 1)["GOMP_SPINCOUNT"]) <= 10_000
    assert rank_environment(tmp_path, 64, runnable=RANKS)["GOMP_SPINCOUNT"] == ""  # torch's own is 300,000


def test_how_a_thread_waits_is_the_users_to_say(tmp_path):
    given = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    assert rank_environment(tmp_path, 64, given=given) == given | {"GOMP_SPINCOUNT": ""}
    assert rank_environment(tmp_path, 64, given={"GOMP_SPINCOUNT": "3"})["GOMP_SPINCOUNT"] == "3"
