"""The command that trains with a row of a race: its row by name or by its keys, with all that was requested."""

import json
import re
import shlex
from typing import Any

import pytest

from hpc_gpt.launcher.race import PreparedRace, PreparedRow, _submit_line
from hpc_gpt.launcher.request import Request
from tests.cli.command import in_process

FILE = """
name = "tiny"
model = { hidden = 32, layers = 4, heads = 4, vocab = 256, seq = 32 }
data.source = "random"
engine.name = "ddp"
layout = { gpus = 1, micro_batch = 2, global_batch = 8 }
train = { dtype = "fp32", lr = 1e-3 }
"""
ROWS = """
[rows]
"b" = { layout.micro_batch = 1 }
"c" = { layout.micro_batch = 4 }
"""


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (ROWS, ()),
        (ROWS, ("--grid", "train.eval_every=10,20", "--row", "c")),
        ("", ("--grid", "layout.micro_batch=1,2", "--set", "train.seed=7")),
        ("", ("--engine", "deepspeed-3d", "--gpus", "4", "--cluster", "h100-80g-8", "--time", "1:00:00", "--top", "3")),
        (None, ("--model", "gpt2", "--gpus", "8", "--cluster", "h100-80g-8", "--top", "2")),
    ],
    ids=["rows", "a grid of a row", "a grid", "planned", "planned without a file"],
)
def test_it_trains_as_the_row_was_measured(rows: str | None, options: tuple[str, ...], tmp_path, monkeypatch) -> None:
    (file := tmp_path / "my file.toml").write_text(FILE + (rows or ""))
    prepared: Any = []
    monkeypatch.setattr("hpc_gpt.cli.racing.check_race", lambda race, *_, **__: prepared.append(race))
    words = [] if rows is None else [str(file)]
    in_process("submit", *words, "--race", "--dry-run", "--force", *options, code=0)
    (race,) = prepared
    assert len(race.rows) > 1
    for row in race.rows:
        words = shlex.split(row.submit)
        assert words[:2] == ["hpc-gpt", "submit"]
        script = in_process("render", *words[2:], code=0).stdout
        text = re.search(r"<<'HPC_GPT_RESOLVED'\n(.*?)\nHPC_GPT_RESOLVED\n", script, re.DOTALL)[1]
        trains, measured = json.loads(text), json.loads(row.visit.resolved.to_json())
        for key in ("model", "layout", "batch", "engine", "data"):
            assert trains[key] == measured[key], (key, row.submit)
        assert "job.time" not in row.submit
        assert trains["train"].get("seed") == (7 if "train.seed=7" in options else None)


def test_its_words_are_quoted_and_read_back() -> None:
    request = Request("a b.toml", "local", None, {}, given={"name": "it's", "command.values.size": "3"})
    row = PreparedRow("n", {"train.lr": 1e-3, "engine.zero_stage": None, "data.mix": {"a": {"weight": 1}}})
    assert _submit_line(request, row, by_name=False) == (
        """hpc-gpt submit 'a b.toml' --cluster local --set 'name=it'"'"'s' --set 'command.values.size="3"' """
        "--set train.lr=0.001 --set engine.zero_stage= --set 'data.mix={a = {weight = 1}}'"
    )


def test_every_round_begins_with_another_row() -> None:
    rows = [PreparedRow(name, {}, None if name == "d" else object()) for name in "abcd"]
    visits = [(number, row.name) for number, row, _ in PreparedRace("x", rows, 4, []).visits]
    assert visits == [(number, name) for number, names in enumerate(("abc", "bca", "cab", "abc")) for name in names]
