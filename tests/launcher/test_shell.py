"""The words of `shell`: the container that it opens is the one that the script starts the ranks in."""

import re
import shlex
from dataclasses import replace

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import Container, load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.shell import _RUNTIME, _contained
from tests.programs import put, ran


@pytest.mark.parametrize("mounts", [(), ("/scratch:/scratch", "/a b:/c")])
@pytest.mark.parametrize(
    ("kind", "array", "device"),
    [("apptainer", "python", None), ("apptainer", "python", "mi250x"), ("pyxis", "container", "h200"),
     ("environment", "container", None)],
)  # fmt: skip
def test_the_container_is_that_of_the_ranks(tmp_path, kind, array, device, mounts):
    container = Container(kind, "/images/torch 2.sif", mounts if kind != "environment" else ())
    profile = replace(load_profile("generic-slurm"), container=container, device=device)
    script = render_script(resolve(load_experiment("demo"), profile))
    (text,) = re.findall(rf"^  {array}=\(\n(.*?)^  \)", script, re.M | re.S)
    run = RunFolder(tmp_path)
    words = [word.replace("$HPC_GPT_RUN", str(run.path)) for word in shlex.split(text)]
    of_ranks = words[: words.index("env")] if "env" in words else words
    if kind == "apptainer":
        of_ranks[:1] = ["bash", "-c", _RUNTIME, "hpc-gpt"]
        assert of_ranks[4:6] == ["exec", "--rocm" if device else "--nv"]
    assert _contained(profile, run, ["true"]) == [*of_ranks, "true"]


@pytest.mark.parametrize(("there", "started"), [("singularity", "singularity"), ("apptainer singularity", "apptainer")])
def test_a_node_takes_the_runtime_that_it_has(tmp_path, there, started):
    """By `shell`, and by the script."""
    for name in there.split():
        put(tmp_path / name, '#!/bin/bash\necho "${0##*/}" "$@"\n')
    profile = replace(load_profile("generic-slurm"), container=Container("apptainer", "a.sif"), device="mi300x")
    script = render_script(resolve(load_experiment("demo"), profile))
    (of_ranks,) = re.findall(r"^  runtime=.*?^  \)", script, re.M | re.S)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HPC_GPT_RUN": "/r", "HPC_GPT_PYTHON": "py"}
    for line in (
        _contained(profile, RunFolder(tmp_path / "r"), ["true"]),
        ["bash", "-c", f'{of_ranks}\n"${{python[@]}}" true'],
    ):
        assert ran(*line, env=environment, code=0).stdout.startswith(f"{started} exec --rocm --bind ")


def test_without_a_container_the_words_stay(tmp_path):
    assert _contained(load_profile("generic-slurm"), RunFolder(tmp_path), ["true"]) == ["true"]
