"""A fork's line has one more field, or its fields in another order: it is still its program's, and says the same."""

import itertools

import pytest

from hpc_gpt.reader.logs.matches import find
from tests.reader.reading import read_lines

# (dialect, what comes first, what separates the fields, the fields, what comes last)
LINES = (
    ("nanogpt", "iter 1640: ", ", ", ("loss 4.7187", "time 571.27ms", "mfu 34.78%"), ""),
    ("nanogpt", "510 | ", " | ", ("loss 5.0859", "lr 4.221264e-05", "8942.42ms", "mfu 0.88%"), ""),
    ("litgpt", "iter 100 step 25: ", ", ", ("loss 2.4384", "iter time: 104.52ms (optimizer.step)"), ""),
    ("litgpt", "iter 100: ", ", ", ("loss 1.5082", "time: 104.52ms", "speed: 4899.2 toks/s/device"), ""),
    ("litgpt", "Epoch 1 | iter 16 step 2 | ", " | ", ("loss train: 10.186, val: 9.75", "iter time: 370.69 ms"), " |"),
    ("modded_nanogpt", "step:11/5100 ", " ", ("train_loss:9.8399", "train_time:1523ms", "step_avg:152.3ms"), ""),
    ("modded_nanogpt_evals", "step:25/30 ", " ", ("val_loss:4.0999", "train_time:119.75s", "step_avg:479.02ms"), ""),
    ("colab", "batches:220 | ", " | ", ("loss: 7.041/6.790", "tok-seen: 7,208,960", "tok/sec: 66,759.81"), " | a: 1"),
    ("tinygrad", "    3 ", ", ", ("4969.20 ms run", "77.45 ms python", "0.93 loss", "0.000571 LR"), ", 3.1 GFLOPS"),
    ("tinygrad", "    3 ", ", ", ("7.11 s run", "11.9803 loss", "0.000002 LR", "1278.69 GB used"), ", 3.1 GFLOPS"),
    ("tinygrad", "", ", ", ("10.1579 loss", "0.000025 LR", "145.30 GB used", "12.05 s"), ""),
    ("nanochat", "step 00175/21400 (0.05%) | ", " | ", ("loss: 9.22", "dt: 319.18ms", "tok/sec: 1,551,117"), " | a: 1"),
)
UNKNOWN = {("tinygrad", ", "): "7.5 zeta", " | ": "zeta: 7", " ": "zeta:7", ", ": "zeta 7"}


@pytest.mark.parametrize(("dialect", "first", "between", "fields", "last"), LINES)
def test_fields_in_any_order_with_others_between(dialect, first, between, fields, last):
    def figures(chosen: tuple[str, ...]) -> dict[str, float]:
        line = first + between.join(chosen) + last
        assert {each.dialect.name for _, each in find(line) if each.pattern.kind == "step"} == {dialect}, line
        table = read_lines("log", [line])[0].steps[dialect]
        return {name: float(table[name][0]) for name in table.columns}

    known = figures(fields)
    assert known
    unknown = UNKNOWN.get((dialect, between), UNKNOWN[between])
    for order in itertools.permutations((*fields, unknown)):
        assert figures(order) == known, order
