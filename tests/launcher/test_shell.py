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
from hpc_gpt.launcher.shell import _contained


@pytest.mark.parametrize("mounts", [(), ("/scratch:/scratch", "/a b:/c")])
@pytest.mark.parametrize(("kind", "array"), [("apptainer", "python"), ("pyxis", "container")])
def test_the_container_is_that_of_the_ranks(tmp_path, kind, array, mounts):
    container = Container(kind, "/images/torch 2.sif", mounts)
    script = render_script(
        resolve(load_experiment("demo"), replace(load_profile("generic-slurm"), container=container))
    )
    (text,) = re.findall(rf"^  {array}=\(\n(.*?)^  \)", script, re.M | re.S)
    run = RunFolder(tmp_path)
    words = [word.replace("$HPC_GPT_RUN", str(run.path)) for word in shlex.split(text)]
    of_ranks = words[: words.index("env")] if "env" in words else words
    assert _contained(container, run, ["true"]) == [*of_ranks, "true"]


def test_without_a_container_the_words_stay(tmp_path):
    assert _contained(None, RunFolder(tmp_path), ["true"]) == ["true"]
