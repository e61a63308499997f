"""Checks whose facts a site of its own would need, each result whole: `level name: words | hint`."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.launcher.doctor import checks
from hpc_gpt.launcher.doctor.checks import check_signals, guarded
from tests.launcher.doctor.test_site import CPU, GPU, V100, a_site, partition
from tests.launcher.test_render import resolved_demo

DAHU = replace(
    a_site(CPU, GPU, partition("down", [(V100, 1)], State="DOWN"), accounts=("abc", "xyz"), qos=("normal",)),
    features=frozenset({"ib", "a100"}),
)


def said(*found):
    return [f"{each.level} {each.name}: {each.words}" + (f" | {each.hint}" if each.hint else "") for each in found]


@pytest.mark.parametrize(
    ("auth", "kill_wait", "timeout", "warned"),
    [
        ("(null)", 30, 10, False),  # Slurm's own values
        ("cred_expire=120", 30, 10, False),
        ("cred_expire=60", 30, 10, True),
        ("socket=/run/munge,cred_expire=5", 75, 10, True),
        ("cred_expire=5", 75, 90, False),
        ("cred_expire=5", 10, 10, False),
    ],
)
def test_a_site_where_a_late_signal_ends_the_next_attempt(auth, kill_wait, timeout, warned):
    config = {"AuthInfo": auth, "KillWait": f"{kill_wait} sec", "MessageTimeout": f"{timeout} sec"}
    found = check_signals(config)
    words = (
        "warn signals: cred_expire is {} s and KillWait {} s is above MessageTimeout {} s: Slurm can repeat an "
        "attempt's signal when the next one already runs, which then goes back to the queue once more | ask for "
        "cred_expire={} or more, or a MessageTimeout above KillWait"
    ).format(auth.rpartition("=")[2], kill_wait, timeout, timeout + 60)
    assert said(*found) == [words] * warned
    assert check_signals({}) == []


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {},
            ["fail gpus_per_node: asks for 4 GPUs on a node, and the nodes have 0 | choose another with --partition"],
        ),
        ({"partition": "cpu", "gpu_flag": "none"}, ["ok partition: cpu"]),
        (
            {"partition": "gpu,down,gqu"},
            [
                "ok partition: gpu",
                "ok partition: down",
                "fail partition: no partition 'gqu' for you here | did you mean gpu?",
                "fail partition: down is DOWN | choose another with --partition",
                "ok gpus_per_node: asks for 4 of the 8 GPUs of a node",
            ],
        ),
        (
            {"partition": "gpu", "account": "abd", "qos": "fast", "constraint": "ib&milan|a100", "gpu_type": "a100"},
            [
                "ok partition: gpu",
                "fail account: no account 'abd' for you here | did you mean abc?",
                "fail qos: no qos 'fast' for you here | known: normal",
                "ok constraint: ib",
                "fail constraint: no constraint 'milan' for you here | known: a100, ib",
                "ok constraint: a100",
                "ok gpus_per_node: asks for 4 of the 8 GPUs of a node",
            ],
        ),
        (
            {"partition": "down", "gpus_per_node": 8, "layout.gpus": 8},
            [
                "ok partition: down",
                "fail partition: down is DOWN | choose another with --partition",
                "fail gpus_per_node: asks for 8 GPUs on a node, and the nodes have 4 | "
                "set gpus_per_node = 4 in the profile",
            ],
        ),
        (
            {"partition": "gpu", "gpu_type": "h100"},
            ["ok partition: gpu", "fail gpu_type: no node has h100 | known here: a100, v100"],
        ),
    ],
)
def test_what_a_job_asks_for_is_compared_with_the_site(asked, expected):
    of_profile = {key: asked[key] for key in ("gpu_flag", "gpu_type", "gpus_per_node") if key in asked}
    settings = {key: value for key, value in asked.items() if "." in key}
    resolved = resolved_demo(settings, **of_profile)
    job = {key: value for key, value in asked.items() if key not in of_profile and key not in settings}
    assert said(*checks.check_profile(replace(resolved, job=replace(resolved.job, **job)), DAHU)) == expected


def test_a_site_without_accounting_is_not_asked_for_names():
    resolved = resolved_demo({"job.account": "abd", "job.qos": "fast"}, gpu_flag="none")
    assert said(*checks.check_profile(resolved, a_site(CPU))) == []
    only = a_site(partition("old", [(V100, 1)], Default="YES", State="DRAIN"))
    (found, _) = said(*checks.check_profile(resolved_demo(), only))
    assert found == "fail partition: old is DRAIN | choose another with --partition"


@pytest.mark.parametrize(
    ("profile", "device", "expected"),
    [
        ("local", None, "ok gpus: none here; ranks run on CPU"),
        ("local", "cpu", "ok gpus: none here; ranks run on CPU"),
        ("local", "h100-80g", "fail gpus: none here, but the profile is for h100-80g | see nvidia-smi"),
        ("local", "mi250x", "fail gpus: none here, but the profile is for mi250x | see amd-smi"),
        ("generic-slurm", "h100-80g", "ok gpus: none here; a login node needs none"),
    ],
)
def test_a_machine_without_the_gpus_of_its_profile_is_told(monkeypatch, profile, device, expected):
    monkeypatch.setenv("PATH", "")  # without nvidia-smi there are none
    assert said(*checks.check_gpus_here(resolved_demo(profile=profile, device=device))) == [expected]


def test_gpus_that_are_here_are_named_once_a_kind(monkeypatch):
    kinds = [{"name": "NVIDIA H200", "memory_gib": 139.8}] * 2 + [{"name": "NVIDIA T4", "memory_gib": 15.0}]
    monkeypatch.setattr(checks, "ask_gpus", lambda: ([*kinds, {"name": "NVIDIA GB10", "memory_gib": None}], ""))
    words = "ok gpus: 4 here: NVIDIA H200 139.8 GiB, NVIDIA T4 15.0 GiB, NVIDIA GB10"
    assert said(*checks.check_gpus_here(resolved_demo(profile="local"))) == [words]


@pytest.mark.parametrize(
    ("profile", "given", "over"),
    [
        ("local", {}, "lo"),
        ("generic-slurm", {}, "each node's interface to the first node"),
        ("local", {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
    ],
)
def test_the_network_is_what_gloo_and_nccl_will_use(profile, given, over):
    resolved = resolved_demo(profile=profile, environment=given)
    assert said(checks.check_network(resolved)) == [f"ok network: gloo over {over}, NCCL over what it chooses"]
    slingshot = resolved_demo(profile=profile, environment=given, fabric="slingshot 4x200G")
    assert said(checks.check_network(slingshot)) == [f"ok network: gloo over {over}, NCCL over hsn"]


def test_a_folder_that_no_node_sees_and_one_that_nobody_writes():
    places = {"data": Path("/dev/shm/none/yet"), "logs": Path("/proc/none")}
    hint = "set HPC_GPT_LOGS, HPC_GPT_DATA or HPC_GPT_STATE to a folder that you can write"
    cannot = f"fail logs: /proc/none cannot be written: No such file or directory | {hint}"
    own = (
        "warn data: /dev/shm/none/yet is on a tmpfs of this machine | no node sees it: choose a folder on a "
        "shared file system"
    )
    assert said(*checks.check_folders(places, shared=True)) == [own, cannot]
    assert said(*checks.check_folders(places, shared=False)) == [
        "ok data: /dev/shm/none/yet can be written (tmpfs)",
        cannot,
    ]
    assert not list(Path("/dev/shm").glob(".hpc-gpt-doctor.*"))


@pytest.mark.parametrize(
    ("ahead_s", "expected"),
    [
        (0.05, "ok clock: within 0.1 s of"),
        (1.5, "ok clock: within 1.5 s of"),
        (-2.5, "warn clock: within 2.5 s of"),
        (3.5, "warn clock: within 3.5 s of"),
        (60.5, "fail clock: within 60.5 s of"),
    ],
)
def test_a_clock_is_compared_with_the_file_servers(monkeypatch, tmp_path, ahead_s, expected):
    monkeypatch.setattr(checks.time, "time", lambda: 1000.0)
    monkeypatch.setattr(checks, "_write_in", lambda folder: 1000.0 + ahead_s)
    hint = " | is chronyd or ntpd running here and on the file server?" if not expected.startswith("ok") else ""
    words = f"{expected} the clock of the file system at {tmp_path}{hint}"
    assert said(*checks.check_clock(tmp_path / "not" / "yet")) == [words]


def test_a_check_that_cannot_be_made_is_a_result():
    def refuse(fault):
        raise fault

    assert said(*guarded("limits", lambda: refuse(ConfigError("two\n lines", "do this")))) == [
        "fail limits: two lines | do this"
    ]
    hint = "can you read and write there?"
    assert said(*guarded("clock", lambda: refuse(PermissionError(13, "Permission denied", "/x")))) == [
        f"fail clock: /x: Permission denied | {hint}"
    ]
    assert said(*guarded("clock", lambda: refuse(OSError(28, "No space")))) == [f"fail clock: clock: No space | {hint}"]


@pytest.mark.parametrize(
    ("device", "build", "words"),
    [
        ("mi250x", "hip: Optional[str] = '7.1.52802'", None),
        ("mi250x", "cuda: Optional[str] = '12.8'", "is a build for CUDA 12.8, and mi250x needs one for ROCm"),
        ("mi250x", "cuda: Optional[str] = None", "is a build for CPUs alone, and mi250x needs one for ROCm"),
        ("h100-80g", "hip: Optional[str] = '7.1'", "is a build for ROCm 7.1, and h100-80g needs one for CUDA"),
        ("h100-80g", "cuda = '13.0'\nhip: str | None = None", None),
        (None, "cuda: Optional[str] = None", None),
        ("mi250x", None, None),
    ],
)
def test_pytorch_is_a_build_for_the_device(tmp_path, device, build, words):
    """As it is in the jobs' Python, which does not import it."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "torch").mkdir()
    # sys.path of a virtual environment, without making one.
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nPYTHONPATH={venv} exec {sys.executable} -S "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    if build is not None:
        (venv / "torch" / "__init__.py").write_text("raise RuntimeError('no driver')\n")
        (venv / "torch" / "version.py").write_text(f"__version__ = '2.10.0'\ndebug = False\n{build}\n")
    profile = replace(load_profile("generic-slurm"), device=device, venv=str(venv))
    found = [check.words for check in checks.check_versions(profile, None)]
    assert found == ([] if words is None else [f"PyTorch 2.10.0 of {venv}/bin/python {words}"])


def test_weights_are_not_compared_without_torch(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert said(checks.check_init(resolved_demo())) == [
        "warn weights: not compared: no torch here | pip install 'hpc-gpt[train]'"
    ]
