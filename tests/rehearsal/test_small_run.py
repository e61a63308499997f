"""What of an experiment and its profile is rehearsed here, and what is named as missing."""

from dataclasses import replace

import pytest

from hpc_gpt.core.settings.cluster import ClusterProfile, Container, load_profile
from hpc_gpt.core.settings.engines import can_resume
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.directives import sbatch_directives
from hpc_gpt.launcher.rehearsal.small_run import NotRehearsed, SmallRun, check_data, make_small
from hpc_gpt.launcher.rehearsal.stages import SAVE_EVERY, STEPS


def real(profile: ClusterProfile | None = None, **overrides: object) -> Resolved:
    """Megatron-DeepSpeed's published run: 64 GPUs on 16 nodes."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve(load_experiment("gpt2-meg-ds-3d", keys), profile or load_profile("jean-zay-v100-32g"))


def missing(small: SmallRun) -> str:
    return "\n".join(f"{each.what}: {each.why}" for each in small.missing)


def test_it_is_small_but_as_the_users_in_all_that_slurm_is_asked() -> None:
    big = real(job__account="abc@v100", job__sbatch=["--nice=5"])
    small = make_small(big, gpus_here=0)
    assert small.resolved.gpus <= 8
    assert small.resolved.nodes == 2, "what several nodes take is rehearsed on two"
    assert (small.resolved.train.steps, small.resolved.train.save_every) == (STEPS, SAVE_EVERY)
    assert small.resolved.train.warmup_steps == 1
    assert "train.warmup_steps is cut from 10 to 1" in small.notes
    sizes = ("--job-name=", "--nodes=", "--ntasks-per-node=", "--gres=")
    ours, theirs = ([line for line in sbatch_directives(each) if not line.startswith(sizes)]
                    for each in (small.resolved, big))  # fmt: skip
    assert ours == theirs
    assert "account abc@v100" in missing(small)
    assert "no GPU here" in missing(small)


def test_what_this_machine_lacks_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASH_FUNC_module%%", raising=False)
    monkeypatch.setattr("hpc_gpt.launcher.rehearsal.small_run._MODULE_INITS", ())
    site = replace(
        load_profile("generic-slurm"),
        modules=("cuda/12",),
        venv="/nosuch/venv",
        python="nosuch-python",
        stage="/nosuch/environment.tar",
        container=Container("pyxis", "image.sqsh"),
        environment={"GLOO_SOCKET_IFNAME": "nosuch0", "PATH": "/site/bin", "MINE": "kept"},
        node_suffix="-ib0",
    )
    small = make_small(real(site), gpus_here=0)
    profile = small.resolved.cluster
    assert (profile.modules, profile.venv, profile.python, profile.container) == ((), None, None, None)
    assert profile.environment == {"MINE": "kept"}
    assert profile.stage is None
    for words in (
        "modules cuda/12",
        "/nosuch/venv",
        "nosuch-python",
        "stage /nosuch/environment.tar",
        "image.sqsh",
        "nosuch0",
        "PATH",
        "-ib0",
    ):
        assert words in missing(small)


def test_what_is_here_is_used(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    monkeypatch.setenv("BASH_FUNC_module%%", "() { :; }")
    site = replace(load_profile("generic-slurm"), modules=("cuda/12",), venv=str(tmp_path),
                   environment={"MINE": "kept"})  # fmt: skip
    profile = make_small(real(site), gpus_here=0).resolved.cluster
    assert (profile.modules, profile.venv) == (("cuda/12",), str(tmp_path))
    assert profile.environment == {"MINE": "kept"}


def test_gpus_are_used_where_each_rank_has_one() -> None:
    assert make_small(real(), gpus_here=8).gpus == 8
    few = make_small(real(), gpus_here=1)
    assert few.gpus == 0
    assert "1 GPU for 4 ranks" in missing(few)


def test_what_cannot_be_resumed_is_not_interrupted(tmp_path) -> None:
    offloaded = load_experiment("gpt2-meg-ds-zero", {"engine.offload": "optimizer", "engine.zero_stage": 3,
                                                     "engine.offload_path": str(tmp_path)})  # fmt: skip
    small = make_small(resolve(offloaded, load_profile("generic-slurm")), gpus_here=0)
    assert not can_resume(small.resolved.engine)


def test_data_that_submit_refuses_are_named_and_stop_nothing() -> None:
    found = check_data(real(data__source="tokens", data__path="/nosuch.tokens"))
    assert isinstance(found, NotRehearsed)
    assert "no token file /nosuch.tokens" in found.why
    assert check_data(real(data__source="random")) == "random tokens"


def test_without_gpus_a_devices_ranks_run_on_the_cpu_in_words() -> None:
    """On a cluster a rank that sees no GPU is refused."""
    site = load_profile("a100-80g-8")
    small = make_small(real(site), gpus_here=0)
    assert small.resolved.cluster.device is None
    assert "no GPU here: the ranks run on the CPU" in small.notes
    few = make_small(real(site), gpus_here=1)
    assert (few.resolved.cluster.device, few.notes[0]) == (None, "1 GPU for 4 ranks here: the ranks run on the CPU")
    assert make_small(real(site), gpus_here=8).resolved.cluster.device == "a100-80g"
