"""The forecast of a job chain: its arithmetic, where each figure comes from, what is refused, and its words."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, Job, LayoutRequest, Model, Train, limit_s
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.words import counted, show_duration
from hpc_gpt.launcher.launch.forecast import (
    LEAVE_S,
    ChainLength,
    ForecastFacts,
    Pace,
    chain_length,
    make_forecast,
    rounded_up,
    signal_lead_s,
    steps_of_job,
    time_limit_text,
)
from hpc_gpt.launcher.launch.past_timings import MeasuredRun

SECONDS = st.floats(0, 500, allow_nan=False)
PACES = st.builds(
    Pace,
    step_s=st.floats(1e-3, 100),
    save_s=SECONDS,
    eval_s=SECONDS,
    start_s=SECONDS,
    save_every=st.integers(0, 1000),
    eval_every=st.integers(0, 1000),
    hold_s=st.none() | SECONDS,
)
STEPS = st.integers(1, 10**6)
LIMITS = st.floats(60, 30 * 86400)


@given(STEPS, PACES, st.integers(1, 4096), LIMITS)
def test_the_jobs_have_room_for_the_work_and_none_is_idle(steps, pace, gpus, walltime_s):
    lead_s = signal_lead_s(pace)
    found = chain_length(steps, pace, gpus, walltime_s, lead_s)
    if found is None:
        assert walltime_s - lead_s - pace.start_s < pace.train_s(1)
        return
    work = pace.train_s(steps) + found.jobs * (pace.start_s + pace.save_s)
    assert found.jobs * walltime_s >= work * (1 - 1e-9)
    assert found.jobs * found.job_steps >= steps > (found.jobs - 1) * found.job_steps
    assert found.total_s == pytest.approx(work)
    assert found.job_s <= walltime_s * (1 + 1e-9)
    assert found.gpu_hours == pytest.approx(gpus * found.total_s / 3600)


@given(STEPS, STEPS, PACES, LIMITS, LIMITS, st.floats(1, 10))
def test_more_work_takes_no_less_and_a_longer_job_no_more_jobs(steps, more, pace, limit, longer, slower):
    lead_s = signal_lead_s(pace)
    base = chain_length(steps, pace, 8, limit, lead_s)
    if base is None:
        return
    bigger = chain_length(steps + more, pace, 8, limit, lead_s)
    assert bigger is not None
    assert bigger.jobs >= base.jobs
    assert bigger.total_s > base.total_s
    roomier = chain_length(steps, pace, 8, limit + longer, lead_s)
    assert roomier is not None
    assert roomier.jobs <= base.jobs
    assert roomier.total_s <= base.total_s * (1 + 1e-9)
    slowed = chain_length(steps, replace(pace, step_s=pace.step_s * slower), 8, limit, lead_s)
    assert slowed is None or (slowed.jobs >= base.jobs and slowed.total_s >= base.total_s * (1 - 1e-9))
    wider = chain_length(steps, pace, 16, limit, lead_s)
    assert wider is not None
    assert wider.gpu_hours == pytest.approx(2 * base.gpu_hours)


@given(PACES)
def test_the_lead_is_enough_for_what_comes_after_the_signal(pace):
    """The worst: it comes as a step begins, then what is due at the edge, the step of the agreement, the save."""
    due = pace.eval_s * (pace.eval_every > 0) + pace.save_s * (pace.save_every > 0)
    assert signal_lead_s(pace) >= 2 * pace.step_s + due + pace.save_s + LEAVE_S
    assert signal_lead_s(replace(pace, save_s=pace.save_s + 10)) >= signal_lead_s(pace) + 20


def test_by_hand():
    """100 s of start, 2 s a step, a save of 50 s every 100 steps, an evaluation of 5 s every 10: 3 s a step in all.

    Of an hour 120 s are lead: 3600 - 120 - 100 = 3380 s are 1126 steps. 10,000 steps are 8 such jobs and 992 steps.
    """
    pace = Pace(2.0, save_s=50, eval_s=5, start_s=100, save_every=100, eval_every=10)
    assert steps_of_job(pace, 3600, 120) == 1126
    assert chain_length(10_000, pace, 16, 3600, 120) == ChainLength(9, 1126, 3528.0, 31_350.0, 16 * 31_350 / 3600)
    assert signal_lead_s(pace) == 4 + 5 + 50 + 100 + 15


@pytest.mark.parametrize(
    ("steps", "jobs"), [(0, 0), (1, 1), (99, 1), (100, 1), (101, 2), (200, 2), (201, 3), (100_000, 1000)]
)
def test_a_job_that_is_full_is_one_job(steps, jobs):
    """(1000 - 0) / 10 = 100 steps a job."""
    found = chain_length(steps, Pace(10.0), 1, 1000, 0)
    assert found is not None
    assert (found.jobs, found.total_s) == (jobs, 10 * steps)


def test_tenths_do_not_cost_a_step():
    """0.3 / 0.1 is 2.999… in floating point."""
    assert (steps_of_job(Pace(0.1), 0.3, 0), steps_of_job(Pace(0.1), 0.7, 0)) == (3, 7)


def test_a_job_without_a_limit_does_all_a_too_short_one_nothing():
    assert chain_length(10**9, Pace(1.0, start_s=60, save_s=10), 1, None, 120) == ChainLength(
        1, 10**9, 10**9 + 70.0, 10**9 + 70.0, (10**9 + 70.0) / 3600
    )
    assert chain_length(1, Pace(1.0), 1, 120, 120) is None
    assert chain_length(1, Pace(1.0, start_s=60), 1, 120, 60) is None


# --- of a run, before it is submitted

SITE = ClusterProfile(name="site", gpus_per_node=4)
ALIKE = MeasuredRun("20261101-a", 8, "tp2-pp2-dp2", 812, 2.0, 50.0, None, 100.0, saves=8)
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
    that 3600 - 169 - 100 = 3331 s are 1332 steps a job; 10,000 are 7 such jobs and 676 steps."""
    forecast = make_forecast(asked(), ForecastFacts(alike=ALIKE), lead_is_given=False, now=NOW)
    assert forecast.total is not None
    assert (forecast.total.jobs, forecast.total.job_steps, forecast.lead_s) == (8, 1332, 169)
    assert (forecast.total.total_s, forecast.jobs) == (8 * 150 + 25_000, 8)
    first = forecast.lines[0]
    assert "8 jobs of 1:00:00 by requeue" in first
    assert f"{8 * 26_200 / 3600:,.4g} GPU-hours on 8 GPUs" in first
    assert "waits in the queue not counted" in first
    told = "\n".join(forecast.lines)
    for words in (
        "step 2 s, measured: median of 812 steps of run 20261101-a",
        "save 50 s, measured: median of 8 saves",
        "start 100 s of each job, measured",
        "signal 169 s ahead",
    ):
        assert words in told


def test_a_prediction_has_a_range_and_an_assumed_save():
    known = ForecastFacts(predicted={"step_s": 2.0, "band": 0.25})
    forecast = make_forecast(asked(), known, lead_is_given=False, now=NOW)
    told = "\n".join(forecast.lines)
    assert "predicted: give or take 25%" in told
    assert "assumed:" in told
    assert "GB/s" in told
    assert "not known, and not counted" in told
    measured = [ForecastFacts(alike=replace(ALIKE, step_s=2.0 * by, save_s=None, start_s=None)) for by in (0.75, 1.25)]
    low, high = (make_forecast(asked(), known, True) for known in measured)
    assert low.total is not None
    assert high.total is not None
    assert f"({low.total.jobs} to {high.total.jobs})" in forecast.lines[0]


def test_a_parents_figures_stand_in_for_a_new_layouts():
    parent = replace(ALIKE, gpus=4, layout="tp2-pp2-dp1", run="parent")
    forecast = make_forecast(asked(), ForecastFacts(done=40, parent=parent), lead_is_given=False, now=NOW)
    told = "\n".join(forecast.lines)
    assert "step 1 s, estimated: 2 s on 4 GPUs as tp2-pp2-dp1 in run parent" in told
    assert "save 50 s, measured" in told
    predicted = make_forecast(asked(), ForecastFacts(40, None, parent, {"step_s": 3.0, "band": 0.1}), False)
    assert "step 3 s, predicted" in "\n".join(predicted.lines)


def test_what_nobody_knows_is_said_with_what_would_make_it_known():
    forecast = make_forecast(asked(), ForecastFacts(no_prediction="not predicted: profile site names no device"), False)
    assert (forecast.total, forecast.jobs, forecast.lead_s) == (None, 1, None)
    told = "\n".join(forecast.lines)
    assert "names no device" in told
    assert "--until steps=20" in told


def test_a_given_lead_stays_and_one_too_short_is_warned_of():
    short = make_forecast(
        asked(job=Job(time="1:00:00", signal_lead_s=60)), ForecastFacts(alike=ALIKE), lead_is_given=True
    )
    assert short.lead_s is None
    assert any("warning: signal 60 s" in line and "169 s" in line for line in short.lines)
    long = make_forecast(
        asked(job=Job(time="1:00:00", signal_lead_s=600)), ForecastFacts(alike=ALIKE), lead_is_given=True
    )
    assert not any("warning" in line for line in long.lines)


def test_without_a_measured_save_the_lead_stays_or_grows():
    unsaved = replace(ALIKE, save_s=None)
    assert make_forecast(asked(), ForecastFacts(alike=unsaved), False).lead_s == SITE.signal_lead_s
    slow = make_forecast(asked(), ForecastFacts(alike=replace(unsaved, step_s=100.0)), False)
    assert slow.lead_s == signal_lead_s_of(100.0) > SITE.signal_lead_s


def signal_lead_s_of(step_s: float) -> int:
    """Of a checkpoint so small that it takes no second."""
    return signal_lead_s(Pace(step_s, save_s=1e-3))


def refusal(resolved: Resolved, known: ForecastFacts) -> str:
    with pytest.raises(ConfigError) as fault:
        make_forecast(resolved, known, lead_is_given=False)
    assert fault.value.hint
    return str(fault.value)


def test_contradictions_are_refused_with_their_numbers():
    assert "train.steps is 40, but the newest checkpoint is of step 40" in refusal(
        asked(steps=40), ForecastFacts(done=40)
    )
    words = refusal(asked(job=Job(time="4:00")), ForecastFacts(alike=ALIKE))
    assert "job.time 4:00 (240 s) has no room" in words
    assert "100 s to start" in words
    assert "169 s ahead" in words
    words = refusal(asked(replace(SITE, chain="none")), ForecastFacts(alike=ALIKE))
    assert "8 jobs of 1:00:00" in words
    assert 'chain = "none"' in words
    nvme = Engine(name="deepspeed-zero", zero_stage=3, offload="full", offload_path="/nvme")
    experiment = replace(asked(), engine=nvme)
    assert "8 jobs" in refusal(experiment, ForecastFacts(alike=ALIKE))
    words = refusal(asked(job=Job(time="1:00:00", max_gpu_hours=0.5)), ForecastFacts(alike=ALIKE))
    assert "job.max_gpu_hours = 0.5 are 225 s on 8 GPUs" in words
    assert "169 s to save" in words


def test_a_budget_below_the_forecast_is_warned_of_with_its_step():
    forecast = make_forecast(asked(job=Job(time="1:00:00", max_gpu_hours=29.0)), ForecastFacts(alike=ALIKE), False)
    assert forecast.total is not None
    near = int(10_000 * 29 / forecast.total.gpu_hours)
    assert any("--max-gpu-hours 29 is less" in line and f"{near:,} of 10,000" in line for line in forecast.lines)
    enough = make_forecast(asked(job=Job(time="1:00:00", max_gpu_hours=59.0)), ForecastFacts(alike=ALIKE), False)
    assert not any("warning" in line for line in enough.lines)


def test_a_budget_that_holds_no_save_is_refused_in_any_case():
    """120 s of lead on 8 GPUs are 0.267 GPU-hours."""
    assert "120 s to save" in refusal(asked(job=Job(max_gpu_hours=0.26)), ForecastFacts())
    assert make_forecast(asked(job=Job(max_gpu_hours=0.27)), ForecastFacts(), False).total is None


def test_what_is_spent_of_a_budget_is_not_there_any_more():
    """240 s of start, step and save are 0.53 GPU-hours on 8 GPUs."""
    resolved = asked(job=Job(time="1:00:00", max_gpu_hours=59.0))
    forecast = make_forecast(resolved, ForecastFacts(alike=ALIKE, spent=10.0), False)
    assert any("--max-gpu-hours 59, of which 10 are spent, is less" in line for line in forecast.lines)
    assert "59, of which 58.9 are spent, are 45 s on 8 GPUs" in refusal(
        resolved, ForecastFacts(alike=ALIKE, spent=58.9)
    )


def test_a_local_run_without_a_limit_has_one_link_and_no_signal():
    here = ClusterProfile(name="local", scheduler="local", gpus_per_node=8, chain="none")
    forecast = make_forecast(asked(here, job=Job()), ForecastFacts(alike=ALIKE), False)
    assert forecast.jobs == 1
    assert "GPU-hours" not in forecast.lines[0]
    assert not any("signal" in line for line in forecast.lines)
    assert "8 jobs of 1:00:00" in refusal(asked(here), ForecastFacts(alike=ALIKE)), "its own limit is kept there, too"


def test_a_long_singleton_chain_is_not_sent_all_at_once():
    forecast = make_forecast(asked(replace(SITE, chain="singleton"), steps=100_000), ForecastFacts(alike=ALIKE), False)
    assert forecast.total is not None
    assert forecast.total.jobs > forecast.jobs == 50
    assert any("50 jobs are submitted at once" in line for line in forecast.lines)


def test_a_loss_to_reach_is_a_bound():
    forecast = make_forecast(asked(until_loss=2.0), ForecastFacts(alike=ALIKE), False)
    assert "fewer if the loss is reached before" in forecast.lines[0]


def test_spare_nodes_cost_what_they_are():
    plain = make_forecast(asked(), ForecastFacts(alike=ALIKE), False)
    spared = make_forecast(
        asked(job=Job(time="1:00:00", spare_nodes=1, preflight=True)), ForecastFacts(alike=ALIKE), False
    )
    assert plain.total is not None
    assert spared.total is not None
    assert spared.total.gpu_hours == pytest.approx(plain.total.gpu_hours * 12 / 8)
    assert "on 12 GPUs" in spared.lines[0]


@pytest.mark.parametrize("hours", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_number_above_nothing(hours):
    with pytest.raises(ConfigError, match=r"job\.max_gpu_hours is"):
        asked(job=Job(max_gpu_hours=hours))


# --- in words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.9123, "0.912 s"), (95, "95 s"), (599, "599 s"), (600, "10 min"), (12_000, "3 h 20 min"), (968_400, "11 d 5 h")],
)
def test_durations(seconds, words):
    assert show_duration(seconds) == words


@given(st.floats(0.1, 1e7))
def test_a_limit_is_read_back_by_sbatchs_rule_and_is_long_enough(seconds):
    limit = limit_s(time_limit_text(seconds))
    assert limit is not None
    assert seconds <= limit < seconds + 60 or limit == 60


@given(st.floats(1e-6, 1e9))
def test_what_is_rounded_up_is_enough_and_hardly_more(hours):
    assert hours * (1 - 1e-5) <= float(rounded_up(hours)) <= hours * 1.02


def test_counts():
    assert (counted(1, "job"), counted(1200, "job")) == ("1 job", "1,200 jobs")
