"""Every job script is put before a real scheduler that knows 64 nodes and the shipped profiles' features and qos."""

import re
from pathlib import Path

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT, load_experiment
from hpc_gpt.launcher.render import render_script
from tests.experiments.sweeps import COUNTS, settle, sweep
from tests.experiments.sweeps import PROFILES as SWEPT
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import Launcher
from tests.slurm.site import slurm_profiles

PROFILES = [profile.name for profile in slurm_profiles()]


@pytest.fixture(scope="module")
def asking(checks: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """hpc-gpt on the cluster for checks, with the shipped profiles and nothing of the tests' own."""
    launcher = Launcher(checks, tmp_path_factory.mktemp("checks"), within=True)
    for name in ("HPC_GPT_CLUSTER", "HPC_GPT_EXPERIMENT"):
        launcher.environment.pop(name)
    return launcher


def accepted_on(words: str) -> tuple[int, str]:
    """(processors, nodes) of `sbatch --test-only`'s answer."""
    found = re.search(r"to start at \S+ using (\d+) processors on nodes (\S+)", words)
    assert found, words
    return int(found[1]), found[2]


@pytest.mark.parametrize("profile", PROFILES)
def test_two_experiments_are_accepted_under_this_profile(checks: Cluster, tmp_path: Path, profile: str) -> None:
    for experiment in ("demo", DEFAULT_EXPERIMENT):  # the last test has the others, every row of theirs
        script = render_script(resolve(load_experiment(experiment), load_profile(profile)))
        (path := tmp_path / f"{experiment}.sh").write_text(script)
        done = checks.run("sbatch", "--test-only", str(path))
        assert done.returncode == 0, f"{experiment}: {done.stderr}"
        accepted_on(done.stderr)


def test_the_readme_example_is_accepted(asking: Launcher) -> None:
    script, words = asking.run("submit", "--gpus", "64", "--pp", "16", "--dry-run", "--script")
    processors, nodes = accepted_on(words)
    assert processors >= 64
    assert nodes.endswith("]")
    assert "--nodes=16" in script
    assert "tp4-pp16-dp1" in script
    assert not asking.logs.exists(), "a dry run writes nothing"


def test_a_sweeps_dry_run_asks_slurm_of_each_of_its_jobs(asking: Launcher) -> None:
    jobs, words = asking.run("submit", "memory-ladder", "--sweep", "--dry-run", "--script")
    assert jobs == "array of 6, 1 GPU: batch32 batch64 batch128 accumulation recompute for-loop\njob, 2 GPUs: fsdp\n"
    assert words.count(" to start at ") == 2
    _, words = asking.run("submit", "memory-ladder", "--sweep", "--dry-run", "--script", "-C", "no-such-gpu", code=1)
    assert "Invalid feature specification" in words
    assert not asking.logs.exists()


def test_a_dry_run_shows_a_refusal_in_sbatchs_words(asking: Launcher) -> None:
    rows, words = asking.run("submit", "--gpus", "64", "--pp", "16", "--dry-run", "-C", "no-such-gpu", code=1)
    assert "would run" in rows, "the overview comes first"
    assert words.splitlines()[-3].startswith("Error: ")
    _, words = asking.run("submit", "--gpus", "64", "--pp", "16", "--dry-run", "--script", "-C", "no-such-gpu", code=1)
    assert "Invalid feature specification" in words
    nodes = sum(nodes.count for nodes in asking.cluster.spec.nodes)
    more = str(64 * (nodes // 16 + 1))  # GPUs, four a node
    _, words = asking.run("submit", "--gpus", more, "--pp", "16", "--dry-run", "--script", "--gbs", more, code=1)
    assert "Slurm would never start this job: " in words
    assert not asking.logs.exists()


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-q", "no-such-qos"), "Invalid qos"),
        (("-p", "no-such-partition"), "partition"),
        (("-A", "no-such-account"), "Invalid account"),
    ],
)
def test_a_refusal_leaves_a_run_that_says_so(asking: Launcher, flags: tuple[str, ...], words: str) -> None:
    before = set(asking.logs.glob("*/*"))
    _, said = asking.run("submit", "--gpus", "64", "--pp", "16", "--set", "data.source=random", *flags, code=1)
    assert words in said
    assert "hint:" in said
    (run,) = set(asking.logs.glob("*/*")) - before
    assert (run / "job.sh").is_file()
    shown = asking.run("status", str(run), "--json")[0]
    assert '"state": "refused"' in shown
    assert words in shown


@pytest.mark.long
@pytest.mark.parametrize("profile", SWEPT)
def test_every_row_is_accepted_on_the_nodes_it_asks_for(checks: Cluster, tmp_path: Path, profile: str) -> None:
    asked = 0
    for name in COUNTS:
        for row in sweep(name).possible:
            run = settle(name, row.name, profile)
            (script := tmp_path / f"{name}-{row.name}.sh").write_text(render_script(run))
            done = checks.run("sbatch", "--test-only", str(script))
            assert done.returncode == 0, f"{script.name}: {done.stderr}"
            processors, listed = accepted_on(done.stderr)
            assert processors >= run.gpus, f"{script.name}: {done.stderr}"
            nodes = checks.run("scontrol", "show", "hostnames", listed).stdout.split()
            assert len(nodes) == run.nodes, f"{script.name}: {done.stderr}"
            asked += 1
    assert asked == sum(COUNTS.values()) - 6
