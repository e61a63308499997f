"""Rendering: what is refused before it, with its key; how a broken template is reported; whose words win;
the script of a job that holds runs; and what each kind of requeue brings."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError, RenderError
from hpc_gpt.core.settings.cluster import Chain, Container, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.directives import directives_but_name
from hpc_gpt.core.slurm.requeue import REQUEUES
from hpc_gpt.launcher.render import render_script, turns_script
from tests import examples
from tests.conftest import REPOSITORY
from tests.programs import put, ran


def resolved_demo(overrides=None, profile="generic-slurm", **changes) -> Resolved:
    return resolve(load_experiment("demo", overrides or {}), replace(load_profile(profile), **changes))


@pytest.mark.parametrize(
    ("key", "bad", "word"),
    [
        *((key, "a\nb", "newline") for key in ("account", "partition", "qos", "constraint", "reservation", "nodelist",
                                               "exclude", "comment", "dependency", "mem", "name")),
        ("comment", "a\0b", "NUL"),
        ("comment", "a\x1bb", "control character"),
    ],
)  # fmt: skip
def test_what_a_directive_cannot_carry_is_refused_by_key(key, bad, word):
    with pytest.raises(ConfigError, match=rf"job\.{key} holds .*{word}"):
        render_script(resolved_demo({f"job.{key}": bad}))


def test_the_scripts_here_document_is_the_resolved_experiment():
    resolved = resolved_demo(
        {"job.comment": "HPC_GPT_RESOLVED", "data.source": "tokens", "data.path": "/a b/'c'\n$(reboot)"}, "local"
    )
    text = render_script(resolved)
    carried = text.split("<<'HPC_GPT_RESOLVED'", 1)[1].split("\n", 1)[1].split("\nHPC_GPT_RESOLVED\n", 1)[0]
    assert Resolved.from_json(carried) == resolved


@hypothesis.settings(max_examples=examples(100))
@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_any_comment_is_refused_or_stays_one_line(comment):
    try:
        script = render_script(resolved_demo({"job.comment": comment}))
    except ConfigError as fault:
        assert "job.comment" in str(fault)
        return
    head = script.split("set -o pipefail")[0]
    assert sum(line.startswith("#SBATCH --comment=") for line in head.split("\n")) == 1
    assert all(line.startswith("#") or not line for line in head.split("\n"))


BASE = '{% extends "base.sh.j2" %}'
# What a template of the user's own lacks or breaks, and where it is said to be.
FAULTS = {
    "#!/bin/bash\necho hi\n": r"mine\.sh\.j2 does not extend base\.sh\.j2",
    '{% extends "mine.sh.j2" %}': r"mine\.sh\.j2 does not extend base\.sh\.j2",
    '{% extends "between.sh.j2" %}': r"mine\.sh\.j2 does not extend base\.sh\.j2",
    '{% extends "bsae.sh.j2" %}': r"bsae\.sh\.j2",
    BASE + "\n{% block launch %}\n{{ nosuch }}\n{% endblock %}\n": r"mine\.sh\.j2:3: 'nosuch' is undefined",
    BASE + "{% block launch %}\n{{ job.nosuch }}\n{% endblock %}": r"mine\.sh\.j2:2: .*no attribute 'nosuch'",
    "\n{% block %}\n": r"mine\.sh\.j2:2: ",
    BASE + "{% block launch %}{{ 1 // 0 }}{% endblock %}": r"mine\.sh\.j2:1: ",
}


@pytest.mark.parametrize(("text", "words"), FAULTS.items())
def test_a_fault_of_an_own_template_is_named_with_its_line(tmp_path, text, words):
    (tmp_path / "between.sh.j2").write_text("#!/bin/bash\n")
    (path := tmp_path / "mine.sh.j2").write_text(text)
    with pytest.raises(RenderError, match=words):
        render_script(resolved_demo(), path)


def test_an_own_template_replaces_a_block_also_through_another(tmp_path):
    """It may have the name of a shipped one."""
    (tmp_path / "between.sh.j2").write_text(BASE + "{% block launch %}mine{% endblock %}")
    (own := tmp_path / "deepspeed-3d.sh.j2").write_text('{% extends "between.sh.j2" %}')
    assert "mine" in render_script(resolved_demo(), own).split()
    own.write_text(BASE + "{% block environment %}{{ super() }}export X={{ slug | quote }}\n{% endblock %}")
    script = render_script(resolved_demo(), own)
    assert "export X=demo\n" in script
    assert "srun --export=ALL" in script
    with pytest.raises(RenderError, match=r"no template '.*nosuch\.sh\.j2'"):
        render_script(resolved_demo(), tmp_path / "nosuch.sh.j2")


def test_a_chosen_clusters_next_jobs_go_where_the_first_went():
    text = render_script(resolved_demo(chain="singleton", sbatch=("--clusters=near,far",)))
    assert text.count('"--clusters=$SLURM_CLUSTER_NAME"') == 2
    assert '"slurm_cluster": "%s"' in text
    assert "slurm_cluster" not in render_script(resolved_demo())


def test_the_script_of_a_job_that_holds_runs_is_sound(tmp_path: Path) -> None:
    scripts = [render_script(resolved_demo())] * 2
    text = turns_script("demo-race", scripts)
    (script := tmp_path / "turns.sh").write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    assert directives_but_name(text) == directives_but_name(scripts[0])


TEMPLATES = REPOSITORY / "templates" / "slurm" / "requeue"
DEFINED = re.compile(r"\{% (?:macro|set) (\w+)")


def test_a_profile_may_name_each_requeue_that_is_there():
    assert tuple(REQUEUES) == get_args(Chain)


@pytest.mark.parametrize("name", REQUEUES)
def test_each_requeue_defines_what_the_scripts_take(name):
    texts = [file.read_text() for file in TEMPLATES.parents[1].rglob("*.j2")]
    taken = {each for text in texts for each in re.findall(r"\brequeue\.(\w+)", text)}
    assert set(DEFINED.findall((TEMPLATES / f"{name}.sh.j2").read_text())) == taken


def test_a_run_can_continue_if_and_only_if_its_script_can():
    for name, requeue in REQUEUES.items():
        continues = "{% set continues = true %}" in (TEMPLATES / f"{name}.sh.j2").read_text()
        assert continues == (requeue.flag == "--requeue")


@pytest.mark.parametrize(("there", "started"), [("singularity", "singularity"), ("apptainer singularity", "apptainer")])
def test_a_node_takes_the_runtime_that_it_has(tmp_path: Path, there: str, started: str) -> None:
    for name in there.split():
        put(tmp_path / name, '#!/bin/bash\necho "${0##*/}" "$@"\n')
    profile = replace(load_profile("generic-slurm"), container=Container("apptainer", "a.sif"), device="mi300x")
    script = render_script(resolve(load_experiment("demo"), profile))
    (of_ranks,) = re.findall(r"^  runtime=.*?^  \)", script, re.M | re.S)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HPC_GPT_RUN": "/r", "HPC_GPT_PYTHON": "py"}
    said = ran("bash", "-c", f'{of_ranks}\n"${{python[@]}}" true', env=environment, code=0).stdout
    assert said.startswith(f"{started} exec --rocm --bind ")
