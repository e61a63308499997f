"""The doctor on a real cluster: nodes that are broken, slow or skewed by a probe command each, and what becomes of the
run; profiles as `profile detect` finds them; and the verb itself."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.settings.cluster import load_profile
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import PROFILE, Job, Launcher

WELL = {"matmul_tflops": 90.0, "pair_gb_s": 20.0, "all_reduce_gb_s": 20.0}
# A file for each node replaces its figures; a script does what no figure can.
COMMAND = """
if [ -e "$FIGURES/$SLURMD_NODENAME.sh" ]; then . "$FIGURES/$SLURMD_NODENAME.sh"
elif [ -e "$FIGURES/$SLURMD_NODENAME.json" ]; then cat "$FIGURES/$SLURMD_NODENAME.json"
else cat "$FIGURES/well.json"; fi
"""


class Ward:
    """A profile with the preflight on, one rank a node, and four nodes of the cluster whose figures a test sets."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher = launcher
        self.figures = folder / "figures"
        self.figures.mkdir()
        (self.figures / "well.json").write_text(json.dumps(WELL))
        # A name of its own, and so a list of bad nodes of its own.
        self.name = folder.name
        self.profile = folder / f"{self.name}.toml"
        text = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 1").replace(
            "cpus_per_node = 4", "cpus_per_node = 1"
        )
        self.profile.write_text(f"preflight = true\nretry_pause_s = 1\n{text}")

    def falls_ill(self, node: str, **figures: Any) -> None:
        (self.figures / f"{node}.json").write_text(json.dumps(WELL | figures))

    def breaks(self, node: str, script: str) -> None:
        (self.figures / f"{node}.sh").write_text(script)

    def doctor(self, job: Job) -> dict[str, Any]:
        """What `hpc-gpt doctor RUN` says."""
        found = json.loads(self.launcher.run("doctor", str(job.run.path), "--json")[0])
        assert isinstance(found, dict)
        return found

    def submit(self, *arguments: str, **more: str) -> Job:
        """A run of two ranks on two of the nodes n1 to n4."""
        return self.launcher.submit(
            "--cluster", str(self.profile), "--engine", "ddp", "--tp", "1", "--pp", "1", "--dp", "2", "--gpus", "2",
            "--mbs", "2", "--set", "train.steps=3", "--set", "train.save_every=0", "--exclude", "n[5-12]", *arguments,
            FIGURES=str(self.figures), HPC_GPT_PROBE_COMMAND=COMMAND, **more,
        )  # fmt: skip


@pytest.fixture
def ward(launcher: Launcher, tmp_path: Path) -> Ward:
    return Ward(launcher, tmp_path)


def await_end(job: Job, state: str) -> None:
    """Two attempts, each with a preflight, take their time on a busy machine."""
    job.wait(
        state, lambda: job.slurm_state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), limit_s=400
    )
    assert job.slurm_state == state, f"{job.slurm_state}\n{job.log()}"


def ended(job: Job) -> list[str]:
    return [str(attempt.ended().get("ended")) for attempt in job.run.attempts()]


def preflight(job: Job, attempt: int = 1) -> dict[str, Any]:
    found = json.loads((job.run.attempt(attempt).folder / "preflight.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("illness", ["slow", "skewed", "broken"])
def test_a_spare_takes_the_place_of_a_bad_node(ward: Ward, illness: str) -> None:
    if illness == "slow":
        ward.falls_ill("n1", matmul_tflops=41.0)
        words = "matmul 41 TFLOP/s, median of its peers 90"
    elif illness == "skewed":
        ward.falls_ill("n1", clock_skew_s=-400.0)
        words = "its clock is 400.0 s behind the others'"
    else:
        ward.breaks("n1", "echo 'Unable to determine the device handle for GPU 0000:07:00.0' >&2; exit 1")
        words = "Unable to determine the device handle for GPU 0000:07:00.0"
    job = ward.submit("--set", "job.spare_nodes=1", "--nodelist", "n[1-3]")
    await_end(job, "COMPLETED")
    found = preflight(job)
    assert (found["nodes"], found["ended"]) == (["n2", "n3"], None)
    # Slurm has handed the plan to the ranks, and those of the layout have met.
    assert {(each["kind"], each["axis"]) for each in found["exchanges"]} >= {("pair", "nodes"), ("ring", "dp")}
    assert ended(job) == ["done"]
    assert (
        f"bad node n1: {words}" in job.log()
        or f"bad node n1: rank 0 on it failed: the probe command failed: {words}" in job.log()
    )
    assert "n3 takes the place of a bad node" in job.log()
    assert "2 ranks on 2 nodes (n2,n3)" in job.log()
    (bad,) = ward.doctor(job)["bad_nodes"]
    assert (bad["node"], bad["everyone"], bad["run"]) == ("n1", True, job.run.run_id)
    assert words in bad["why"]
    ward.launcher.run("doctor", "--cluster", str(ward.profile), "--forgive", "n1")
    assert ward.doctor(job)["bad_nodes"] == []


def test_without_a_spare_the_run_is_retried_without_the_node(ward: Ward) -> None:
    """Nodes n1 and n2 come first where nothing is excluded; n2 is slow to reach whoever its partner is."""
    ward.breaks("n2", "echo 'GPU has fallen off the bus' >&2; exit 1")
    job = ward.submit()
    await_end(job, "COMPLETED")
    assert ended(job) == ["node_failure", "done"]
    cause = job.run.attempts()[0].ended()["cause"]
    assert cause == "preflight: bad node n2: rank 0 on it failed: the probe command failed: GPU has fallen off the bus"
    assert "n2" not in job.nodes()
    assert preflight(job, 2)["findings"] == []
    slow = ward.doctor(job)["slow_nodes"]
    assert [(each["node"], each["run"]) for each in slow] == [("n2", job.run.run_id)]


def test_without_room_for_a_checkpoint_the_run_stops_at_once(ward: Ward) -> None:
    for node in ("n1", "n2", "n3", "n4"):
        ward.falls_ill(node, free_gib=0.0)
    job = ward.submit()
    await_end(job, "FAILED")
    assert ended(job) == ["disk_full"]
    assert "0.00 GiB are free" in str(job.run.attempts()[0].ended()["cause"])
    assert ward.doctor(job)["bad_nodes"] == []


def test_a_preflight_that_cannot_be_held_is_no_reason_not_to_train(ward: Ward) -> None:
    job = ward.submit(HPC_GPT_PREFLIGHT_S="no number")
    await_end(job, "COMPLETED")
    assert ended(job) == ["done"]
    assert "warning: no preflight" in job.log()


def test_doctor_finds_what_a_cluster_has_and_what_not(launcher: Launcher) -> None:
    found = json.loads(launcher.run("doctor", "--json")[0])
    assert found["ok"]
    assert {check["name"]: check["level"] for check in found["checks"]}["sbatch"] == "ok"
    said, _ = launcher.run("doctor", "-p", "lo", "-C", "h100", code=1)
    assert "fail  partition      no partition 'lo' for you here" in said
    assert "do: did you mean low?" in said
    assert "no constraint 'h100' for you here" in said
    said, _ = launcher.run("doctor", code=1, SLURM_CONF="/nonexistent/slurm.conf")
    assert "fail  slurm" in said


def test_a_detected_profile_is_one_that_submits(launcher: Launcher) -> None:
    text, words = launcher.run("profile", "detect")
    assert "partition low; --partition takes another: high" in words
    found = tomllib.loads(text)
    assert (found["gpus_per_node"], found["cpus_per_node"], found["partition"]) == (4, 8, "low")
    assert (found["gpu_flag"], found["chain"], found["time"]) == ("gres", "requeue", "24:00:00")
    launcher.run("profile", "detect", "--name", "detected", "--partition", "high")
    assert load_profile(str(launcher.folder / "config" / "clusters" / "detected.toml")).partition == "high"
    _, words = launcher.run("submit", "--cluster", "detected", "--dry-run")
    assert "in partition high" in words
    _, words = launcher.run("profile", "detect", "--name", "detected", code=2)
    assert "is there already, and nothing is overwritten" in words


def test_of_several_kinds_of_nodes_the_commonest_is_detected(
    checks: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The cluster for checks has nodes of 4 GPUs with features, and of 8 without, all in one partition."""
    asking = Launcher(checks, tmp_path_factory.mktemp("kinds"))
    text, words = asking.run("profile", "detect")
    assert "kinds of nodes; the profile is for the first that has GPUs" in words
    found = tomllib.loads(text)
    kind = next(nodes for nodes in checks.spec.nodes if nodes.count == 64 and nodes.gpus == found["gpus_per_node"])
    assert found["cpus_per_node"] in {nodes.cpus for nodes in checks.spec.nodes if nodes.gpus == kind.gpus}
    assert set(found) >= {"account", "qos", "time"}
    path = asking.folder / "found.toml"
    asking.run("profile", "detect", "-o", str(path))
    _, words = asking.run("submit", "--cluster", str(path), "--dry-run")
    assert " to start at " in words
