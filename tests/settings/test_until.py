"""How far a run is to train, as the command line says it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.batch import Batch
from hpc_gpt.settings.until import Until, check_against, parse_until

BATCH = Batch(micro_batch=2, micro_batches=4, global_batch=16)


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


@pytest.mark.parametrize(
    "texts",
    [
        ["30e9"],
        ["epochs=3"],
        ["tokens="],
        ["tokens=3.5"],
        ["tokens=nan"],
        ["tokens=inf"],
        ["tokens=-1"],
        ["steps=0"],
        ["steps=1e300"],
        ["loss=0"],
        ["loss=-1"],
        ["loss=low"],
        ["steps=3", "steps=4"],
        ["steps=3", "tokens=4"],
    ],
)
def test_what_is_no_wish_is_refused_with_a_word(texts):
    with pytest.raises(ConfigError) as fault:
        parse_until(texts)
    assert texts[-1].partition("=")[0] in str(fault.value)
    assert fault.value.hint


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
    assert f"{steps:,} steps" in until.words(batch, seq)


def test_settings_and_words():
    assert Until(steps=7, loss=2.5).settings(BATCH, 32) == {"steps": 7, "until_loss": 2.5}
    assert Until(steps=7, loss=2.5).words(BATCH, 32) == "7 steps, 3,584 tokens, until the loss is 2.5 or less"
    assert Until().settings(BATCH, 32) == {}


@pytest.mark.parametrize(
    ("until", "given"),
    [(Until(steps=7), {"train.steps": 8}), (Until(tokens=512 * 9), {"train.steps": 8}),
     (Until(loss=3.0), {"train.until_loss": 2.0})],
)  # fmt: skip
def test_two_ends_on_one_command_line_are_refused_with_both(until, given):
    with pytest.raises(ConfigError, match=f"{next(iter(given.values()))}"):
        check_against(until, until.settings(BATCH, 32), given)


def test_the_same_end_twice_is_no_contradiction():
    until = Until(tokens=512 * 8)
    check_against(until, until.settings(BATCH, 32), {"train.steps": 8, "layout.tp": 2})
