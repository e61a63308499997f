"""The doctor on a real cluster: a node that a probe command makes slow, and what becomes of the run; a profile as
`profile detect` finds it; and the verb itself."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from tests.slurm.launcher import PROFILE, Job, Launcher
from tests.slurm.stories import Teller, storied

WELL = {"matmul_tflops": 90.0, "pair_gb_s": 20.0, "all_reduce_gb_s": 20.0}
# A file for each node replaces its figures.
COMMAND = 'cd "$FIGURES"; cat "$SLURMD_NODENAME.json" 2>/dev/null || cat well.json'


def submit_in_ward(teller: Teller, profile: Path, *arguments: str, more: str = "") -> Job:
    """A run of two ranks on two of the nodes d1 to d3, to its end, by a profile with the preflight on; `more` are
    lines of its environment. d1 is slow."""
    (figures := profile.parent / "figures").mkdir(parents=True)
    (figures / "well.json").write_text(json.dumps(WELL))
    (figures / "d1.json").write_text(json.dumps(WELL | {"matmul_tflops": 41.0}))
    text = PROFILE.replace("gpus_per_node = 2", "gpus_per_node = 1").replace("cpus_per_node = 4", "cpus_per_node = 1")
    profile.write_text(f'preflight = true\nretry_pause_s = 1\npartition = "ward"\n{text}{more}')
    job = teller.launcher.submit(
        "--cluster", str(profile), "--engine", "ddp", "--tp", "1", "--pp", "1", "--dp", "2", "--gpus", "2",
        "--mbs", "2", "--set", "train.steps=3", "--set", "train.save_every=0", *arguments,
        FIGURES=str(figures), HPC_GPT_PROBE_COMMAND=COMMAND, HPC_GPT_STATE=teller.launcher.environment["HPC_GPT_STATE"],
    )  # fmt: skip
    job.wait_end("COMPLETED", "FAILED")
    assert job.slurm_state == "COMPLETED", job.log()
    assert job.ended() == ["done"]
    return job


# Which figures make a node bad, and what follows without a spare, is tests/trainer/preflight's.
@pytest.mark.long
@storied
def test_a_spare_takes_the_place_of_a_bad_node(teller: Teller) -> None:
    # A name of its own, and so a list of bad nodes of its own.
    profile = teller.launcher.folder / "ward-slow" / "ward-slow.toml"
    job = submit_in_ward(teller, profile, "--set", "job.spare_nodes=1")
    words = "matmul 41 TFLOP/s, median of its peers 90"
    found = json.loads((job.run.attempt(1).folder / "preflight.json").read_text())
    assert (found["nodes"], found["ended"]) == (["d2", "d3"], None)
    # Slurm has handed the plan to the ranks, and those of the layout have met.
    assert {(each["kind"], each["axis"]) for each in found["exchanges"]} >= {("pair", "nodes"), ("ring", "dp")}
    assert f"bad node d1: {words}" in job.log()
    assert "d3 takes the place of a bad node" in job.log()
    assert "2 ranks on d2,d3, " in job.log()

    asked = ("--cluster", str(profile), "--engine", "ddp", "--tp", "1", "--pp", "1")

    def bad_nodes() -> list[dict[str, Any]]:
        bad = json.loads(teller.launcher.run("doctor", *asked, "--json")[0])["bad_nodes"]
        assert isinstance(bad, list)
        return bad

    (bad,) = bad_nodes()
    assert (bad["node"], bad["everyone"], bad["run"]) == ("d1", True, job.run.run_id)
    assert words in bad["why"]
    teller.launcher.run("doctor", *asked, "--forgive", "d1")
    assert bad_nodes() == []


@pytest.mark.long
@storied
def test_a_preflight_that_cannot_be_held_does_not_stop_training(teller: Teller) -> None:
    # submit refuses it in the shell's own environment.
    more = 'HPC_GPT_PREFLIGHT_S = "no number"\n'
    job = submit_in_ward(teller, teller.launcher.folder / "ward-without" / "ward-without.toml", more=more)
    assert "warning: no preflight" in job.log()


def test_doctor_finds_what_a_cluster_has_and_what_not(launcher: Launcher) -> None:
    said, _ = launcher.run("doctor", "-p", "lo", "-C", "h100", code=1)
    assert re.search(r"^fail +sbatch +sbatch refused the job: .*Invalid partition", said, re.MULTILINE), said
    assert "fail  partition      no partition 'lo' for you here" in said
    assert "do: did you mean low?" in said
    assert "no constraint 'h100' for you here" in said


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
