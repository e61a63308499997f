"""Each kind of requeue of slurm/requeue.py has the macros of its name in templates/slurm/requeue."""

import re
from typing import get_args

import pytest

from hpc_gpt.core.settings.cluster import Chain
from hpc_gpt.core.slurm.requeue import REQUEUES
from tests.conftest import REPOSITORY

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
