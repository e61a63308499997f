"""A figure has one heading, one number of digits and one side, whichever table it is in."""

from dataclasses import replace
from typing import Any

from hpc_gpt.core.columns import column, filled, grid, look_up, peak
from hpc_gpt.core.format import show_digits
from hpc_gpt.core.runs.record import FIGURES, RECORD_KEYS, Record

RECORD = Record(gpus=8, params=123_551_232, step_s=0.4567, tokens_per_s=12_345.6, mfu=0.4321, tflops_seed=12.34)


def test_every_figure_is_of_a_record_and_called_by_its_key() -> None:
    for key, figure in FIGURES.items():
        assert figure.keys[0] == key
        assert set(figure.keys) <= set(RECORD_KEYS)


def test_a_grid_has_its_columns_in_order_without_empty_ones() -> None:
    columns = [column("a", "a", right=False), column("b", "b", show_digits), column("c", "c", optional=True)]
    rows: list[dict[str, Any]] = [{"a": "x", "b": 1.2345, "c": None}, {"a": "y", "b": None, "c": None}]
    assert grid(filled(columns, rows), rows).aligned() == "a     b\nx  1.23\ny     -\n"
    assert [each.heading for each in filled([replace(columns[2], optional=False)], rows)] == ["c"]


def test_a_dot_reaches_into_a_value() -> None:
    record = replace(RECORD, settings={"engine": {"name": "ddp"}})
    assert look_up(record, "settings.engine.name") == "ddp"
    assert look_up(record, "settings.engine.name.more") is None
    assert peak([None, 2.0, 3.0]) == 3.0
    assert peak(None) is peak([]) is peak([None]) is None
