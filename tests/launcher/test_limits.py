"""Limits that this machine has, which a submission would meet; tests/slurm/test_limits.py has those of Slurm."""

import getpass
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.network import files_of_first
from hpc_gpt.core.runs.disk_space import free_files
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.limits import Asked, Limit, limits_met
from hpc_gpt.launcher.render import render_script
from tests.programs import put

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")


def asked(options: tuple[str, ...] = (), **settings: Any) -> Asked:
    given = {"data.source": "random", **{key.replace("__", "."): value for key, value in settings.items()}}
    resolved = resolve(load_experiment("demo", given), load_profile("generic-slurm"))
    return Asked(resolved, render_script(resolved), options)


def met(tmp_path: Path, *rows: Asked) -> dict[str, Limit]:
    return {limit.check: limit for limit in limits_met(rows, tmp_path / "logs")}


def test_a_usual_run_meets_none(tmp_path: Path) -> None:
    assert met(tmp_path, asked(), asked(("--nice",))) == {}


def test_a_list_of_excluded_nodes_that_no_retry_can_name(tmp_path: Path) -> None:
    assert met(tmp_path, asked(job__exclude="n[0001-9999]")) == {}
    limit = met(tmp_path, asked(job__exclude="node[00001-20000]"))["exclude"]
    assert (limit.asked, limit.allowed, limit.refuses) == (10 + 20_000 * 10 - 1, 131_071, False)
    assert str(limit).startswith(
        "limit: bytes of a list of 20,000 excluded nodes: 200,009 asked for, 131,071 allowed; "
    )
    # The system has it so.
    for size, runs in ((limit.allowed, True), (limit.allowed + 1, False)):
        try:
            subprocess.run(["/bin/true", "x" * size], check=True)
        except OSError:
            assert not runs
        else:
            assert runs


def test_an_environment_that_leaves_no_room_for_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, size = os.sysconf("SC_ARG_MAX"), 0
    while size < most:
        monkeypatch.setenv(f"LARGE_{size}", "x" * min(120_000, most - size))
        size += 120_000
    limit = met(tmp_path, asked())["command"]
    assert limit.asked > limit.allowed == most
    assert limit.refuses
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true"], check=True)


def test_open_files_and_connections_of_rank_0(tmp_path: Path) -> None:
    gpus, queue = 1 << 16, int(Path("/proc/sys/net/core/somaxconn").read_text())
    program = """
import sys
from pathlib import Path
from tests.launcher.test_limits import asked, met
from tests.programs import put
for limit in met(Path(sys.argv[1]), asked(layout__gpus=int(sys.argv[2]))).values():
    print(limit.check, limit.asked, limit.allowed, limit.refuses)
"""
    shell = ["bash", "-c", 'ulimit -n 1000 && exec "$@"', "-", sys.executable, "-c", program]
    done = subprocess.run([*shell, tmp_path, str(gpus)], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = [f"files {files_of_first(gpus)} 1000 False"]
    expected += [f"store {gpus - 1} {queue} False"] if gpus > queue else []
    assert done.stdout.splitlines() == expected
    done = subprocess.run([*shell, tmp_path, "64"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""


LFS = """#!/bin/bash
case "$*" in
"project -d {place}") echo "    7 P {place}" ;;
"quota -q -u {uid} {place}") echo "{place}  220  0  0  -  120  0  0  -" ;;
"quota -q -g {gid} {place}") echo "{place}  220*  200  300  6d  900  1000  1200  -" ;;
"quota -q -p 7 {place}") printf '%s\\n' "{place}" "       220  0  0  -  990*  500  1000  6d" ;;
esac
"""


def test_files_that_a_quota_of_lustre_still_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Lustre is at hand: its client's answers, in the form of its manual."""
    tool = put(tmp_path / "bin" / "lfs", LFS.format(place=tmp_path, uid=os.getuid(), gid=tmp_path.stat().st_gid))
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    quotas = {place: free for place, free in free_files(tmp_path / "logs").items() if "(lfs quota" in place}
    assert quotas == {
        f"the group's quota at {tmp_path} (lfs quota -g)": 300,
        f"the project's quota at {tmp_path} (lfs quota -p)": 10,
    }
    limit = met(tmp_path, asked())["inodes"]
    assert (limit.allowed, limit.refuses) == (10, False)
    assert limit.asked > 60


def test_a_limit_that_is_used_up_allows_none() -> None:
    words = "limit: jobs: 1,234 asked for, 0 allowed; wait"
    assert [str(Limit("jobs", "jobs", 1234, allowed, "wait")) for allowed in (0, -3)] == [words] * 2


@pytest.mark.parametrize(
    ("partition", "qos", "expected"),
    [
        ("gpu", "normal", []),  # two of the nine of user and partition
        ("cpu", None, [("MaxSubmitJobs of user {user} in account a is 1, 4 are there", True)]),
        ("big", "over", [("MaxSubmitJobsPerUser of QOS over is 0, 0 are there", True)]),
        ("big", None, [("MaxSubmitJobsPerUser of QOS large is 3, 3 are there", True)]),
        ("gpu,cpu", None, [("MaxSubmitJobs of user {user} in account a is 1, 4 are there", False)]),
    ],
)
def test_which_limit_of_jobs_counts_is_slurms_choice(tmp_path, monkeypatch, partition, qos, expected) -> None:
    user = getpass.getuser()
    rows = {
        "squeue": [f"PENDING|{user}|a|normal|{name}" for name in ("gpu", "gpu", "cpu", "big", "big", "big")],
        "scontrol": [
            "ClusterName = x", "AccountingStorageEnforce = associations,limits",
            "PartitionName=gpu QoS=N/A Default=YES", "PartitionName=cpu QoS=N/A", "PartitionName=big QoS=large",
        ],
        # A site's banner, and a field more than asked for.
        "sacctmgr": [
            "*** maintenance on Monday ***", f"{user}||1|||normal|x", f"{user}|gpu|9|||normal|x", "normal||||",
            "over|DenyOnLimit,OverPartQOS|0|||",
            "large||3|||",
        ],
    }  # fmt: skip
    for name, lines in rows.items():
        put(tmp_path / "bin" / name, "#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "bin" / "squeue"))
    row = asked(job__account="a", job__partition=partition, job__qos=qos)
    found = [(limit.name, limit.refuses) for limit in limits_met([row], tmp_path / "logs") if limit.check == "jobs"]
    assert found == [(f"jobs in the queue ({name.format(user=user)})", refuses) for name, refuses in expected]
