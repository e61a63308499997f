"""hpc-gpt help: the engines as the rules have them."""

from __future__ import annotations

import json
from dataclasses import fields

from hpc_gpt.engines import OFFERS
from hpc_gpt.experiment import Engine
from tests.cli.command import hpc_gpt


def test_every_engine_is_listed_with_what_it_takes():
    shown = hpc_gpt("help", "engines").stdout
    assert "deepspeed-3d: tp x pp x dp; ZeRO 0, 1\n" in shown
    assert "ddp: dp\n" in shown
    listed = json.loads(hpc_gpt("help", "engines", "--json").stdout)
    assert [row["engine"] for row in listed["engines"]] == list(OFFERS)
    switches = {switch for row in listed["engines"] for switch in row["switches"]}
    assert switches | {"name", "zero_stage"} == {entry.name for entry in fields(Engine)}
