"""The equality table: every engine, layout and technique trains the same model as one plain PyTorch process."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.layout import Layout
from tests.distributed.equality_cases import Case, plainer
from tests.distributed.equality_factors import ENGINES, VALUES, combination_of, judged, pairs_of
from tests.distributed.equality_table import (
    BROKEN,
    EXACT,
    FP8,
    HALF,
    INDUCTOR,
    RECOMPUTED,
    SHORT_BROKEN,
    table_task,
    too_long,
)
from tests.distributed.plain_fp8 import fp8_reference
from tests.distributed.ranks import Launch, Task
from tests.distributed.reference import initial_weights, reference


@dataclass
class Deviation:
    """How far a run is from the reference, at worst over its steps and weights."""

    loss: float
    norm: float
    weights: float
    k_bias: float

    def within(self, loss: float, norm: float, weights: float) -> bool:
        """Whether it keeps the limits; not a number keeps none. The K bias has its own line below."""
        return self.loss <= loss and self.norm <= norm and self.weights <= weights

    def exact(self) -> bool:
        """The limits of fp32: losses 2e-6 and weights 1e-5 absolute, norms 1e-5 relative."""
        return self.within(2e-6, 1e-5, 1e-5)


def deviation(case: Case, figures: dict[str, Any], weights: dict[str, Tensor]) -> Deviation:
    plain = reference(case.resolved, idle=case.idle) if case.matmul == "none" else fp8_reference(case)
    losses = [*zip([*figures["losses"], figures["loss_eval"]], [*plain.losses, plain.loss_eval], strict=True)]
    losses += [] if plain.bpb is None else [(figures["bpb"], plain.bpb)]
    assert weights.keys() == plain.weights.keys()
    # A checkpoint has no rows past the vocabulary.
    far = {name: (weight - plain.weights[name][: len(weight)]).abs() for name, weight in weights.items()}
    k_bias = 0.0
    for name, difference in far.items():
        if name.endswith("qkv.bias") and case.model in ("gpt2", "uneven", "odd"):
            third = len(difference) // 3
            k_bias = worst([k_bias, float(difference[third : 2 * third].max())])
            far[name] = torch.cat([difference[:third], difference[2 * third :]])
    return Deviation(
        loss=worst([abs(ours - theirs) for ours, theirs in losses]),
        norm=worst([abs(ours / theirs - 1) for ours, theirs in zip(figures["norms"], plain.norms, strict=True)]),
        weights=worst([float(difference.max()) for difference in far.values()]),
        k_bias=k_bias,
    )


def worst(values: list[float]) -> float:
    """The largest, or not a number where one is not."""
    return float(torch.tensor(values, dtype=torch.float64).max())


LaunchOf = Callable[[Task], Launch]
Table = Callable[[str], None]


def compare(case: Case, launch_of: LaunchOf, table: Table) -> tuple[Deviation, dict[str, Any]]:
    if case in INDUCTOR and shutil.which("g++") is None:
        pytest.skip("Inductor compiles with g++, which is not here")
    figures = launch_of(table_task(case)).figures(table_task(case))
    far = deviation(case, figures, weights_of(case, launch_of))
    table(
        f"{case.name:64s} loss {far.loss:.1e}  norm {far.norm:.1e}  weights {far.weights:.1e}  "
        f"K bias {far.k_bias:.1e}  {figures['seconds']:.1f} s"
    )
    return far, figures


def check_silence(case: Case, launch_of: LaunchOf) -> None:
    """Nothing is printed; torch says where it cannot compile the hooks by which ZeRO-3 gathers weights."""
    if case.engine.compile == "none" or case.resolved.engine.zero_stage != 3:
        assert launch_of(table_task(case)).output(table_task(case)) == ""


def weights_of(case: Case, launch_of: LaunchOf) -> dict[str, Tensor]:
    """The whole model's after the case's last step."""
    weights: dict[str, Tensor] = torch.load(launch_of(table_task(case)).folder / f"{case.file}.pt")
    return weights


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_fp32_equals_one_plain_process(case: Case, launch_of: LaunchOf, table: Table) -> None:
    far, figures = compare(case, launch_of, table)
    assert far.exact(), far
    # Its true gradient is zero; Adam amplifies what is left of it.
    assert far.k_bias <= 1e-4
    check_the_rest(case, figures)
    check_silence(case, launch_of)


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_half_is_near(case: Case, launch_of: LaunchOf, table: Table) -> None:
    far, figures = compare(case, launch_of, table)
    assert far.within(loss=1e-2, norm=1e-2 if case.dtype == "fp16" else 5e-2, weights=1e-2), far
    check_the_rest(case, figures)
    check_silence(case, launch_of)


@pytest.mark.parametrize("case", FP8, ids=lambda case: case.name)
def test_fp8_products_are_a_plain_loops_with_the_same_shards(case: Case, launch_of: LaunchOf, table: Table) -> None:
    far, figures = compare(case, launch_of, table)
    assert far.within(loss=2e-3, norm=3e-2, weights=5e-3), far
    check_the_rest(case, figures)
    if case.optimizer != "sgd":
        return
    weights, whole = weights_of(case, launch_of), replace(case, layout=Layout(1, 1, case.layout.dp))
    apart, of_whole = (updates_apart(fp8_reference(one).weights, weights, case) for one in (case, whole))
    table(f"{case.name:64s} updates {apart:.1%} apart, {of_whole:.1%} from those of whole operands")
    assert apart < 0.02
    assert apart < 0.9 * of_whole or whole == case


def updates_apart(plain: dict[str, Tensor], weights: dict[str, Tensor], case: Case) -> float:
    """How far the sum of all updates is from the plain loop's, as a part of it: the losses of so small a model hardly
    depend on the products' format, or on what is quantised together."""
    initial = initial_weights(case.resolved.model, case.resolved.train.seed)
    apart, whole = (
        sum(float((one - plain[name][: len(one)]).double().square().sum()) for name, one in other.items())
        for other in (weights, initial)
    )
    return math.sqrt(apart / whole)


def check_the_rest(case: Case, figures: dict[str, Any]) -> None:
    """Copies, steps, rates, size, first weights and memory."""
    shape = case.resolved.model
    assert figures["apart"] == []
    assert not any(figures["skipped"])
    steps = case.resolved.train.steps
    assert (figures["step"], figures["parameters"], figures["kept_outputs"]) == (steps, shape.params, 0)
    assert figures["lrs"] == pytest.approx(reference(case.resolved, idle=case.idle).lrs, rel=1e-12)
    if case.dtype == "fp32":
        initial = initial_weights(shape, case.resolved.train.seed)
        sums = {name: float(weight.double().sum()) for name, weight in initial.items()}
        assert figures["initial"] == pytest.approx(sums, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_missing_collective_or_wrong_scale_fails(case: Case, launch_of: LaunchOf, table: Table) -> None:
    far, _ = compare(case, launch_of, table)
    assert not far.exact(), far


@pytest.mark.parametrize("recomputed", RECOMPUTED, ids=lambda case: case.name)
def test_recomputation_changes_nothing(recomputed: Case, launch_of: LaunchOf) -> None:
    found = [launch_of(table_task(case)).figures(table_task(case)) for case in (recomputed, plainer(recomputed))]
    again, once = ([one["losses"], one["norms"]] for one in found)
    assert again == once


def test_every_axis_and_fault_of_an_engine_is_short() -> None:
    assert {case.engine.name for case in SHORT_BROKEN} == set(ENGINES)
    for name in ENGINES:
        layouts = [case.layout for case in EXACT if case.engine.name == name and not too_long(case)]
        split = {axis for axis in ("tp", "pp", "dp", "cp") if any(getattr(one, axis) > 1 for one in layouts)}
        assert split == engines()[name].axes - {"ep"} | {"dp"}


@pytest.mark.long  # it asks what goes together some hundred thousand times
@pytest.mark.parametrize("engine", ENGINES)
def test_every_pair_of_values_an_engine_can_run_is_a_case(engine: str, table: Table) -> None:
    legal, illegal = judged(engine)
    every = [combination_of(case) for case in EXACT]
    assert set().union(*(one.items() for one in every)) >= set(VALUES), "a value that no engine can run"
    cases = [one for one in every if one["engine"] == engine]
    missing = legal.keys() - set().union(*map(pairs_of, cases))
    assert not missing, "python -m tests.distributed.equality_factors"
    table(f"{engine}: {len(legal)} pairs of values in {len(cases)} cases")
    for pair, reason in illegal.items():
        names = " with ".join(sorted(f"{name} {value}" for name, value in pair))
        table(f"{engine} cannot run: {names}: {reason.splitlines()[0]}")
