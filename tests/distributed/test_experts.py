"""Mixtures of experts in every engine, layout and technique, against transformers' classes in one plain process, with a
balance of the reference's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.engines import engines
from tests.distributed.equality_cases import Case, plainer, zero
from tests.distributed.equality_table import table_task
from tests.distributed.experts_table import (
    BROKEN_EXPERTS,
    DDP,
    DP2,
    EXPERTS,
    FSDP,
    NEAR_EXPERTS,
    PP2,
    RECOMPUTED,
    TEN,
    TP2,
    of_experts,
    of_steps,
)
from tests.distributed.mixtures import LEAST_GAP
from tests.distributed.ranks import Launch, Task, each
from tests.distributed.reference import reference
from tests.distributed.test_equality import Table, check_the_rest, compare
from tests.distributed.test_promises import poisoned
from tests.distributed.trainings import build, digest, everyone, new_folder, save_now, train

pytest.importorskip("transformers")

LaunchOf = Callable[[Task], Launch]
Found = Callable[[Task], Any]
CLOSE = "a close decision: `python -m tests.distributed.experts_table` finds another seed"


def flipped(case: Case, figures: dict[str, Any]) -> str:
    """Whether the run routed as the reference did: one token elsewhere moves a step's balance loss by more."""
    plain = reference(case.resolved, idle=case.idle).balance
    for step, (ours, theirs) in enumerate(zip(figures["balance"], plain, strict=False)):
        if abs(ours[0] - theirs[0]) > 1e-5:
            return f"in step {step} a decision flipped: balance loss, load and dead experts {ours}, not {theirs}"
    return "no decision flipped" if plain else "unknown whether a decision flipped"


@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: case.name)
def test_experts_equal_one_plain_process(case: Case, launch_of: LaunchOf, table: Table) -> None:
    plain = reference(case.resolved, idle=case.idle)
    assert plain.gap > LEAST_GAP, CLOSE
    far, figures = compare(case, launch_of, table)
    assert far.exact(), f"{far}: {flipped(case, figures)}"
    has_ours = engines()[case.engine.name].trains_our_model
    assert len(figures["balance"]) == case.resolved.train.steps * has_ours
    for step, (ours, theirs) in enumerate(zip(figures["balance"], plain.balance, strict=False)):
        assert ours == pytest.approx(theirs, rel=1e-5), f"balance loss, load and dead experts in step {step}"
    assert all(dead == case.idle * len(plain.biases) for *_, dead in plain.balance) or not case.idle
    check_the_rest(case, figures)


@pytest.mark.parametrize("case", NEAR_EXPERTS, ids=lambda case: case.name)
def test_experts_in_half_are_near(case: Case, launch_of: LaunchOf, table: Table) -> None:
    far, figures = compare(case, launch_of, table)
    assert far.within(loss=1e-2, norm=5e-2, weights=1e-2), far
    check_the_rest(case, figures)


@pytest.mark.parametrize("case", BROKEN_EXPERTS, ids=lambda case: case.name)
def test_what_is_left_out_of_experts_shows(case: Case, launch_of: LaunchOf, table: Table) -> None:
    far, _ = compare(case, launch_of, table)
    assert not far.exact(), far


@pytest.mark.parametrize("recomputed", RECOMPUTED, ids=lambda case: case.name)
def test_recomputed_experts_are_equal_to_the_bit(recomputed: Case, launch_of: LaunchOf) -> None:
    found = [launch_of(table_task(case)).figures(table_task(case)) for case in (recomputed, plainer(recomputed))]
    again, once = ([one[name] for name in ("losses", "norms", "balance", "loss_eval")] for one in found)
    assert again == once


def train_twice(folder: Path, case: Case) -> list[Any]:
    """The figures and weights of two runs that are the same."""
    found = []
    for _ in range(2):
        engine = build(case.resolved)
        found.append([train(engine, case.resolved, range(3)), digest(engine).sums])
    return found


TWICE = [of_experts(DP2, FSDP, "glm4_moe", balance="bias")]
LONG_TWICE = [of_experts(TP2, replace(FSDP, recompute="full"), balance="loss", z_loss=True, dtype="bf16")]


@each(train_twice, TWICE, LONG_TWICE)
def test_the_same_run_of_experts_gives_the_same_bits(task: Task, found: Found) -> None:
    once, again = found(task)
    assert once == again


def biases(engine: Any) -> list[list[float]]:
    """The biases that choose experts, of all layers; ranks with the same layers must have the same."""
    own = [buffer.tolist() for name, buffer in engine.module.named_buffers() if name.endswith("choice_bias")]
    stages: list[Any] = []
    for held in everyone(own):
        if held not in stages:
            stages.append(held)
    return [bias for held in stages for bias in held]


def balance_by_bias(folder: Path, case: Case) -> dict[str, Any]:
    """Ten steps, and the last five again by an engine that read a checkpoint; the biases of each, and after a step that
    is not finite."""
    resolved = of_steps(case.resolved, TEN)
    first = build(resolved)
    figures = train(first, resolved, range(TEN // 2))
    kept = save_now(first, new_folder(folder / f"{case.name} biased"))
    figures += train(first, resolved, range(TEN // 2, TEN))
    second = build(resolved, seed=2)
    second.load(kept)
    resumed = train(second, resolved, range(TEN // 2, TEN))
    found = [biases(first), biases(second)]
    with poisoned(second):
        ((_, _, skipped),) = train(second, resolved, range(1))
    return {"figures": figures, "resumed": resumed, "skipped": skipped, "biases": [*found, biases(second)]}


BIASED = [of_experts(layout, engine, "glm4_moe", balance="bias")
          for layout, engine in ((DP2, DDP), (DP2, FSDP), (PP2, zero(1)))]  # fmt: skip


@each(balance_by_bias, BIASED[:1], BIASED[1:])
def test_biases_of_experts_after_ten_steps(task: Task, found: Found) -> None:
    figures, case = found(task), task.given[0]
    plain = reference(of_steps(case.resolved, TEN), TEN)
    assert plain.gap > LEAST_GAP, CLOSE
    assert [loss for loss, _, _ in figures["figures"]] == pytest.approx(plain.losses, abs=2e-6)
    assert figures["biases"] == [plain.biases] * 3
    assert figures["skipped"]
    assert figures["resumed"] == figures["figures"][TEN // 2 :]
