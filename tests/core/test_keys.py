"""Every key that a user writes or reads explains itself, and help, completion and JSON say it."""

import json

import pytest

from hpc_gpt.core.keys import keys_of, names_of
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Experiment
from tests.cli.command import in_process

TABLES = (Experiment, ClusterProfile, Record)


@pytest.mark.parametrize("table", TABLES)
def test_each_key_has_its_meaning_in_one_line(table):
    found = keys_of(table)
    assert [key.name for key in found] == names_of(table)
    assert [key.name for key in found if not (key.means.endswith(".") and "\n" not in key.means)] == []
    assert [key.name for key in found if key.means[0].islower()] == []
    assert len({key.means for key in found}) >= 0.95 * len(found)


@pytest.mark.parametrize(("topic", "table"), [("keys", Experiment), ("profile", ClusterProfile), ("record", Record)])
def test_help_prints_each(topic, table):
    said = in_process("help", topic).stdout
    for key in keys_of(table):
        assert key.name in said
        assert key.means in said
    if topic != "record":
        listed = json.loads(in_process("help", topic, "--json").stdout)["keys"]
        assert [(row["key"], row["means"]) for row in listed] == [(key.name, key.means) for key in keys_of(table)]


def test_help_of_one_table():
    said = in_process("help", "keys", "layout").stdout.splitlines()
    assert {line.partition(".")[0] for line in said if not line.startswith(" ")} == {"layout"}
    assert "Tensor parallel size" in in_process("help", "keys", "layout.tp").stdout
