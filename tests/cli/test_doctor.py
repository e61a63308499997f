"""`hpc-gpt doctor` where there is no Slurm: what it looks at, how it says so, and how a node is forgiven."""

import json

import pytest

from hpc_gpt.cli.request import small_options
from hpc_gpt.core.ends.bad_nodes import listed, note
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.launcher.smoke import fit_small
from tests.cli.command import error_of, hpc_gpt, in_process, without_slurm


def checks(done):
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_this_machine_is_looked_over(tmp_path):
    done = in_process("doctor", "demo", "--cluster", "local", "--json", code=0)
    found = json.loads(done.stdout)
    assert set(found) == {"schema", "cluster", "ok", "checks", "bad_nodes", "slow_nodes"}
    assert (found["schema"], found["cluster"], found["ok"]) == (1, "local", True)
    by_name = checks(done)
    assert set(by_name) == {
        *("experiment", "slurm", "gpus", "network", "files"),
        *("logs", "data", "state", "clock"),
    }
    assert all(set(check) == {"name", "level", "words", "hint"} for check in by_name.values())
    assert not (tmp_path / "logs").exists(), "it writes nothing that stays"
    assert not (tmp_path / "state").exists()


def test_a_job_scripts_request_is_checked(tmp_path):
    (path := tmp_path / "train.slurm").write_text("#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --time=10\n")
    found = checks(in_process("doctor", "--cluster", "local", "--json", path, code=0))
    assert found["experiment"]["words"] == "train: its job script as it is on 1 node of local"
    assert not (tmp_path / "logs").exists()


@pytest.mark.long
def test_the_ranks_of_this_machine_are_measured(tmp_path):
    done = hpc_gpt(
        "doctor", "demo", "--cluster", "local", "--gpus", "2", "--tp", "2", "--pp", "1", "--probe", "--json", code=0
    )
    assert checks(done)["probe"]["words"].startswith("2 ranks measured here in ")
    assert "all-reduce GB/s" in done.stderr
    assert not list(tmp_path.rglob(".hpc-gpt-doctor*"))


def test_without_slurm_a_cluster_fails_and_says_what_to_do(tmp_path):
    done = in_process("doctor", "demo", "--cluster", "h100-80g-8", environment=without_slurm(tmp_path), code=1)
    assert "fail  slurm" in done.stdout
    assert "no sbatch on this machine" in done.stdout
    assert "do: run on a login node, or use --cluster local" in done.stdout
    assert "bad nodes of h100-80g-8: none" in done.stdout
    assert "1 failed" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hpc-gpt submit --dry-run checks the run itself")


def test_an_experiment_that_cannot_run_is_one_finding_of_several():
    by_name = checks(in_process("doctor", "demo", "--cluster", "local", "--gpus", "64", "--json", code=1))
    assert by_name["experiment"]["level"] == "fail"
    assert "needs 8 nodes, but profile local is this one machine" in by_name["experiment"]["words"]
    assert by_name["experiment"]["hint"]
    assert by_name["logs"]["level"] == "ok"


def test_a_folder_that_cannot_be_written_fails(tmp_path):
    (in_the_way := tmp_path / "a file").write_text("")
    done = in_process(
        "doctor", "demo", "--cluster", "local", "--json", environment={"HPC_GPT_LOGS": str(in_the_way)}, code=1
    )
    assert checks(done)["logs"]["level"] == "fail"
    assert "cannot be written" in checks(done)["logs"]["words"]


def test_without_experiment_and_size_it_is_demo():
    done = in_process("doctor", "--cluster", "local")
    assert "ok    experiment  demo: tp2-pp2-dp1 on 1 node of local\n" in done.stdout
    assert done.stderr.startswith("no EXPERIMENT and no size: checks demo\n")
    sized = in_process("doctor", "--cluster", "jean-zay-v100-32g", "--gpus", "64", "--pp", "16")
    assert "experiment  gpt2-meg-ds-3d-48b: tp4-pp16-dp1 on 16 nodes" in sized.stdout
    assert "takes demo" not in sized.stderr


def test_it_is_as_large_as_the_profile_holds(tmp_path):
    for gpus_per_node, gpus, sizes in (
        (4, None, {}),
        (2, None, {}),
        (8, 8, {}),
        (1, None, {"layout.gpus": 4, "layout.tp": 1, "layout.pp": 2}),
        (1, 3, {"layout.gpus": 2, "layout.tp": 1, "layout.pp": 2}),
        (2, 2, {"layout.gpus": 2, "layout.tp": 2, "layout.pp": 1}),
        (1, 1, {"layout.gpus": 1, "layout.tp": 1, "layout.pp": 1}),
        (3, 6, {"layout.gpus": 2, "layout.tp": 2, "layout.pp": 1}),
    ):
        (tmp_path / "mine.toml").write_text(f"gpus_per_node = {gpus_per_node}\n")
        assert fit_small(load_profile(str(tmp_path / "mine.toml")), gpus) == sizes
    done = in_process("doctor", *small_options(sizes), "--cluster", tmp_path / "mine.toml", "--json")
    assert checks(done)["experiment"]["level"] == "ok"


def test_bad_nodes_are_shown_and_forgiven():
    note("local", "n7", "a node of the job died", "run-1", hours=2)
    note("local", "n8", "matmul 41 TFLOP/s, median of its peers 92", "run-2", hours=2, sure=True)
    done = in_process("doctor", "demo", "--cluster", "local")
    assert "bad nodes of local: 2" in done.stdout
    assert "n7  a node of the job died; left out by run run-1 until " in done.stdout
    assert "n8  matmul 41 TFLOP/s, median of its peers 92; left out by every run until " in done.stdout
    done = in_process("doctor", "--cluster", "local", "--forgive", "n8")
    assert (done.code, done.stdout) == (0, "n8 is off the list of bad nodes of local\n")
    assert list(listed("local")) == ["n7"]
    message, hint = error_of(in_process("doctor", "--cluster", "local", "--forgive", "n8"))
    assert message == "n8 is not on the list of bad nodes of local"
    assert hint == "on the list: n7"


def test_slow_nodes_of_the_last_runs_are_shown(made_run):
    attempt = made_run.new_attempt()
    finding = {"node": "n3", "words": "matmul 41 TFLOP/s, median of its peers 92"}
    (attempt.folder / "preflight.json").write_text(json.dumps({"findings": [finding, {"node": None, "words": "x"}]}))
    profile = made_run.resolved().cluster.name
    (found,) = json.loads(in_process("doctor", "--cluster", profile, "--json").stdout)["slow_nodes"]
    assert found == {"node": "n3", "run": made_run.run_id, "words": f"preflight: {finding['words']}"}
