"""Constants of a cluster from its rows: what counts, whose constants a row takes, what is predicted without its own."""

from __future__ import annotations

import dataclasses

import pytest

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan import validation
from hpc_gpt.plan.calibration import calibrate, calibrate_clusters, chosen_for, fastest, named
from hpc_gpt.plan.rates import DEFAULT, Constants, constants_from
from hpc_gpt.plan.row_files import rows_of
from hpc_gpt.plan.step_time import predict_step
from hpc_gpt.plan.validation import without_row, without_source
from tests.plan.row_examples import row

TRUE = dataclasses.replace(DEFAULT, gemm=0.66, network=0.5)
SPLITS = [(1, 1, 64), (2, 2, 16), (4, 4, 4), (8, 1, 8), (8, 8, 1), (1, 8, 8), (2, 4, 8), (4, 1, 16)]


def rows(name=None, *, true: Constants = TRUE, **fields):
    """Rows of several layouts, with the times that `true` constants give."""
    made = [
        row(id=f"{tp}-{pp}-{dp}", tp=tp, pp=pp, dp=dp, **{"memory_gib": None, "memory_kind": None, **fields})
        for tp, pp, dp in SPLITS
    ]
    read = rows_of({"rows": made}, "rows").rows
    for fields_of, entry in zip(made, read, strict=True):
        fields_of["sec_per_iter"] = predict_step(entry.training, entry.machine, true).step_s
    content = {"clusters": {name: made}} if name else {"rows": made}
    return rows_of(content, "rows").rows


def test_constants_come_back_near_those_that_made_the_rows():
    found = calibrate("mine", rows())
    assert found.mean_error < 0.03 < _mean_error(rows(), DEFAULT)
    assert abs(found.constants.gemm - TRUE.gemm) < abs(DEFAULT.gemm - TRUE.gemm)
    assert set(found.residuals) == {"-".join(map(str, split)) for split in SPLITS}


def _mean_error(entries, constants):
    return sum(
        abs(predict_step(entry.training, entry.machine, constants).step_s / entry.published.step_s - 1)
        for entry in entries
    ) / len(entries)


def test_noisy_rows_do_not_count_and_the_fastest_of_a_layout_does():
    read = rows_of({"rows": [row(id="a"), row(id="b", sec_per_iter=8.0), row(id="c", sec_per_iter=1.0, noisy=True),
                             row(id="d", sec_per_iter=None)]}, "rows").rows  # fmt: skip
    assert [entry.id for entry in fastest(read)] == ["b"]


def test_clusters_by_name_or_else_by_machine():
    assert [each.name for each in calibrate_clusters(rows("mine"))] == ["mine"]
    mixed = rows() + rows(fabric="omni-path 4x100G")
    found = calibrate_clusters(mixed)
    assert [each.name for each in found] == ["a100-80g-8-infiniband-8x200g", "a100-80g-8-omni-path-4x100g"]
    assert calibrate_clusters(rows_of({"rows": [row(sec_per_iter=None)]}, "rows").rows) == []


def test_a_row_takes_the_cluster_of_its_device_and_node_size():
    ib = calibrate("ib", rows("ib", source="x"))
    opa = calibrate("opa", rows("opa", source="y", fabric="omni-path 4x100G"))
    h100 = dataclasses.replace(ib, name="h100", device="h100-80g")

    def chosen(clusters, **fields):
        (entry,) = rows_of({"rows": [row(**fields)]}, "rows").rows
        return chosen_for(entry, clusters)

    clusters = [opa, ib, h100]
    assert chosen(clusters) is ib
    assert chosen(clusters, source="y") is opa
    assert chosen(clusters, fabric="omni-path 4x100G") is opa
    assert chosen(clusters, device="h100-80g") is h100
    assert chosen(clusters, device="v100-32g") is None
    assert chosen(clusters, gpus_per_node=4) is None
    assert chosen([opa, h100], fabric="infiniband 8x400G") is opa
    between = chosen(clusters, fabric="infiniband 8x400G")
    assert between.name == "the middle of opa, ib"
    for name, value in vars(between.constants).items():
        low, high = sorted([getattr(ib.constants, name), getattr(opa.constants, name)])
        assert low * (1 - 1e-9) <= value <= high * (1 + 1e-9)


def test_a_cluster_by_name():
    ib = calibrate("ib", rows("ib"))
    assert named([ib], "ib") is ib
    with pytest.raises(ConfigError) as raised:
        named([ib], "ibb")
    assert "ib" in str(raised.value)


def test_constants_as_a_profile_stores_them():
    assert constants_from({"gemm": 0.5, "of a later version": 1.0}) == dataclasses.replace(DEFAULT, gemm=0.5)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="gemm"):
            constants_from({"gemm": wrong})


def test_cross_validation_predicts_each_row_with_constants_that_never_saw_it():
    slow = rows("a", source="slow", true=dataclasses.replace(DEFAULT, gemm=0.6))
    fast = rows("b", source="fast", true=dataclasses.replace(DEFAULT, gemm=0.9))
    by_source = without_source(slow + fast)
    assert len(by_source) == len(slow) + len(fast)
    signs = {source: [e.time_error < 0 for e in by_source if e.row.source == source] for source in ("slow", "fast")}
    assert all(signs["slow"])  # predicted by the fast source's constants
    assert not any(signs["fast"])
    by_row = without_row(slow + fast)
    assert sum(abs(entry.time_error) for entry in by_row) < sum(abs(entry.time_error) for entry in by_source) / 2
    assert without_row(rows()) == []
    alone = without_source(slow)
    assert {entry.calibration for entry in alone} == {"data sheets"}


def test_many_rows_of_a_cluster_are_dealt_into_parts(monkeypatch):
    monkeypatch.setattr(validation, "FOLDS", 3)
    fits = []
    fitted = validation.calibrate
    monkeypatch.setattr(validation, "calibrate", lambda name, rows: fits.append(len(rows)) or fitted(name, rows))
    found = without_row(rows("a"))
    assert sorted(entry.row.id for entry in found) == sorted(entry.id for entry in rows("a"))
    assert fits == [5, 5, 6]
