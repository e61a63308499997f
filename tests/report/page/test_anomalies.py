"""Which anomaly stands before which, and in what words."""

from __future__ import annotations

import pytest

from hpc_gpt.readers.logs import Failure, Place
from hpc_gpt.readers.runs import RunRead
from hpc_gpt.report.page.anomalies import DOUBT, ENDED_TEXTS, FAILED, KNOW, LOOK, rank_anomalies, worst_first
from hpc_gpt.runs.state import ENDED
from tests.report.page.page_runs import curve, megatron, usual_runs


def told(*runs):
    return [(anomaly.level, anomaly.words) for anomaly in rank_anomalies(runs)]


def test_every_way_to_end_has_words():
    assert list(ENDED_TEXTS) == ENDED


def test_a_good_run_has_none():
    assert told(RunRead(megatron(), curve())) == []


def test_failures_stand_first_then_doubt_then_the_rest():
    anomalies = rank_anomalies(usual_runs())
    assert [anomaly.level for anomaly in anomalies] == sorted(anomaly.level for anomaly in anomalies)
    assert {anomaly.level for anomaly in anomalies} == {FAILED, DOUBT, LOOK, KNOW}
    oom = next(anomaly for anomaly in anomalies if "out of GPU memory" in anomaly.words)
    assert oom.where == "n16/slurm-1587011.out:812"
    assert oom.runs == (2,)


def test_of_two_failures_the_costlier_stands_first():
    cheap = megatron(ended="error", cause="a", gpu_hours=1.0)
    assert told(RunRead(cheap), RunRead(megatron(ended="hang", cause="b", gpu_hours=900.0))) == [
        (FAILED, "hung: b"),
        (FAILED, "error: a"),
    ]


@pytest.mark.parametrize(
    ("flag", "level"),
    [
        ("tp8-pp4-dp4 cannot exist on 64 GPUs", DOUBT),
        ("faster than the peak of v100-32g: the device or a size is wrong", DOUBT),
        ("layout tp8-pp4-dp4 needs 128 GPUs, but 64 are stated (a.out:3)", DOUBT),
        ("the program counts 1000 samples, but 16 x 64 = 1024 were run", DOUBT),
        ("8 x 2 x 4 = 64, but the global batch is 128 (a.out:9)", DOUBT),
        ("hf_trainer: the program counts trainable parameters only", KNOW),
        ("the first cause is not certain: its rank's clock", KNOW),
        ("every step was skipped: step_s includes forward and backward only", DOUBT),
        ("3 lines of metrics.jsonl cannot be read and were left out", LOOK),
        ("the loss did not fall", LOOK),
        ("no peaks known for device mi300x: mfu and hfu are null", KNOW),
    ],
)
def test_a_flag_counts_by_what_it_says(flag, level):
    assert told(RunRead(megatron(flags=[flag]))) == [(level, flag)]


def test_the_same_words_of_many_runs_are_one_anomaly():
    runs = [RunRead(megatron(flags=["the loss did not fall"])) for _ in range(50)]
    (anomaly,) = rank_anomalies(runs)
    assert anomaly.runs == tuple(range(50))


def test_words_that_differ_in_figures_alone_are_one_where_they_are_many():
    runs = [RunRead(megatron(skipped_steps=place + 1, gpu_hours=float(place))) for place in range(10)]
    (anomaly,) = rank_anomalies(runs)
    assert anomaly.words == "10 steps skipped (the others are alike, with other figures)"
    assert sorted(anomaly.runs) == list(range(10))
    assert len(rank_anomalies(runs[:3])) == 3


def test_a_run_slower_than_its_like_is_told_with_both_figures():
    runs = [RunRead(megatron(step_s=seconds, step_s_p10=None)) for seconds in (100.0, 101.0, 99.0, 150.0)]
    (anomaly,) = rank_anomalies(runs)
    assert anomaly.runs == (3,)
    assert anomaly.words == "1.49 x the median step time of similar runs (150 s, not 100 s)"
    assert rank_anomalies([*runs[:2], RunRead(megatron(step_s=500.0, step_s_p10=None, tp=8))]) == []


def test_steps_trained_again_count_the_restarts():
    assert told(RunRead(megatron(), curve(attempts=3))) == [(LOOK, "10 steps trained again after 2 restarts")]


def test_a_run_that_is_done_though_its_log_tells_of_a_failure():
    failure = Failure("disk_full", "No space left on device", Place("a.out", 7))
    (anomaly,) = rank_anomalies([RunRead(megatron(), failures=[failure])])
    assert (anomaly.level, anomaly.where) == (LOOK, "a.out:7")
    assert anomaly.words == "done, but its log reports disk full: No space left on device"


def test_the_worst_runs_come_first_and_none_is_lost():
    runs = usual_runs()
    order = worst_first(runs, rank_anomalies(runs))
    assert sorted(order) == list(range(len(runs)))
    assert set(order[:2]) == {2, 3}
    assert order[-2:] == [0, 6]


FAILURES = ("refused", "no_progress", "gpu_memory", "host_memory", "collective_timeout", "hang", "node_failure", "nan",
            "data", "disk_full", "user_error", "error")  # fmt: skip


@pytest.mark.parametrize("ended", FAILURES)
def test_every_failure_is_told_as_one(ended):
    assert told(RunRead(megatron(ended=ended)))[0][0] == FAILED
