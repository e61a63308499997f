"""Grids on the command line: the rows that they make, their names, and what is refused."""

import re
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment_file import load_experiment, read_experiment
from hpc_gpt.core.settings.grid import parse_grid, with_grid


def rows(*texts: str, experiment: str = "demo", row: str | None = None):
    return with_grid(read_experiment(experiment), parse_grid(texts), row).rows


def test_rows_are_the_product_in_order_named_by_their_values():
    made = rows("train.lr=1e-4,3e-4", "layout.tp=2,4,8")
    assert [row.name for row in made] == [f"lr{lr}-tp{tp}" for lr in ("1e-4", "3e-4") for tp in (2, 4, 8)]
    assert made[4].overrides == {"train": {"lr": 3e-4}, "layout": {"tp": 4}}


def test_values_are_read_as_set_reads_them_inner_commas_kept():
    [axis] = parse_grid(["train.save_at=[1, 2],[],[3]"])
    assert [value for _, value in axis.values] == [[1, 2], [], [3]]
    [axis] = parse_grid([r"""job.comment="a,\"b",'c,d',e f,1"""])
    assert [value for _, value in axis.values] == ['a,"b', "c,d", "e f", "1"]
    [axis] = parse_grid(["train.deterministic=true,false"])
    assert [value for _, value in axis.values] == [True, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.lr=1,,2", "a value is empty"),
        ("train.lr", "is not KEY=VALUE,VALUE"),
        ("train.lr=1e-4,0.0001", "0.0001 is given twice"),
        ("layout.tp=2,1.5", "should be a whole number, not 1.5"),
        ("train.dtype=fp32,fp33", "fp33"),
        ("name=a,b", "the name of a file cannot vary"),
        ("rows=1,2", "rows"),
    ],
)
def test_a_fault_is_one_line_and_a_hint(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        parse_grid([text])
    assert "\n" not in str(refused.value)
    assert refused.value.hint
    assert f"--grid {text}" in str(refused.value)


def test_a_key_has_one_grid_and_rows_are_counted_before_made():
    with pytest.raises(ConfigError, match=r"train\.lr has a --grid already"):
        parse_grid(["train.lr=1,2", "train.lr=3"])
    many = ",".join(map(str, range(1, 10001)))
    with pytest.raises(ConfigError, match=r"00,000 rows \(10000 of train.seed x 10000 of train.steps\)") as refused:
        parse_grid([f"train.seed={many}", f"train.steps={many}"])
    assert refused.value.hint == "--max-rows 100000000"
    assert len(parse_grid(["train.seed=1,2,3"], most=3)[0].values) == 3


def test_keys_that_end_alike_are_named_whole_in_folder_names():
    [row] = rows("train.lr=1e-4", "engine.name=ddp", "job.name=x")[:1]
    assert row.name == "lr1e-4-engine.nameddp-job.namex"
    names = [row.name for row in rows('job.comment="../a b","..|a b","é\U0001f600",' + "x" * 300)]
    assert len({name.lower() for name in names}) == 4
    assert names[2] == "commenté\U0001f600"
    for name in (*names[:2], names[3]):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", name)
    assert [row.name for row in rows("job.comment=实验一,实验二")] == ["comment实验一", "comment实验二"]
    assert len({row.name for row in rows("job.comment=" + "实" * 99 + "一," + "实" * 99 + "二")}) == 2
    assert len({row.name.lower() for row in rows("job.comment=a,A")}) == 2, "a disk may not tell them apart"


def test_over_a_row_of_a_file_that_has_rows(tmp_path: Path):
    file = tmp_path / "table.toml"
    file.write_text('[model]\npreset = "gpt2"\n[layout]\nnodes = 2\n[rows]\n"a" = { train.lr = 0.5 }\n"b" = {}\n')
    with pytest.raises(ConfigError, match=r"has \[rows\], and --grid varies one of them") as refused:
        rows("layout.gpus=1,2", experiment=str(file))
    assert refused.value.hint == "--row NAME: a, b"
    made = with_grid(read_experiment(str(file)), parse_grid(["layout.gpus=1,2"]), "a")
    assert (made.name, [row.name for row in made.rows]) == ("table-a", ["gpus1", "gpus2"])
    found = load_experiment(made, row="gpus2")
    assert (found.name, found.train.lr, found.layout.gpus, found.layout.nodes) == ("table-a-gpus2", 0.5, 2, None)
