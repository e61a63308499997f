"""How far a run is to train, as the command line says it; and what is said before of the time that its jobs have."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.layout import Batch
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.until import Until, length_settings, parse_until, short_of_time
from hpc_gpt.reader.runs.timings import MeasuredRun
from tests.cli.command import in_process
from tests.made_runs import unsubmitted_run

BATCH = Batch(micro_batch=2, micro_batches=4, global_batch=16)
STEP = MeasuredRun("a-run", step_s=10.0, save_s=1.0, eval_s=None, start_s=300.0)


def run() -> Resolved:
    """A run of that batch and 32 tokens a sample."""
    sizes = {"layout.micro_batch": 2, "layout.micro_batches": 4, "layout.global_batch": 16, "layout.dp": 2}
    return resolve(
        load_experiment("demo", {**sizes, "layout.pp": 1, "layout.tp": 2, "model.seq": 32}), load_profile("local")
    )


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["tokens=30e9"], Until(tokens=30_000_000_000)),
        (["tokens = 1_000_000"], Until(tokens=1_000_000)),
        (["steps=5000"], Until(steps=5000)),
        (["steps=5e3", "loss=2.9"], Until(steps=5000, loss=2.9)),
        ([], Until()),
    ],
)
def test_what_is_asked_for(texts, wanted):
    assert parse_until(texts) == wanted


@given(st.integers(1, 10**14), st.integers(1, 4096), st.integers(1, 8192))
def test_the_steps_train_the_tokens_and_not_a_whole_step_more(tokens, global_batch, seq):
    batch = Batch(micro_batch=1, micro_batches=1, global_batch=global_batch)
    until = Until(tokens=tokens)
    if tokens > 10**12 * global_batch * seq:
        with pytest.raises(ConfigError):
            until.settings(batch, seq)
        return
    steps = until.settings(batch, seq)["steps"]
    assert (steps - 1) * global_batch * seq < tokens <= steps * global_batch * seq
    assert steps == math.ceil(tokens / (global_batch * seq)) or tokens > 2**53
    assert f"{steps:,} steps" in until.notes(batch, seq)[0]


def test_settings_and_words():
    assert Until(steps=7, loss=2.5).settings(BATCH, 32) == {"steps": 7, "until_loss": 2.5}
    assert Until(steps=7, loss=2.5).notes(BATCH, 32) == ["until: 7 steps, 3,584 tokens, until the loss is 2.5 or less"]
    assert Until().settings(BATCH, 32) == {}


def test_the_same_end_twice_is_no_contradiction():
    until = Until(tokens=512 * 8)
    assert length_settings(until, run(), {"train.steps": 8, "layout.tp": 2}) == {"steps": 8}


@pytest.mark.parametrize(
    ("time", "lead", "measured", "words"),
    [
        ("10:00", 240, None, ""),
        ("10:00", 360, None, "job.signal_lead_s = 360 leaves a job 240 s of its 600 s"),
        ("10:00", 240, STEP, ""),
        ("10:00", 280, STEP, "leaves a job 320 s of its 600 s before it must save, and a start and 3 steps took 330 s"),
        (None, 360, STEP, ""),
    ],
)
def test_a_lead_that_leaves_too_little_is_said(time, lead, measured, words) -> None:
    settings = {"job.time": time, "job.signal_lead_s": lead}
    resolved = resolve(load_experiment("demo", settings), load_profile("local"))
    earlier: Any = SimpleNamespace(newest_alike=lambda _: measured)
    said = "".join(short_of_time(resolved, earlier))
    assert words in said
    assert bool(words) == bool(said)


def test_submit_says_it_and_render_does_not(own_folders) -> None:
    unsubmitted_run()
    line = "warning: job.signal_lead_s = 30 leaves a job 20 s of its 50 s"
    arguments = ("demo", "--cluster", "local", "-t", "0:50")
    assert line in in_process("submit", *arguments, "--dry-run").stderr
    assert line not in in_process("render", *arguments).stderr
