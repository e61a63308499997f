"""Predicted beside published: kinds of memory, means, wrong fits, the pick; never a NaN."""

import pytest

from tests.plan.published.rows import rows_of
from tests.plan.published.scores import Predicted, choosing, predict_rows, predicted_only, score
from tests.plan.row_examples import row

DATA_SHEETS = choosing(())


def predict(*rows):
    return predict_rows(rows_of({"rows": list(rows)}, "rows"), DATA_SHEETS)


def one(**fields) -> Predicted:
    (entry,) = predict(row(**fields))
    assert isinstance(entry, Predicted), entry.reason
    return entry


def test_memory_is_of_the_kind_that_was_measured():
    by_kind = {kind: one(memory_kind=kind) for kind in ("allocated", "reserved", "nvidia_smi", "component")}
    figures = {kind: entry.memory_gib for kind, entry in by_kind.items()}
    assert figures["component"] < figures["allocated"] < figures["reserved"] < figures["nvidia_smi"]
    entry = by_kind["reserved"]
    assert entry.memory_gib == max(stage.reserved for stage in entry.memory.stages)


def test_memory_by_stage_is_compared_with_the_same_stage():
    figures = {"1": [9.0, 10.0, 11.0], "3": [9.0, 10.0, 12.0]}
    entry = one(memory_by_stage_gib=figures, memory_gib=None, memory_kind=None)
    reserved = {stage: entry.memory.stages[stage].reserved for stage in (1, 3)}
    assert entry.memory_gib == max(reserved.values())


def test_noisy_rows_and_rows_without_figures_are_in_no_mean():
    entries = predict(
        row(), row(noisy=True, sec_per_iter=1e-3, memory_gib=999.0), row(sec_per_iter=None, memory_gib=None)
    )
    scores = score(predicted_only(entries))
    assert (scores.time.rows, scores.memory.rows) == (1, 1)
    assert scores.time.mean == pytest.approx(abs(entries[0].time_error))
    assert scores.memory.mean == pytest.approx(abs(entries[0].memory_error))


def test_means_are_of_each_source_and_over_sources():
    step = one().step.step_s
    rows = [row(id=str(n), source="a", sec_per_iter=step / 1.1, seq=2048, micro_bs=2) for n in range(1)]
    rows += [row(id="x", source="b", sec_per_iter=step / 0.7)]
    rows += [row(id="y", source="b", sec_per_iter=one(micro_bs=4).step.step_s / 1.2, micro_bs=4)]
    scores = score(predicted_only(predict(*rows)))
    assert [each.source for each in scores.sources] == ["a", "b"]
    assert scores.sources[0].time.mean == pytest.approx(0.1)
    assert scores.sources[1].time.mean == pytest.approx(0.25)
    assert (scores.time_mean, scores.time.within_15) == (pytest.approx(0.175), pytest.approx(1 / 3))


def test_wrong_fits_are_counted_by_which_way_they_are_wrong():
    huge = {"hidden": 16384, "layers": 96, "sec_per_iter": 99.0}
    small = {"hidden": 1024, "heads": 16, "layers": 16}
    rows = [
        row(id="ran, said not to", **huge),
        row(id="ran out, said to", oom=True, **small),
        row(id="right", **small),
        row(id="right too", fits=False, **huge),
        row(id="theory", **{**huge, "sec_per_iter": None, "memory_gib": None, "memory_kind": None}),
    ]
    scores = score(predicted_only(predict(*rows)))
    assert scores.said_not_to == ("ran, said not to",)
    assert scores.said_to_fit == ("ran out, said to",)
    assert scores.fits_judged == 4


def test_the_pick_is_judged_in_groups_that_differ_by_layout():
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
