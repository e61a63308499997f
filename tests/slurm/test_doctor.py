"""The doctor on a real cluster: nodes that are broken, slow or skewed by a probe command each, and what becomes of the
run; profiles as `profile detect` finds them; and the verb itself."""

import json
import re
import tomllib
from typing import Any

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from tests.slurm.launcher import PROFILE, Job, Launcher
from tests.slurm.stories import Teller, story

WELL = {"matmul_tflops": 90.0, "pair_gb_s": 20.0, "all_reduce_gb_s": 20.0}
# A file for each node replaces its figures; a script does what no figure can.
COMMAND = """
if [ -e "$FIGURES/$SLURMD_NODENAME.sh" ]; then . "$FIGURES/$SLURMD_NODENAME.sh"
elif [ -e "$FIGURES/$SLURMD_NODENAME.json" ]; then cat "$FIGURES/$SLURMD_NODENAME.json"
else cat "$FIGURES/well.json"; fi
"""


class Ward:
    """A profile with the preflight on, one rank a node, and four nodes of the cluster whose figures a story sets."""

    def __init__(self, launcher: Launcher, name: str, first: int) -> None:
        self.launcher = launcher
        self.nodes = [f"d{number}" for number in range(first, first + 4)]
        folder = launcher.folder / f"ward-{name}"
        self.figures = folder / "figures"
        self.figures.mkdir(parents=True)
        (self.figures / "well.json").write_text(json.dumps(WELL))
        # A name of its own, and so a list of bad nodes of its own.
        self.profile = folder / f"{folder.name}.toml"
        text = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 1").replace(
            "cpus_per_node = 4", "cpus_per_node = 1"
        )
        self.profile.write_text(f'preflight = true\nretry_pause_s = 1\npartition = "ward"\n{text}')

    def falls_ill(self, node: str, **figures: Any) -> None:
        (self.figures / f"{node}.json").write_text(json.dumps(WELL | figures))

    def breaks(self, node: str, script: str) -> None:
        (self.figures / f"{node}.sh").write_text(script)

    def doctor(self, job: Job) -> dict[str, Any]:
        """What `hpc-gpt doctor RUN` says."""
        found = json.loads(self.launcher.run("doctor", str(job.run.path), "--json")[0])
        assert isinstance(found, dict)
        return found

    def submit(self, *arguments: str, nodes: int = 4, **more: str) -> Job:
        """A run of two ranks on two of the first `nodes` nodes, to its end."""
        others = ",".join(f"d{number}" for number in range(1, 13) if f"d{number}" not in self.nodes[:nodes])
        job = self.launcher.submit(
            "--cluster", str(self.profile), "--engine", "ddp", "--tp", "1", "--pp", "1", "--dp", "2", "--gpus", "2",
            "--mbs", "2", "--set", "train.steps=3", "--set", "train.save_every=0", "--exclude", others, *arguments,
            FIGURES=str(self.figures), HPC_GPT_PROBE_COMMAND=COMMAND, **more,
        )  # fmt: skip
        job.wait_end("COMPLETED", "FAILED")
        return job


def preflight(job: Job, attempt: int = 1) -> dict[str, Any]:
    found = json.loads((job.run.attempt(attempt).folder / "preflight.json").read_text())
    assert isinstance(found, dict)
    return found


@story
def slow(teller: Teller) -> tuple[Ward, Job]:
    ward = Ward(teller.launcher, "slow", 1)
    ward.falls_ill("d1", matmul_tflops=41.0)
    return ward, ward.submit("--set", "job.spare_nodes=1", nodes=3)


@story
def without_spare(teller: Teller) -> tuple[Ward, Job]:
    """Nodes d9 and d10 come first where nothing is excluded; d10 is broken."""
    ward = Ward(teller.launcher, "without-spare", 9)
    ward.breaks("d10", "echo 'GPU has fallen off the bus' >&2; exit 1")
    return ward, ward.submit()


@story
def without_preflight(teller: Teller) -> tuple[Ward, Job]:
    ward = Ward(teller.launcher, "without-preflight", 1)
    # submit refuses it in the shell's own environment.
    ward.profile.write_text(f'{ward.profile.read_text()}HPC_GPT_PREFLIGHT_S = "no number"\n')
    return ward, ward.submit()


# Which figures make a node bad is tests/preflight's; one that gives none is met below, without a spare.
@pytest.mark.long
@pytest.mark.story(slow)
def test_a_spare_takes_the_place_of_a_bad_node(told: Teller) -> None:
    ward, job = told(slow)
    words = "matmul 41 TFLOP/s, median of its peers 90"
    bad_node, second, spare = ward.nodes[:3]
    assert job.slurm_state == "COMPLETED", job.log()
    found = preflight(job)
    assert (found["nodes"], found["ended"]) == ([second, spare], None)
    # Slurm has handed the plan to the ranks, and those of the layout have met.
    assert {(each["kind"], each["axis"]) for each in found["exchanges"]} >= {("pair", "nodes"), ("ring", "dp")}
    assert job.ended() == ["done"]
    assert f"bad node {bad_node}: {words}" in job.log()
    assert f"{spare} takes the place of a bad node" in job.log()
    assert f"2 ranks on {second},{spare}, " in job.log()
    (bad,) = ward.doctor(job)["bad_nodes"]
    assert (bad["node"], bad["everyone"], bad["run"]) == (bad_node, True, job.run.run_id)
    assert words in bad["why"]
    ward.launcher.run("doctor", "--cluster", str(ward.profile), "--forgive", bad_node)
    assert ward.doctor(job)["bad_nodes"] == []


@pytest.mark.long
@pytest.mark.story(without_spare)
def test_without_a_spare_the_run_is_retried_without_the_node(told: Teller) -> None:
    """The bad node is slow to reach whoever its partner is."""
    ward, job = told(without_spare)
    assert job.slurm_state == "COMPLETED", job.log()
    assert job.ended() == ["node_failure", "done"]
    cause = job.run.attempts()[0].ended()["cause"]
    words = "rank 0 on it failed: the probe command failed: GPU has fallen off the bus"
    assert cause == f"preflight: bad node d10: {words}"
    assert "d10" not in job.nodes()
    assert preflight(job, 2)["findings"] == []
    found = ward.doctor(job)["slow_nodes"]
    assert [(each["node"], each["run"]) for each in found] == [("d10", job.run.run_id)]


@pytest.mark.long
@pytest.mark.story(without_preflight)
def test_a_preflight_that_cannot_be_held_does_not_stop_training(told: Teller) -> None:
    _, job = told(without_preflight)
    assert job.slurm_state == "COMPLETED", job.log()
    assert job.ended() == ["done"]
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


@pytest.mark.long
def test_a_detected_profile_is_one_that_submits(launcher: Launcher) -> None:
    text, words = launcher.run("profile", "detect")
    found_others = re.search(r"partition low; --partition takes another: (.*)", words)
    assert found_others, words
    assert {"high", "ward"} <= set(found_others[1].split(", "))
    found = tomllib.loads(text)
    assert (found["gpus_per_node"], found["cpus_per_node"], found["partition"]) == (4, 8, "low")
    assert (found["gpu_flag"], found["chain"], found["time"]) == ("gres", "requeue", "24:00:00")
    _, words = launcher.run("profile", "detect", "--name", "detected", "--partition", "high")
    assert words.endswith("next: hpc-gpt doctor demo --cluster detected\n")
    launcher.run(*words.splitlines()[-1].split()[2:])  # and it finds nothing
    assert load_profile(str(launcher.folder / "config" / "clusters" / "detected.toml")).partition == "high"
    _, words = launcher.run("submit", "--cluster", "detected", "--dry-run")
    assert "in partition high" in words
    _, words = launcher.run("profile", "detect", "--name", "detected", code=2)
    assert "exists, and nothing is overwritten" in words


@pytest.mark.long
def test_of_several_kinds_of_nodes_the_commonest_is_detected(checks, tmp_path_factory):
    """The cluster for checks has nodes of 4 GPUs with features, and of 8 without, all in one partition."""
    asking = Launcher(checks, tmp_path_factory.mktemp("kinds"))
    text, words = asking.run("profile", "detect")
    assert "kinds of nodes; the profile is for the first that has GPUs" in words
    found = tomllib.loads(text)
    kind = next(nodes for nodes in checks.spec.nodes if nodes.count == 64 and nodes.gpus == found["gpus_per_node"])
    assert found["cpus_per_node"] in {nodes.cpus for nodes in checks.spec.nodes if nodes.gpus == kind.gpus}
    assert set(found) >= {"account", "qos", "time"}
    path = asking.folder / "found.toml"
    _, words = asking.run("profile", "detect", "-o", str(path))
    asking.run(*words.splitlines()[-1].split()[2:])  # what it names next finds nothing
    _, words = asking.run("submit", "--cluster", str(path), "--dry-run")
    assert " to start at " in words
