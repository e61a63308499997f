"""The forecast of a job chain: its arithmetic, where each figure comes from, what is refused, and its words."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, Job, LayoutRequest, Model, Train, limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.forecast import (
    LEAVE_S,
    ForecastFacts,
    Pace,
    chain_length,
    make_forecast,
    rounded_up,
    signal_lead_s,
    steps_of_job,
    time_limit_text,
)
from hpc_gpt.reader.runs.timings import MeasuredRun

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


# --- of a run, before it is submitted

SITE = ClusterProfile(name="site", gpus_per_node=4)
ALIKE = MeasuredRun("20261101-a", 2.0, 50.0, None, 100.0)
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


def hour(**more) -> Job:
    return Job(time="1:00:00", **more)


# 2.5 s a step with its share of saves. Two steps, a save between them, two saves and 15 s are a lead of 169 s, so that
# 3600 - 169 - 100 = 3331 s are 1332 steps a job; 10,000 are 7 such jobs and 676 steps: 8 x 150 + 25,000 s.
AS_RUN, WAITS = "as fast as run 20261101-a, done by 2023-11-15", "UTC, waits in the queue not counted"
EIGHT = f"forecast: 8 jobs of 1:00:00 by requeue, 7 h 17 min of work {AS_RUN} 05:30 {WAITS}"
HOURS, LEAD = "\n  58.22 GPU-hours on 8 GPUs", "; signal 169 s ahead of the limit"
KNOWN = ForecastFacts(alike=ALIKE)
HERE = ClusterProfile(name="local", scheduler="local", gpus_per_node=8, chain="none")
# {what: (the run, what is known, whether the lead is given, its lead and the jobs sent at once, its lines)}
FORECASTS = {
    "measured": (asked(), KNOWN, False, (169, 8), EIGHT + HOURS + LEAD),
    "all of it measured": (
        asked(eval_every=100, save_every=50),
        ForecastFacts(alike=replace(ALIKE, hold_s=5.0, eval_s=7.0)),
        False,
        (176, 7),
        f"forecast: 7 jobs of 1:00:00 by requeue, 6 h 19 min of work {AS_RUN} 04:32 {WAITS}"
        "\n  50.56 GPU-hours on 8 GPUs; signal 176 s ahead of the limit",
    ),
    "predicted": (
        asked(eval_every=100),
        ForecastFacts(predicted={"step_s": 2.0, "band": 0.25}),
        False,
        (120, 6),
        "forecast: 6 jobs of 1:00:00 by requeue, 5 h 38 min of work as predicted, done by 2023-11-15 03:51 "
        + WAITS
        + "\n  45.04 GPU-hours on 8 GPUs; signal 120 s ahead of the limit",
    ),
    "not known": (
        asked(job=Job(max_gpu_hours=0.27)),
        ForecastFacts(no_prediction="no device"),
        False,
        (None, 1),
        "forecast: not known: no run of these settings has measured a step, and no device"
        "\n  known after the first job, or after submit --until steps=20 with the same options",
    ),
    "too short a lead": (
        asked(job=hour(signal_lead_s=60)),
        KNOWN,
        True,
        (None, 8),
        f"{EIGHT}{HOURS}; signal 60 s ahead of the limit"
        "\n  warning: two steps, the work between them, two saves and 15 s need 169 s after the signal: with 60 s the "
        "last save may be lost",
    ),
    "a long lead": (
        asked(job=hour(signal_lead_s=600)),
        KNOWN,
        True,
        (None, 9),
        f"forecast: 9 jobs of 1:00:00 by requeue, 7 h 19 min of work {AS_RUN} 05:32 {WAITS}"
        "\n  58.56 GPU-hours on 8 GPUs; signal 600 s ahead of the limit",
    ),
    "beyond its budget": (
        asked(job=hour(max_gpu_hours=29.0)),
        KNOWN,
        False,
        (169, 8),
        f"{EIGHT}\n  58.22 GPU-hours on 8 GPUs, budget 29{LEAD}"
        "\n  warning: --max-gpu-hours 29 is less: the run saves and ends as budget near step 4,980 of 10,000",
    ),
    "a budget in part": (
        asked(job=hour(max_gpu_hours=59.0)),
        ForecastFacts(alike=ALIKE, spent=10.0),
        False,
        (169, 8),
        f"{EIGHT}\n  58.22 GPU-hours on 8 GPUs, budget 59{LEAD}"
        "\n  warning: --max-gpu-hours 59 (10 are spent) is less: the run saves and ends as budget near "
        "step 8,416 of 10,000",
    ),
    "within its budget and minutes": (
        asked(job=hour(max_gpu_hours=59.0), minutes=417.0),
        KNOWN,
        False,
        (169, 8),
        f"{EIGHT}\n  58.22 GPU-hours on 8 GPUs, budget 59{LEAD}",
    ),
    "beyond its minutes, no saves": (
        asked(save_every=0, minutes=333.0),
        KNOWN,
        False,
        (119, 6),
        f"forecast: 6 jobs of 1:00:00 by requeue, 5 h 48 min of work {AS_RUN} 04:01 {WAITS}"
        "\n  46.44 GPU-hours on 8 GPUs; signal 119 s ahead of the limit"
        "\n  warning: train.minutes = 333 ends it before its last step"
        "\n  warning: no train.save_minutes or train.save_every: a job that fails loses 59 min",
    ),
    "no limit": (
        asked(job=Job()),
        KNOWN,
        False,
        (169, 1),
        f"forecast: 1 job, 6 h 59 min of work {AS_RUN} 05:12 {WAITS}\n  55.89 GPU-hours on 8 GPUs{LEAD}"
        "\n  no --time: the partition's limit holds, which is not known here; the forecast assumes one job",
    ),
    "here": (asked(HERE, job=Job()), KNOWN, False, (120, 1), f"forecast: 1 job, 6 h 59 min of work {AS_RUN} 05:12 UTC"),
    "here, with a limit": (
        asked(HERE, job=Job(time="10:00:00")),
        KNOWN,
        False,
        (169, 1),
        f"forecast: 1 job of 10:00:00, 6 h 59 min of work {AS_RUN} 05:12 UTC\n  signal 169 s ahead of the limit",
    ),
    "singletons": (
        asked(replace(SITE, chain="singleton"), steps=100_000),
        KNOWN,
        False,
        (169, 50),
        "forecast: 76 jobs of 1:00:00 by singleton jobs, 3 d 0 h of work as fast as run 20261101-a, done by "
        f"2023-11-17 22:50 {WAITS}\n  580.9 GPU-hours on 8 GPUs{LEAD}"
        "\n  50 jobs are submitted at once; each later one by the last job",
    ),
    "until a loss": (
        asked(until_loss=2.0),
        KNOWN,
        False,
        (169, 8),
        f"{EIGHT}; that is all 10,000 steps, fewer if the loss is reached before{HOURS}{LEAD}",
    ),
    "spare nodes": (
        asked(job=hour(spare_nodes=1, preflight=True)),
        KNOWN,
        False,
        (169, 8),
        f"{EIGHT}\n  87.33 GPU-hours on 12 GPUs{LEAD}",
    ),
}


@pytest.mark.parametrize(("run", "known", "given", "sent", "lines"), FORECASTS.values(), ids=FORECASTS)
def test_a_forecast_is_said_so(run, known, given, sent, lines, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    forecast = make_forecast(run, known, given, NOW)
    assert "\n".join(forecast.lines).split("\n") == lines.split("\n")
    assert (forecast.lead_s, forecast.jobs) == sent


REFUSED = {
    "no step is left": (
        asked(steps=40),
        ForecastFacts(done=40),
        "train.steps is 40, but the newest checkpoint is from step 40 | give more than 40 steps, 40,960 tokens",
    ),
    "no room for a step": (
        asked(job=Job(time="4:00")),
        KNOWN,
        "job.time 4:00 (240 s) is too short for a step: 100 s to start, 2.5 s for a step with its share of saves, and "
        "the signal 169 s ahead of the limit are 272 s | use --time 00:46:00, ten times that, or more",
    ),
    "no chain": (
        asked(replace(SITE, chain="none")),
        KNOWN,
        'it needs 8 jobs of 1:00:00, but chain = "none" in profile site | use --time 07:17:00 or more, or set '
        'chain = "requeue" or "singleton" in the profile',
    ),
    "a small budget": (
        asked(job=hour(max_gpu_hours=0.5)),
        KNOWN,
        "job.max_gpu_hours = 0.5 leaves 225 s on 8 GPUs, but a job takes 100 s to start, 2 s for a step, and 169 s to "
        "save before its end | use --max-gpu-hours 6.03 or more, ten times that",
    ),
    "a budget of no save": (
        asked(job=Job(max_gpu_hours=0.26)),
        ForecastFacts(),
        "job.max_gpu_hours = 0.26 leaves 117 s on 8 GPUs, but a job takes 120 s to save before its end | use "
        "--max-gpu-hours 2.67 or more, ten times that",
    ),
    "a budget that is spent": (
        asked(job=hour(max_gpu_hours=59.0)),
        ForecastFacts(alike=ALIKE, spent=58.9),
        "job.max_gpu_hours = 59 (58.9 are spent) leaves 45 s on 8 GPUs, but a job takes 100 s to start, 2 s "
        "for a step, and 169 s to save before its end | use --max-gpu-hours 65 or more, which leaves ten times that",
    ),
}


@pytest.mark.parametrize(("run", "known", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_reach_its_end_is_refused(run, known, words):
    with pytest.raises(ConfigError) as fault:
        make_forecast(run, known, lead_is_given=False)
    assert f"{fault.value} | {fault.value.hint}" == words


def test_without_a_measured_save_the_lead_stays_or_grows():
    unsaved = replace(ALIKE, save_s=None)
    assert make_forecast(asked(), ForecastFacts(alike=unsaved), False).lead_s == SITE.signal_lead_s
    slow = make_forecast(asked(), ForecastFacts(alike=replace(unsaved, step_s=100.0)), False)
    assert slow.lead_s == signal_lead_s_of(100.0) > SITE.signal_lead_s


def signal_lead_s_of(step_s: float) -> int:
    """Of a checkpoint so small that it takes no second."""
    return signal_lead_s(Pace(step_s, save_s=1e-3))


@pytest.mark.parametrize("hours", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_number_above_nothing(hours):
    with pytest.raises(ConfigError, match=r"job\.max_gpu_hours is"):
        asked(job=Job(max_gpu_hours=hours))


# --- in words


@given(st.floats(0.1, 1e7))
def test_a_limit_is_read_back_by_sbatchs_rule_and_is_long_enough(seconds):
    limit = limit_s(time_limit_text(seconds))
    assert limit is not None
    assert seconds <= limit < seconds + 60 or limit == 60


@given(st.floats(1e-6, 1e9))
def test_what_is_rounded_up_is_enough_and_hardly_more(hours):
    assert hours * (1 - 1e-5) <= float(rounded_up(hours)) <= hours * 1.02
