"""Rendering: what is refused before it, with its key; how a broken template is reported; whose words win;
the loop of a race's script; and what each kind of requeue brings."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError, RenderError
from hpc_gpt.core.settings.cluster import Chain, ClusterProfile, load_profile
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.core.slurm.requeue import REQUEUES
from hpc_gpt.launcher.render import render_script
from tests.conftest import REPOSITORY


def resolved_demo(overrides=None, profile="generic-slurm", **changes) -> Resolved:
    return resolve(load_experiment("demo", overrides or {}), replace(load_profile(profile), **changes))


@pytest.mark.parametrize("key", ["account", "partition", "qos", "constraint", "reservation", "nodelist", "exclude",
                                 "comment", "dependency", "mem", "name"])  # fmt: skip
@pytest.mark.parametrize(("bad", "word"), [("a\nb", "newline"), ("a\0b", "NUL"), ("a\x1bb", "control character")])
def test_what_a_directive_cannot_carry_is_refused_by_key(key, bad, word):
    with pytest.raises(ConfigError, match=rf"job\.{key} holds .*{word}"):
        render_script(resolved_demo({f"job.{key}": bad}))


def test_an_experiments_name_counts_as_the_jobs():
    with pytest.raises(ConfigError, match=r"job\.name"):
        render_script(resolved_demo({"name": "two\nlines"}))


def test_gpus_are_never_asked_for_by_task():
    for flag, line in (("gres", "#SBATCH --gres=gpu:a100:4\n"), ("gpus-per-node", "#SBATCH --gpus-per-node=a100:4\n")):
        script = render_script(resolved_demo(gpu_flag=flag, gpu_type="a100"))
        assert line in script
        assert "#SBATCH --ntasks-per-node=4\n" in script
        assert "gpus-per-task" not in script
    assert "gpu:" not in render_script(resolved_demo(gpu_flag="none")).split("set -o pipefail")[0]


def test_no_directive_points_into_a_folder():
    script = render_script(resolved_demo({"job.name": "x; rm -rf ~"}))
    assert [line for line in script.splitlines() if line.startswith("#SBATCH --output")] == [
        "#SBATCH --output=%x-%j.out"
    ]


def test_the_signal_comes_before_the_walltime():
    assert "#SBATCH --signal=USR2@120\n" in render_script(resolved_demo({"job.time": "1:00:00"}))
    assert "--signal" not in render_script(resolved_demo({"job.time": "unlimited"}))
    assert "--signal" in render_script(resolved_demo({"job.time": None})), "the partition's limit holds"


def test_the_scripts_here_document_is_the_resolved_experiment():
    resolved = resolved_demo(
        {"job.comment": "HPC_GPT_RESOLVED", "data.source": "tokens", "data.path": "/a b/'c'\n$(reboot)"}, "local"
    )
    text = render_script(resolved)
    carried = text.split("<<'HPC_GPT_RESOLVED'", 1)[1].split("\n", 1)[1].split("\nHPC_GPT_RESOLVED\n", 1)[0]
    assert Resolved.from_json(carried) == resolved


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


class TestOwnTemplate:
    def render(self, tmp_path, text, name="mine.sh.j2"):
        (path := tmp_path / name).write_text(text)
        return render_script(resolved_demo(), path)

    def test_a_child_replaces_a_block_and_keeps_the_rest(self, tmp_path):
        script = self.render(
            tmp_path,
            '{% extends "base.sh.j2" %}{% block environment %}{{ super() }}export X={{ slug | quote }}\n{% endblock %}',
        )
        assert "export X=demo\n" in script
        assert "srun --export=ALL" in script

    def test_it_may_have_the_name_of_a_shipped_one(self, tmp_path):
        own = '{% extends "base.sh.j2" %}{% block launch %}mine{% endblock %}'
        assert "mine" in self.render(tmp_path, own, "deepspeed-3d.sh.j2").split()

    def test_what_extends_another_is_refused(self, tmp_path):
        (tmp_path / "between.sh.j2").write_text('{% extends "base.sh.j2" %}')
        assert "srun --export=ALL" in self.render(tmp_path, '{% extends "between.sh.j2" %}')
        (tmp_path / "between.sh.j2").write_text("#!/bin/bash\n")
        for text in ("#!/bin/bash\necho hi\n", '{% extends "between.sh.j2" %}', '{% extends "mine.sh.j2" %}'):
            with pytest.raises(RenderError, match=r"mine\.sh\.j2 does not extend base\.sh\.j2"):
                self.render(tmp_path, text)

    def test_a_missing_variable_is_named_with_file_and_line(self, tmp_path):
        with pytest.raises(RenderError, match=r"mine\.sh\.j2:3: 'nosuch' is undefined"):
            self.render(tmp_path, '{% extends "base.sh.j2" %}\n{% block launch %}\n{{ nosuch }}\n{% endblock %}\n')

    def test_a_missing_attribute_too(self, tmp_path):
        with pytest.raises(RenderError, match=r"mine\.sh\.j2:2: .*no attribute 'nosuch'"):
            self.render(tmp_path, '{% extends "base.sh.j2" %}{% block launch %}\n{{ job.nosuch }}\n{% endblock %}')

    def test_a_syntax_error_is_named_with_file_and_line(self, tmp_path):
        with pytest.raises(RenderError, match=r"mine\.sh\.j2:2: "):
            self.render(tmp_path, "\n{% block %}\n")

    def test_a_missing_file_and_a_missing_parent_are_named(self, tmp_path):
        with pytest.raises(RenderError, match=r"no template '.*nosuch\.sh\.j2'"):
            render_script(resolved_demo(), tmp_path / "nosuch.sh.j2")
        with pytest.raises(RenderError, match=r"bsae\.sh\.j2"):
            self.render(tmp_path, '{% extends "bsae.sh.j2" %}')

    def test_a_fault_of_python_in_it_is_no_traceback(self, tmp_path):
        with pytest.raises(RenderError, match=r"mine\.sh\.j2:1: "):
            self.render(tmp_path, '{% extends "base.sh.j2" %}{% block launch %}{{ 1 // 0 }}{% endblock %}')


def test_modules_load_without_a_purge_if_the_profile_says_so():
    modules = ("cuda/12",)
    purged = resolved_demo(modules=modules)
    # Settings of profiles without the key are the same as ever.
    assert "purge_modules" not in purged.to_json()
    assert Resolved.from_json(purged.to_json()).cluster.purge_modules
    assert not Resolved.from_json(resolved_demo(purge_modules=False).to_json()).cluster.purge_modules


def test_a_chosen_clusters_next_jobs_go_where_the_first_went():
    text = render_script(resolved_demo(chain="singleton", sbatch=("--clusters=near,far",)))
    assert text.count('"--clusters=$SLURM_CLUSTER_NAME"') == 2
    assert '"slurm_cluster": "%s"' in text
    assert "slurm_cluster" not in render_script(resolved_demo())


EXPERIMENT = Experiment(
    model=Model("gpt2"), engine=Engine("ddp"), layout=LayoutRequest(gpus=4, micro_batch=1, micro_batches=1)
)


@pytest.mark.parametrize("chain", ["requeue", "singleton", "none"])
def test_it_starts_its_ranks_once_a_visit_by_one_line(tmp_path: Path, chain: str) -> None:
    run = resolve(EXPERIMENT, ClusterProfile("test", gpus_per_node=4, chain=chain))  # type: ignore[arg-type]
    race = replace(run, race=6)
    text = render_script(race)
    (script := tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    # It is in the text of a race alone, and in no hash.
    assert "visit" not in render_script(run)
    assert '"race"' not in run.to_json()
    assert config_hash(race) == config_hash(run)
    assert Resolved.from_json(race.to_json()).race == 6


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
