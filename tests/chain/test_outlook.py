"""What is told of a chain before it is submitted, where each figure comes from, and what is refused with numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_gpt.chain.forecast import signal_lead_s
from hpc_gpt.chain.measured import Measured
from hpc_gpt.chain.outlook import Known, look_ahead
from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Data, Engine, Experiment, Job, LayoutRequest, Model, Train
from hpc_gpt.settings.resolve import Resolved, resolve

SITE = ClusterProfile(name="site", gpus_per_node=4)
ALIKE = Measured("20261101-a", 8, "tp2-pp2-dp2", 812, 2.0, 50.0, None, 100.0, saves=8)
NOW = 1_700_000_000.0


def asked(profile: ClusterProfile = SITE, engine: Engine | None = None, job: Job | None = None, **train) -> Resolved:
    experiment = Experiment(
        name="long",
        model=Model(hidden=64, layers=8, heads=8, vocab=256, seq=32),
        data=Data(source="random"),
        engine=engine or Engine(),
        layout=LayoutRequest(gpus=8, tp=2, pp=2, micro_batch=2, global_batch=32),
        train=Train(**{"steps": 10_000, "save_every": 100, **train}),
        job=job or Job(time="1:00:00"),
    )
    return resolve(experiment, profile)


def test_measured_figures_by_hand():
    """2.5 s a step with its share of saves. Two steps, a save between them, two saves and 15 s are a lead of 169 s, so
    that 3600 - 169 - 100 = 3331 s are 1332 steps a link; 10,000 are 7 such links and 676 steps."""
    outlook = look_ahead(asked(), Known(alike=ALIKE), lead_is_given=False, now=NOW)
    assert outlook.total is not None
    assert (outlook.total.links, outlook.total.link_steps, outlook.lead_s) == (8, 1332, 169)
    assert outlook.total.total_s == 8 * 150 + 25_000
    assert outlook.links == 8
    first = outlook.lines[0]
    assert "8 links of 1:00:00 by requeue" in first
    assert f"{8 * 26_200 / 3600:,.4g} GPU-hours on 8 GPUs" in first
    assert "waits in the queue not counted" in first
    told = "\n".join(outlook.lines)
    for words in (
        "step 2 s, measured: median of 812 steps of run 20261101-a",
        "save 50 s, measured: median of 8 saves",
        "start 100 s of each link, measured",
        "signal 169 s ahead",
    ):
        assert words in told


def test_a_prediction_has_a_range_and_an_assumed_save():
    known = Known(predicted={"step_s": 2.0, "band": 0.25})
    outlook = look_ahead(asked(), known, lead_is_given=False, now=NOW)
    told = "\n".join(outlook.lines)
    assert "predicted: give or take 25%" in told
    assert "assumed:" in told
    assert "GB/s" in told
    assert "not known, and not counted" in told
    low, high = (look_ahead(asked(), Known(alike=replace(ALIKE, step_s=2.0 * by, save_s=None, start_s=None)), True)
                 for by in (0.75, 1.25))  # fmt: skip
    assert low.total is not None
    assert high.total is not None
    assert f"({low.total.links} to {high.total.links})" in outlook.lines[0]


def test_the_parents_figures_stand_in_for_what_its_new_layout_has_not_measured():
    parent = replace(ALIKE, gpus=4, layout="tp2-pp2-dp1", run="parent")
    outlook = look_ahead(asked(), Known(done=40, parent=parent), lead_is_given=False, now=NOW)
    told = "\n".join(outlook.lines)
    assert "step 1 s, estimated: 2 s on 4 GPUs as tp2-pp2-dp1 in run parent" in told
    assert "save 50 s, measured" in told
    predicted = look_ahead(asked(), Known(40, None, parent, {"step_s": 3.0, "band": 0.1}), False)
    assert "step 3 s, predicted" in "\n".join(predicted.lines)


def test_what_nobody_knows_is_said_with_what_would_make_it_known():
    outlook = look_ahead(asked(), Known(no_prediction="not predicted: profile site names no device"), False)
    assert (outlook.total, outlook.links, outlook.lead_s) == (None, 1, None)
    told = "\n".join(outlook.lines)
    assert "names no device" in told
    assert "--until steps=20" in told


def test_a_given_lead_stays_and_one_too_short_is_warned_of():
    short = look_ahead(asked(job=Job(time="1:00:00", signal_lead_s=60)), Known(alike=ALIKE), lead_is_given=True)
    assert short.lead_s is None
    assert any("warning: signal 60 s" in line and "169 s" in line for line in short.lines)
    long = look_ahead(asked(job=Job(time="1:00:00", signal_lead_s=600)), Known(alike=ALIKE), lead_is_given=True)
    assert not any("warning" in line for line in long.lines)


def test_without_a_measured_save_the_profiles_lead_stays_or_grows():
    unsaved = replace(ALIKE, save_s=None)
    assert look_ahead(asked(), Known(alike=unsaved), False).lead_s == SITE.signal_lead_s
    slow = look_ahead(asked(), Known(alike=replace(unsaved, step_s=100.0)), False)
    assert slow.lead_s == signal_lead_s_of(100.0) > SITE.signal_lead_s


def signal_lead_s_of(step_s: float) -> int:
    """Of a checkpoint so small that it takes no second."""
    from hpc_gpt.chain.forecast import Pace

    return signal_lead_s(Pace(step_s, save_s=1e-3))


def refusal(resolved: Resolved, known: Known) -> str:
    with pytest.raises(ConfigError) as fault:
        look_ahead(resolved, known, lead_is_given=False)
    assert fault.value.hint
    return str(fault.value)


def test_contradictions_are_refused_with_their_numbers():
    assert "train.steps is 40, but the newest checkpoint is of step 40" in refusal(asked(steps=40), Known(done=40))
    words = refusal(asked(job=Job(time="4:00")), Known(alike=ALIKE))
    assert "job.time 4:00 (240 s) has no room" in words
    assert "100 s to start" in words
    assert "169 s ahead" in words
    words = refusal(asked(replace(SITE, chain="none")), Known(alike=ALIKE))
    assert "8 links of 1:00:00" in words
    assert 'chain = "none"' in words
    nvme = Engine(name="deepspeed-zero", zero_stage=3, offload="full", offload_path="/nvme")
    experiment = replace(asked(), engine=nvme)
    assert "8 links" in refusal(experiment, Known(alike=ALIKE))
    words = refusal(asked(job=Job(time="1:00:00", max_gpu_hours=0.5)), Known(alike=ALIKE))
    assert "job.max_gpu_hours = 0.5 are 225 s on 8 GPUs" in words
    assert "169 s to save" in words


def test_a_budget_smaller_than_the_forecast_is_warned_of_with_the_step_it_ends_near():
    outlook = look_ahead(asked(job=Job(time="1:00:00", max_gpu_hours=29.0)), Known(alike=ALIKE), False)
    assert outlook.total is not None
    near = int(10_000 * 29 / outlook.total.gpu_hours)
    assert any("--max-gpu-hours 29 is less" in line and f"{near:,} of 10,000" in line for line in outlook.lines)
    enough = look_ahead(asked(job=Job(time="1:00:00", max_gpu_hours=59.0)), Known(alike=ALIKE), False)
    assert not any("warning" in line for line in enough.lines)


def test_a_budget_that_holds_no_save_is_refused_even_where_no_step_time_is_known():
    """120 s of lead on 8 GPUs are 0.267 GPU-hours."""
    assert "120 s to save" in refusal(asked(job=Job(max_gpu_hours=0.26)), Known())
    assert look_ahead(asked(job=Job(max_gpu_hours=0.27)), Known(), False).total is None


def test_what_is_spent_of_a_budget_is_not_there_any_more():
    """240 s of start, step and save are 0.53 GPU-hours on 8 GPUs."""
    resolved = asked(job=Job(time="1:00:00", max_gpu_hours=59.0))
    outlook = look_ahead(resolved, Known(alike=ALIKE, spent=10.0), False)
    assert any("--max-gpu-hours 59, of which 10 are spent, is less" in line for line in outlook.lines)
    assert "59, of which 58.9 are spent, are 45 s on 8 GPUs" in refusal(resolved, Known(alike=ALIKE, spent=58.9))


def test_a_local_run_without_a_limit_has_one_link_and_no_signal():
    here = ClusterProfile(name="local", scheduler="local", gpus_per_node=8, chain="none")
    outlook = look_ahead(asked(here, job=Job()), Known(alike=ALIKE), False)
    assert outlook.links == 1
    assert "GPU-hours" not in outlook.lines[0]
    assert not any("signal" in line for line in outlook.lines)
    assert "8 links of 1:00:00" in refusal(asked(here), Known(alike=ALIKE)), "its own limit is kept there, too"


def test_a_long_singleton_chain_is_not_sent_all_at_once():
    outlook = look_ahead(asked(replace(SITE, chain="singleton"), steps=100_000), Known(alike=ALIKE), False)
    assert outlook.total is not None
    assert outlook.total.links > outlook.links == 50
    assert any("50 jobs are sent at once" in line for line in outlook.lines)


def test_a_loss_to_reach_is_a_bound():
    outlook = look_ahead(asked(until_loss=2.0), Known(alike=ALIKE), False)
    assert "fewer if the loss is reached before" in outlook.lines[0]


def test_spare_nodes_cost_what_they_are():
    plain = look_ahead(asked(), Known(alike=ALIKE), False)
    spared = look_ahead(asked(job=Job(time="1:00:00", spare_nodes=1, preflight=True)), Known(alike=ALIKE), False)
    assert plain.total is not None
    assert spared.total is not None
    assert spared.total.gpu_hours == pytest.approx(plain.total.gpu_hours * 12 / 8)
    assert "on 12 GPUs" in spared.lines[0]


@pytest.mark.parametrize("hours", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_number_above_nothing(hours):
    with pytest.raises(ConfigError, match=r"job\.max_gpu_hours is"):
        asked(job=Job(max_gpu_hours=hours))
