"""hpc-gpt help: the engines as the rules have them."""

import json
from dataclasses import fields

import pytest

from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.experiment import Engine
from tests.cli.command import hpc_gpt, in_process


def test_every_engine_is_listed_with_what_it_takes():
    shown = hpc_gpt("help", "engines").stdout
    assert "deepspeed-3d: tp x pp x cp x dp; ZeRO 0, 1\n" in shown
    assert "ddp: cp x dp\n" in shown
    assert "hf-deepspeed: dp; ZeRO" in shown
    listed = json.loads(hpc_gpt("help", "engines", "--json").stdout)
    assert [row["engine"] for row in listed["engines"]] == list(engines())
    switches = {switch for row in listed["engines"] for switch in row["switches"]}
    assert switches | {"name", "zero_stage"} == {entry.name for entry in fields(Engine)}


@pytest.mark.parametrize("words", [(), ("help",), ("profile",)])
def test_no_description_of_a_command_is_cut(words):
    usage, _, rest = in_process(*words, "--help").stdout.partition("\n")
    assert usage.endswith("COMMAND [ARGS]...")
    assert [line for line in rest.splitlines() if line.endswith("...")] == []


@pytest.mark.parametrize("word", ["train.lr", "[train]", "train", "model.hidden"])
def test_a_key_or_a_table_is_a_topic(word):
    shown = in_process("help", word, code=0).stdout
    assert shown == in_process("help", "keys", word).stdout
    assert "Learning rate after the warm-up" in shown or word == "model.hidden"
