"""hpc-gpt help: the engines as the rules have them."""

import json
from dataclasses import fields

import pytest

from hpc_gpt.engines import engines
from hpc_gpt.settings.experiment import Engine
from tests.cli.command import error_of, hpc_gpt, in_process


def test_every_engine_is_listed_with_what_it_takes():
    shown = hpc_gpt("help", "engines").stdout
    assert "deepspeed-3d: tp x pp x dp; ZeRO 0, 1\n" in shown
    assert "ddp: dp\n" in shown
    listed = json.loads(hpc_gpt("help", "engines", "--json").stdout)
    assert [row["engine"] for row in listed["engines"]] == list(engines())
    switches = {switch for row in listed["engines"] for switch in row["switches"]}
    assert switches | {"name", "zero_stage"} == {entry.name for entry in fields(Engine)}


@pytest.mark.parametrize("words", [(), ("help",), ("profile",)])
def test_no_description_of_a_command_is_cut(words):
    usage, _, rest = in_process(*words, "--help").stdout.partition("\n")
    assert usage.endswith("COMMAND [ARGS]...")
    assert [line for line in rest.splitlines() if line.endswith("...")] == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("train",), "hpc-gpt help keys train"),
        (("[layout]",), "hpc-gpt help keys layout"),
        (("train.lr",), "hpc-gpt help keys train.lr"),
        (("trian",), "did you mean help keys train?"),
        (("keys", "trian"), "did you mean train"),
        (("enigne",), "did you mean engines"),
        (("run",), "use hpc-gpt submit"),
    ],
)
def test_a_table_of_an_experiment_leads_to_its_keys(words, hint):
    done = in_process("help", *words)
    assert done.code == 2
    assert hint in error_of(done)[1]
    if hint.startswith("hpc-gpt "):
        assert in_process(*hint.split()[1:]).code == 0
