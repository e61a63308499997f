"""What a machine lacks is said before a run starts there."""

import random
from dataclasses import replace

import pytest

from hpc_gpt.core.errors import ConfigError, check_package
from hpc_gpt.core.settings.cluster import Container, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, ScriptFacts
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.services import Notify
from hpc_gpt.launcher.submission import check_inputs, check_requirements, check_sizes


def settle(**overrides) -> Resolved:
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    settings |= {"layout.tp": 1, "layout.pp": 1}
    return resolve(load_experiment("demo", settings), load_profile("local"))


def test_fp16_on_a_cpu_is_refused_where_deepspeed_trains():
    for name in ("deepspeed-3d", "deepspeed-zero"):
        resolved = settle(engine__name=name, train__dtype="fp16")
        check_requirements(resolved, has_gpu=True)
        with pytest.raises(ConfigError, match="DeepSpeed does not train in fp16 on a CPU") as refusal:
            check_requirements(resolved, has_gpu=False)
        assert "ddp or fsdp" in refusal.value.hint
    check_requirements(settle(engine__name="ddp", train__dtype="fp16"), has_gpu=False)


def test_an_engines_own_package_is_asked_for(monkeypatch):
    resolved = settle(engine__name="hf-deepspeed")
    check_requirements(resolved, has_gpu=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="engine hf-deepspeed needs torch"):
        check_requirements(resolved, has_gpu=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else name)
    check_requirements(settle(engine__name="ddp"), has_gpu=False)
    with pytest.raises(ConfigError, match="engine deepspeed-zero needs deepspeed"):
        check_requirements(settle(engine__name="deepspeed-zero"), has_gpu=False)


@pytest.mark.parametrize(
    ("profile", "variable", "refused"),
    [({}, "", True), ({"venv": "/env"}, "", False), ({"python": "python3"}, "", False),
     ({"modules": ("torch",)}, "", False), ({"container": Container("pyxis", "/i.sqsh")}, "", False),
     ({}, "/other/python", False)],
)  # fmt: skip
def test_a_job_of_this_python_needs_the_packages_here(profile, variable, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("HPC_GPT_PYTHON", variable)
    cluster = replace(load_profile("generic-slurm"), **profile)
    resolved = resolve(load_experiment("demo", {"data.source": "random"}), cluster)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else name)
    check_inputs(resolved, None, has_gpu=False)  # of a dry run
    if not refused:
        check_inputs(resolved, None, has_gpu=False, make=True)
        return
    with pytest.raises(ConfigError, match="needs torch, which is not installed") as refusal:
        check_inputs(resolved, None, has_gpu=False, make=True)
    assert refusal.value.hint == "pip install 'hpc-gpt[train]'"


def test_a_missing_package_is_one_line_with_the_command():
    check_package("numpy", "engine hf-deepspeed")
    with pytest.raises(ConfigError, match="engine hf-deepspeed needs no_such_package") as refusal:
        check_package("no_such_package", "engine hf-deepspeed")
    assert refusal.value.hint == "pip install 'hpc-gpt[train]'"


LONG = "x" * (128 << 10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command.run": f"echo {LONG}"}, "command.run has 131,078 bytes, and no argument"),
        ({"command.run": ["echo", "a", LONG]}, "command.run has 131,073 bytes, and no argument"),
        (
            {"command.run": "true", "notify.command": ["echo", LONG], "notify.on": ["ended"]},
            "notify.command has 131,073 bytes",
        ),
        ({"command.run": ["echo", *["x" * 1000] * 4000]}, "environment and commands have "),
        ({"command.run": ["echo", LONG[2:]]}, ""),
    ],
)
def test_what_no_process_takes_is_refused_with_its_size(settings, said):
    run = settings["command.run"]
    resolved = replace(settle(), command=Command(run=run if isinstance(run, str) else tuple(run)))
    if "notify.command" in settings:
        resolved = replace(resolved, notify=Notify(settings["notify.command"], ("ended",)))
    if not said:
        check_sizes(resolved)
        return
    with pytest.raises(ConfigError, match=said):
        check_sizes(resolved)


def test_an_environment_that_no_variable_can_carry_is_refused(monkeypatch):
    resolved = settle()
    check_sizes(replace(resolved, cluster=replace(resolved.cluster, environment={"A": "x" * 1000})))
    with pytest.raises(ConfigError, match="variable A has 131,075 bytes"):
        check_sizes(replace(resolved, cluster=replace(resolved.cluster, environment={"A": LONG})))
    for number in range(2):
        monkeypatch.setenv(f"NOISE_{number}", random.Random(number).randbytes(60_000).hex())
    check_sizes(resolved)
    with pytest.raises(ConfigError, match="the environment, packed for the script, has "):
        check_sizes(replace(resolved, script=ScriptFacts("0" * 16)))
