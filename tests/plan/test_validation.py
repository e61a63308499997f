"""Predicted beside published: keys, kinds of memory, means, wrong fits, the pick; never a NaN."""

import pytest

from tests.plan.published.files import rows_of
from tests.plan.published.validation import Predicted, as_table, choosing, predict_rows, predicted_only, score
from tests.plan.row_examples import row

DATA_SHEETS = choosing(())
KEYS = (
    "id source step_s published_step_s memory_gib memory_kind published_memory_gib fits published_fits layout left_out"
)


def predict(*rows):
    return predict_rows(rows_of({"rows": list(rows)}, "rows"), DATA_SHEETS)


def one(**fields) -> Predicted:
    (entry,) = predict(row(**fields))
    assert isinstance(entry, Predicted), entry.reason
    return entry


def test_keys_are_the_same_for_every_row():
    tables = [as_table(entry) for entry in predict(row(), row(moe=True), row(hidden=None), 3)]
    assert all(" ".join(table).startswith(KEYS) for table in tables)
    assert len({tuple(table) for table in tables}) == 1
    assert [bool(table["left_out"]) for table in tables] == [False, True, True, True]
    assert tables[0]["layout"] == "tp4-pp4-dp4"
    assert tables[1]["step_s"] is None


def test_memory_is_of_the_kind_that_was_measured():
    by_kind = {kind: one(memory_kind=kind) for kind in ("allocated", "reserved", "nvidia_smi", "component")}
    figures = {kind: entry.memory_gib for kind, entry in by_kind.items()}
    assert figures["component"] < figures["allocated"] < figures["reserved"] < figures["nvidia_smi"]
    entry = by_kind["reserved"]
    assert entry.memory_gib == max(stage.reserved for stage in entry.memory.stages)
    assert as_table(entry)["memory_kind"] == "reserved"


def test_memory_by_stage_is_compared_with_the_same_stage():
    figures = {"1": [9.0, 10.0, 11.0], "3": [9.0, 10.0, 12.0]}
    entry = one(memory_by_stage_gib=figures, memory_gib=None, memory_kind=None)
    stages = entry.memory.stages
    assert entry.memory_gib == max(stages[1].reserved, stages[3].reserved)
    assert entry.row.published.memory_gib == 12.0
    listed = as_table(entry)["stages"]
    assert [stage["stage"] for stage in listed] == [1, 3]
    assert listed[0]["reserved_gib"] == stages[1].reserved


SECONDS = [
    ({}, 9.0),
    ({"sec_per_iter": None, "tokens_per_sec_per_gpu": 1000.0}, 256 * 2048 / (1000 * 64)),
    ({"sec_per_iter": None, "samples_per_sec": 32.0}, 8.0),
    # Narayanan's eq. 3 by hand: 96 B s L h^2 (1 + s/6h + V/16Lh) / (n T 1e12)
    (
        {"sec_per_iter": None, "tflops_per_gpu": 100, "tflops_kind": "hardware, eq.3 (factor 96)"},
        96 * 256 * 2048 * 32 * 4096**2 * (1 + 2048 / (6 * 4096) + 50688 / (16 * 32 * 4096)) / (64 * 100e12),
    ),
    (
        {"sec_per_iter": None, "tflops_per_gpu": 100, "tflops_kind": "hardware, 8*12*l*h^2 estimate (~3% low)"},
        96 * 256 * 2048 * 32 * 4096**2 / (64 * 100e12),
    ),
    ({"sec_per_iter": None, "tflops_per_gpu": 100, "tflops_kind": "of their own"}, None),
    ({"sec_per_iter": None, "tflops_per_gpu": 100}, None),
    ({"sec_per_iter": None}, None),
]


def test_published_seconds():
    for fields, seconds in SECONDS:
        found = one(**fields).row.published.step_s
        assert found == (pytest.approx(seconds, rel=1e-12) if seconds else None), fields


def test_published_seconds_by_the_models_flops_and_its_share():
    params = 32 * (12 * 4096**2 + 13 * 4096) + 50688 * 4096 + 2048 * 4096 + 2 * 4096
    model = (6 * params + 12 * 32 * 4096 * 2048) * 2048 * 256
    entry = one(sec_per_iter=None, tflops_per_gpu=150, tflops_kind="model")
    assert entry.row.published.step_s == pytest.approx(model / (64 * 150e12), rel=1e-9)
    for share in (50, 0.5):
        found = one(sec_per_iter=None, mfu=share).row.published.step_s
        assert found == pytest.approx(model / (64 * 156e12), rel=1e-9)
    seed = one(sec_per_iter=None, tflops_per_gpu=100, tflops_kind="hardware, size*4*2 formula").row.published.step_s
    assert seed == pytest.approx(8 * params * 2048 * 256 / (64 * 100e12), rel=1e-9)


def test_noisy_rows_and_rows_without_figures_are_left_out_of_the_means():
    entries = predict(
        row(), row(noisy=True, sec_per_iter=1e-3, memory_gib=999.0), row(sec_per_iter=None, memory_gib=None)
    )
    scores = score(predicted_only(entries))
    assert (scores.time.rows, scores.memory.rows) == (1, 1)
    assert scores.time.mean == pytest.approx(abs(entries[0].time_error))
    assert scores.memory.mean == pytest.approx(abs(entries[0].memory_error))


def test_the_fastest_of_several_times_for_one_layout_counts():
    entries = predict(row(id="a", sec_per_iter=12.0), row(id="b", sec_per_iter=9.0), row(id="c", sec_per_iter=10.0))
    scores = score(predicted_only(entries))
    assert scores.time.rows == 1
    assert scores.time.mean == pytest.approx(abs(entries[1].time_error))


def test_means_are_of_each_source_and_over_sources():
    step = one().step.step_s
    rows = [row(id=str(n), source="a", sec_per_iter=step / 1.1, seq=2048, micro_bs=2) for n in range(1)]
    rows += [row(id="x", source="b", sec_per_iter=step / 0.7)]
    rows += [row(id="y", source="b", sec_per_iter=one(micro_bs=4).step.step_s / 1.2, micro_bs=4)]
    scores = score(predicted_only(predict(*rows)))
    assert [each.source for each in scores.sources] == ["a", "b"]
    assert scores.sources[0].time.mean == pytest.approx(0.1)
    assert scores.sources[1].time.mean == pytest.approx(0.25)
    assert scores.time_mean == pytest.approx(0.175)
    assert scores.time.within_15 == pytest.approx(1 / 3)


def test_wrong_fits_are_counted_by_which_way_they_are_wrong():
    huge = {"hidden": 16384, "layers": 96, "sec_per_iter": 99.0}
    small = {"hidden": 1024, "heads": 16, "layers": 16}
    scores = score(
        predicted_only(
            predict(
                row(id="ran, said not to", **huge),
                row(id="ran out, said to", oom=True, **small),
                row(id="right", **small),
                row(id="right too", fits=False, **huge),
                row(id="theory", **{**huge, "sec_per_iter": None, "memory_gib": None, "memory_kind": None}),
            )
        )
    )
    assert scores.said_not_to == ("ran, said not to",)
    assert scores.said_to_fit == ("ran out, said to",)
    assert scores.fits_judged == 4


def test_the_pick_is_judged_in_groups_that_differ_by_layout_alone():
    rows = [
        row(id="slow", tp=4, pp=4, dp=4, sec_per_iter=12.0),
        row(id="fast", tp=8, pp=1, dp=8, sec_per_iter=10.0),
        row(id="other batch", tp=8, pp=1, dp=8, sec_per_iter=1.0, global_bs=512),
        row(id="other model", tp=8, pp=1, dp=8, sec_per_iter=1.0, layers=16),
    ]
    entries = predicted_only(predict(*rows))
    (pick,) = score(entries).picks
    fast_first = entries[1].step.step_s < entries[0].step.step_s
    assert pick.picked == ("fast" if fast_first else "slow")
    assert pick.best == "fast"
    assert pick.slower == pytest.approx(0.0 if fast_first else 0.2)
