"""Which anomaly stands before which, and in what words."""

import pytest

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.core.runs.record import Flag
from hpc_gpt.reader.lines.part import Failure, Place
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.notes import ABSURD, DOUBT, ENDED_TEXTS, FAILED, KNOW, LOOK, notes_of_page
from tests.report.page.page_runs import curve, megatron, usual_runs


def told(*runs):
    return [(anomaly.level, anomaly.text) for anomaly in notes_of_page(runs)]


def test_failures_stand_first_then_doubt_then_the_rest():
    assert told(RunRead(megatron(), curve())) == [], "a good run has none"
    anomalies = notes_of_page(usual_runs())
    assert [anomaly.level for anomaly in anomalies] == sorted(anomaly.level for anomaly in anomalies)
    assert {anomaly.level for anomaly in anomalies} == {FAILED, DOUBT, LOOK, KNOW}
    oom = next(anomaly for anomaly in anomalies if "out of GPU memory" in anomaly.text)
    assert oom.where == "n16/slurm-1587011.out:812"
    assert oom.runs == (2,)


def test_of_two_failures_the_costlier_stands_first():
    cheap = megatron(ended="error", cause="a", gpu_hours=1.0)
    assert told(RunRead(cheap), RunRead(megatron(ended="hang", cause="b", gpu_hours=900.0))) == [
        (FAILED, "hung: b"),
        (FAILED, "error: a"),
    ]
    few = RunRead(megatron(ended="nan", cause="a", gpu_hours=None, gpus=8))
    many = RunRead(megatron(ended="nan", cause="b", gpu_hours=None, gpus=16))
    assert told(few, many)[0] == (FAILED, "NaN loss: b"), "without hours that of more GPUs"


@pytest.mark.parametrize(
    ("kind", "level"),
    [("layout", DOUBT), ("absurd", ABSURD), ("disagrees", LOOK),
     ("batch", DOUBT), ("program", KNOW), ("cause", KNOW), ("all_skipped", DOUBT), ("value", DOUBT),
     ("no_peak", KNOW), ("", LOOK), ("a kind of tomorrow", LOOK)],
)  # fmt: skip
def test_a_flag_counts_by_its_kind_and_not_by_its_words(kind, level):
    words = "the program prints 9 tokens/s, but batch, sequence and step time give 2,048: left out"
    assert told(RunRead(megatron(flags=[Flag(words, kind)]))) == [(level, words)]
    assert told(RunRead(megatron(flags=[words]))) == [(LOOK, words)], "without kinds"


def test_a_flag_of_nan_or_skipped_steps_stands_for_its_count():
    record = megatron(nan_steps=3, skipped_steps=9, flags=[Flag("a", "nan"), Flag("b", "all_skipped")])
    assert told(RunRead(record)) == [(DOUBT, "a"), (DOUBT, "b")]
    assert (LOOK, "9 steps skipped") in told(RunRead(megatron(skipped_steps=9)))


def test_words_that_differ_in_figures_alone_are_one_of_many():
    runs = [RunRead(megatron(skipped_steps=place + 1, gpu_hours=float(place))) for place in range(10)]
    (anomaly,) = notes_of_page(runs)
    assert anomaly.text == "10 steps skipped (the others are alike, with other figures)"
    assert sorted(anomaly.runs) == list(range(10))
    assert len(notes_of_page(runs[:3])) == 3


def told_of_speed(*runs):
    return [anomaly.text.partition(" (")[0] for anomaly in notes_of_page(runs)]


def test_a_run_slower_than_its_like_is_told_with_both_figures():
    def at(step_s, **changes):
        return RunRead(megatron(step_s=step_s, step_s_p10=None, **changes))

    (anomaly,) = notes_of_page([at(100.0), at(101.0), at(99.0), at(150.0)])
    assert anomaly.runs == (3,)
    assert anomaly.text == "1.49 x the median step time of similar runs (150 s, not 100 s)"
    assert told_of_speed(at(10.0), at(10.0), at(11.0)) == ["1.10 x the median step time of similar runs"]
    assert told_of_speed(at(10.0), at(10.0), at(10.99)) == told_of_speed(at(10.0), at(50.0)) == []
    others = {"engine": "fsdp", "gpus": 32, "tp": 8, "pp": 8, "cp": 2, "dp": 2, "zero_stage": 1, "device": "h200",
              "params": 7, "seq": 8,
              "global_batch": 9, "micro_batch": 1, "recompute": None, "dtype": "bf16"}  # fmt: skip
    for key, value in others.items():
        assert told_of_speed(*[at(100.0)] * 3, at(150.0, **{key: value})) == [], key
    assert len(told_of_speed(*[at(100.0)] * 3, at(150.0, cp=1))) == 1
    assert told_of_speed(*[at(100.0, gpus=None)] * 3, at(150.0, gpus=None)) == []


def test_steps_that_vary_are_told_unless_a_flag_says_it():
    for low, high, flags, messages in (
        (2.0, 3.0, [], ["step time varies: 90th percentile 3.00 s is 1.5 x the 10th"]), (2.0, 2.99, [], []),
        (2.0, 3.0, [Flag("wide", "spread")], ["wide"]), (0.0, 3.0, [], []),
    ):  # fmt: skip
        assert told_of_speed(RunRead(megatron(step_s_p10=low, step_s_p90=high, flags=flags))) == messages


def test_steps_trained_again_count_the_restarts():
    assert told(RunRead(megatron(), curve(attempts=3))) == [(LOOK, "10 steps trained again after 2 restarts")]


def test_a_run_that_is_done_though_its_log_tells_of_a_failure():
    failure = Failure("disk_full", "No space left on device", Place("a.out", 7))
    (anomaly,) = notes_of_page([RunRead(megatron(), failures=[failure])])
    assert (anomaly.level, anomaly.where) == (LOOK, "a.out:7")
    assert anomaly.text == "done, but its log reports disk full: No space left on device"


def test_an_absurd_figure_tops_all_others():
    absurd = megatron(flags=[Flag("the program prints 9 tokens/s", "absurd")], gpu_hours=0.1)
    runs = [
        RunRead(megatron(flags=[Flag("layout tp8-pp4-dp4 needs 128 GPUs, but 64 are stated (a.out:3)", "layout")])),
        RunRead(absurd),
    ]
    assert [anomaly.level for anomaly in notes_of_page(runs)] == [ABSURD, DOUBT]


def test_failures_of_one_cause_are_one_group_with_its_nodes():
    """The texts are PyTorch's of 1.13 and of 2.5, and a FileNotFoundError of three users."""
    words = [
        "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB (GPU 3; 39.59 GiB total capacity)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 394.00 MiB. GPU 0 has a total capacity of 79.1",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB. GPU 7 has a total capacity",
    ]
    places = [Place(f"run-{at}/slurm.out", 12) for at in range(3)]
    failed = [
        RunRead(megatron(ended="gpu_memory", cause=text, failed_node=node), failures=[Failure("gpu_memory", text, at)])
        for text, at, node in zip(words, places, ("n7", "n7", "n9"), strict=True)
    ]
    (group,) = notes_of_page(failed)
    assert group.runs == (0, 1, 2)
    assert group.nodes == ("n7 (2 runs)", "n9")
    assert group.text == f"out of GPU memory: {words[0]} (the others are alike, with other figures)"
    assert group.where == "run-0/slurm.out:12"
    lost = [f"FileNotFoundError: [Errno 2] No such file: '/scratch/{user}/data.bin'" for user in ("ada", "bob", "cy")]
    assert len(notes_of_page([RunRead(megatron(ended="data", cause=text)) for text in lost])) == 1
    hung = [RunRead(megatron(ended="hang", cause=f"no heartbeat for 600 s ({name}:7)"),
                    failures=[Failure("hang", "no heartbeat for 600 s", Place(name, 7))])
            for name in ("a.out", "train.log")]  # fmt: skip
    assert len(notes_of_page(hung)) == 1
    other = RunRead(megatron(ended="gpu_memory", cause="HIP out of memory. Tried to allocate 2.00 GiB"))
    assert len(notes_of_page([*failed, other])) == 2
    named = Failure("data", "cannot read it (a.out:7)", Place("a.out", 7))
    (group,) = notes_of_page([RunRead(megatron(ended="data"), failures=[named])])
    assert (group.text, group.where) == ("data fault: cannot read it (a.out:7)", "")


def test_earlier_failures_of_a_done_run_are_no_anomaly():
    failure = Failure("node_failure", "Socket Timeout", Place("a.out", 7))
    attempts = [{"attempt": 1, "ended": "node_failure"}, {"attempt": 2, "ended": "done"}]
    assert told(RunRead(megatron(attempts=attempts), failures=[failure])) == []


FAILURES = ("refused", "no_progress", "gpu_memory", "host_memory", "collective_timeout", "hang", "node_failure", "nan",
            "data", "disk_full", "user_error", "error")  # fmt: skip


def test_every_failure_is_told_as_one():
    assert list(ENDED_TEXTS) == ENDED, "every way to end has words"
    assert {told(RunRead(megatron(ended=ended)))[0][0] for ended in FAILURES} == {FAILED}
