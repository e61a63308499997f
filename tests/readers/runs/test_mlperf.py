"""MLPerf's counts and rates: what they are of follows from batch, sequence and times; as in public results."""

import json

import pytest

from tests.readers.made_logs import run_of


def event(at_s: float, key: str, value: object = None, **metadata: object) -> str:
    body = {"namespace": "", "time_ms": round(1.7e12 + 1000 * at_s), "event_type": "POINT_IN_TIME", "key": key}
    return f":::MLLOG {json.dumps({**body, 'value': value, 'metadata': {'file': '/w/c.py', 'lineno': 1, **metadata}})}"


def record_of(*lines: str):
    return run_of(*lines, event(9e5, "run_stop", status="success")).record


def gpt3(*platform: str) -> list[str]:
    """training_results_v4.1, NVIDIA b200_n8 gpt3: tokens everywhere, the step time `in s`."""
    head = [event(0, key, value) for key, value in (("global_batch_size", 2048), ("max_sequence_length", 2048))]
    steps = [
        event(10 + 36 * n, "tracked_stats", {"train_step_timing in s": 35.99 + 0.01 * n}, step=4194304 * n)
        for n in range(1, 13)
    ]
    end = event(460, "eval_accuracy", 2.75, epoch_num=12 * 4194304)
    rate = event(460.1, "tracked_stats", {"throughput": 104566.6}, step=12 * 4194304)
    return [*head, *platform, event(10, "run_start"), *steps, end, rate]


def test_tokens_are_told_from_samples_by_batch_and_sequence():
    record = record_of(*gpt3(event(0, "submission_platform", "8xNVIDIA HGX B200")))
    assert record.step_s == pytest.approx(36.05, abs=0.1)
    assert record.tokens_per_s == pytest.approx(2048 * 2048 / 36.05, rel=0.01)
    assert (record.gpus, record.device, record.loss_eval, record.ended) == (64, "b200", 2.75, "done")
    assert record.attempts[0]["last_step"] == 12
    assert record.tokens_total == 12 * 2048 * 2048


@pytest.mark.parametrize(("count", "last"), [(512, 240), (512.0, 240)])
def test_samples_are_told_from_steps_and_the_rate_is_of_samples(count, last):
    """v5.0 and v5.1, AMD: no sequence, a throughput of samples, evaluations between."""
    lines = [event(0, "global_batch_size", 8), event(0, "submission_platform", "1xMI300X"), event(1, "run_start")]
    for n in range(1, 4):
        begin = 1 + (n - 1) * 300
        lines += [
            event(begin + 252, "tracked_stats", {"throughput": 2.03}, step=640 * n if count == 512 else float(640 * n)),
            event(begin + 252, "eval_start", samples_count=640 * n),
            event(begin + 299, "eval_accuracy", 0.93, samples_count=640 * n),
            event(begin + 300, "eval_stop", samples_count=640 * n),
        ]
    record = record_of(*lines)
    assert record.step_s == pytest.approx(8 / 2.03, rel=0.01)
    assert record.attempts[0]["last_step"] == last
    assert record.gpus is None  # a node's GPUs are not said


def test_events_between_evaluations_time_the_steps():
    """v4.0, Intel-HabanaLabs gpt3: evaluations alone."""
    lines = [event(0, "global_batch_size", 2048), event(0, "max_sequence_length", 2048), event(1, "run_start")]
    lines.insert(0, event(0, "submission_platform", "gaudi-256"))
    for n in range(1, 7):
        end = 1 + n * 490 + (n - 1) * 66
        lines += [
            event(end, "eval_start", epoch_num=n * 50331648),
            event(end + 65, "eval_accuracy", 2.7, epoch_num=n * 50331648),
        ]
        lines += [event(end + 66, "eval_stop", epoch_num=n * 50331648)]
    record = record_of(*lines)
    assert record.step_s == pytest.approx(490 / 12, rel=0.01)
    assert (record.gpus, record.attempts[0]["last_step"]) == (256, 72)


def test_a_count_that_is_of_nothing_known_is_left_out():
    """v3.1, bert: samples that are no whole batches."""
    lines = [event(0, "global_batch_size", 768), event(1, "run_start")]
    for n in range(1, 6):
        lines += [event(20 * n, "tracked_stats", {"throughput": 7936.6}, epoch_num=150635 * n)]
    record = record_of(*lines)
    assert (record.step_s, record.tokens_per_s, record.attempts[0]["last_step"]) == (None, None, None)


def test_each_rank_prints_that_it_starts():
    record = record_of(*[event(0, "init_start")] * 8, *gpt3(event(0, "submission_platform", "MI355X")))
    assert (record.gpus, len(record.attempts)) == (8, 1)


@pytest.mark.parametrize(
    ("platform", "nodes", "gpus", "device"),
    [  # of training_results_v4.0 and v5.1
        ("64xNVIDIA DGX H100", 64, 512, "h100-80g"),
        ("128xNVIDIA GB200", 128, None, "gb200"),  # 4 or 8 a node
        ("16xNVIDIA L40S", 16, None, "NVIDIA L40S"),
        ("2xMI300X", 2, None, "MI300X"),
        ("MI355X", None, None, "MI355X"),
        ("1xXE9680Lx8B200-SXM-180GB", 1, 8, "B200-SXM-180GB"),
        ("1xSR680aV3-8xB200_SXM_180GB", 1, 8, "B200_SXM_180GB"),
        ("1xXE9785L_8xMI355X", 1, 8, "MI355X"),
        ("1xXE7745x8RTXPro6000-PCIe-96GB", 1, 8, "RTXPro6000-PCIe-96GB"),
        ("GX2560M7_H100_SXM_80GBx4", None, 4, "H100"),
        ("PRIMERGY-CDI-L40Sx16", None, 16, "L40S"),
        ("1xG893-ZX1-AAX4_MI355X", None, None, "MI355X"),
        ("gaudi-1024", None, 1024, None),
        ("1xESC-NB8-E11", None, None, None),
        ("16xSUBMISSION_PLATFORM_PLACEHOLDER", None, None, None),
    ],
)
def test_a_platform_says_what_its_name_says(platform, nodes, gpus, device):
    record = record_of(*gpt3(event(0, "submission_platform", platform)))
    assert (record.nodes, record.gpus, record.device) == (nodes, gpus, device)


@pytest.mark.parametrize(
    ("benchmark", "loss"), [("gpt3", 2.75), ("llama31_8b", 2.75), ("bert", None), ("resnet", None)]
)
def test_an_accuracy_is_no_loss(benchmark, loss):
    assert record_of(event(0, "submission_benchmark", benchmark), *gpt3()).loss_eval == loss


def test_train_loss_is_tracked_with_its_samples():
    """v5.1, NVIDIA's llama2_70b_lora."""
    head = [event(0, "global_batch_size", 9), event(1, "run_start")]
    steps = [event(1 + n, "tracked_stats", {"train_loss": 2.0 - n / 100}, samples_count=90 * n) for n in range(1, 6)]
    record = record_of(*head, *steps)
    assert (record.loss_first, record.loss_last) == (1.99, 1.95)
    assert record.attempts[0]["last_step"] == 50
