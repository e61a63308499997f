"""The update beside the next forward pass: the same weights to the bit, in the promised order, and never late."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.tensor_parallel import full_name
from hpc_gpt.settings.experiment import Engine
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.train.engines.ddp import OverlappedUpdate
from hpc_gpt.train.engines.protocol import build_engine
from tests import marked
from tests.distributed.equality_cases import CLIP, LAYERS, Case, micro_batches
from tests.distributed.save_now import save_now

ONE = Layout(1, 1, 1)
LATER = Engine("ddp", overlap_update=True, compile_backend="aot_eager")
PARTS = LAYERS + 2


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def at_once(case: Case) -> Case:
    """The same, with the update at the end of the step."""
    return replace(case, engine=replace(case.engine, overlap_update=False))


def build(case: Case) -> Any:
    return build_engine(case.resolved, torch.device("cpu"))


def train(engine: Any, case: Case, steps: range) -> list[tuple[float, float, bool]]:
    """(loss, norm, skipped) of each step."""
    results = [engine.train_step(iter(micro_batches(case.resolved, 0, step))) for step in steps]
    return [(float(one.loss), float(one.grad_norm), bool(one.skipped)) for one in results]


def numbers(engine: Any) -> dict[str, Tensor]:
    """Copies of the weights, their masters and the optimizer's states, by name."""
    found = {f"weight {full_name(one)}": one.detach().clone() for one in engine.module.parameters()}
    found |= {full_name(one): one.detach().clone() for one in engine._parameters}
    for optimizer in engine._update.optimizers:
        for owner, state in optimizer.state.items():
            found |= {f"{full_name(owner)} {key}": value.clone() for key, value in state.items()}
    return found


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


CASES = [
    *(Case(ONE, LATER, dtype, CLIP, micro_batches=count) for dtype in ("fp32", "bf16", "fp16") for count in (1, 2)),
    *(Case(ONE, LATER, dtype, CLIP, optimizer_mode="foreach") for dtype in ("fp32", "bf16")),
    Case(ONE, LATER, "bf16", CLIP, optimizer_mode="for-loop"),
    Case(ONE, LATER, "fp16", optimizer="sgd", tied=False),
    Case(ONE, replace(LATER, recompute="full", activation_offload=True), "bf16", CLIP, tied=False),
    Case(ONE, replace(LATER, one_pass_loss=True, fused_bias_gradients=True), "bf16", CLIP),
]
# Of each value some other case has it.
TOO_LONG = [
    *(Case(ONE, LATER, dtype, CLIP, micro_batches=count) for dtype, count in (("fp32", 1), ("bf16", 1), ("fp16", 1))),
    Case(ONE, LATER, "bf16", CLIP, optimizer_mode="foreach"),
]


@pytest.mark.parametrize("case", marked(CASES, TOO_LONG), ids=lambda case: case.name)
def test_every_bit_is_as_if_each_step_updated_at_its_end(case: Case) -> None:
    ours, theirs = build(case), build(at_once(case))
    assert train(ours, case, range(4)) == train(theirs, case, range(4))
    ours.finish()
    check_equal(numbers(ours), numbers(theirs))


@pytest.mark.long(but="each value")
@pytest.mark.parametrize(("dtype", "count"), [("bf16", 1), ("bf16", 2), ("fp16", 1)])
@pytest.mark.parametrize("how", ["none", "edges"])
def test_the_compiled_update_differs_in_the_norms_rounding_alone(dtype: Any, count: int, how: Any) -> None:
    """A part's gradients are in buffers of their own, so the norm is summed in other pieces: without clipping every
    weight is the same. Three graphs do it all."""
    case = Case(ONE, replace(LATER, compile=how), dtype, optimizer_mode="compiled", micro_batches=count)
    theirs = build(at_once(case))
    expected = train(theirs, case, range(4))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = build(case)
    for found, wanted in zip(train(ours, case, range(4)), expected, strict=True):
        assert found[0] == wanted[0]
        assert found[1] == pytest.approx(wanted[1], rel=1e-6)
    if how == "none":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    ours.finish()
    check_equal(numbers(ours), numbers(theirs))
    assert all(group.gradients is None for groups in ours._masters.groups for group in groups)


@pytest.mark.parametrize("mode", [None, "foreach"])
def test_a_step_that_is_not_finite_is_left_out_and_the_next_one_counts(mode: Any) -> None:
    case = Case(ONE, LATER, "bf16", CLIP, optimizer_mode=mode)
    engines = [build(case), build(at_once(case))]
    found = []
    for engine in engines:
        figures = train(engine, case, range(2))
        begin = engine._update.begin

        def poisoned(lr: float, engine: Any = engine, begin: Any = begin) -> Any:
            engine._parameters[0].grad.view(-1)[0] = math.nan
            return begin(lr)

        engine._update.begin = poisoned
        assert train(engine, case, range(2, 3))[0][2]
        engine._update.begin = begin
        found.append(figures + train(engine, case, range(3, 5)))
        engine.finish()
    assert found[0] == found[1]
    check_equal(*map(numbers, engines))


def test_saves_evaluations_and_loads_wait_for_it(tmp_path: Path) -> None:
    case = Case(ONE, LATER, "bf16", CLIP)
    engines = {"ours": build(case), "theirs": build(at_once(case))}
    for kept, engine in engines.items():
        train(engine, case, range(3))
        (tmp_path / kept).mkdir()
        save_now(engine, tmp_path / kept)
    for file in ("weights.pt", "optimizer-00000.pt"):
        ours, theirs = (torch.load(tmp_path / kept / file) for kept in engines)
        check_equal(_flat(ours), _flat(theirs))
    pairs = micro_batches(case.resolved, 0, 9)
    for engine in engines.values():
        train(engine, case, range(3, 4))
    assert len({float(engine.evaluate(iter(pairs), 2)) for engine in engines.values()}) == 1
    # Each loads the other's, and what was due before is not done afterwards.
    train(engines["ours"], case, range(4, 5))
    engines["ours"].load(tmp_path / "theirs")
    engines["theirs"].load(tmp_path / "ours")
    assert len({str(train(engine, case, range(3, 6))) for engine in engines.values()}) == 1
    engines["ours"].finish()
    check_equal(*map(numbers, engines.values()))


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """Weights by name, or moments by name and kind."""
    found = {}
    for name, value in state.items():
        found |= {f"{name} {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found


class Recorded:
    """A model whose parts, updates and streams note what happens, in order."""

    def __init__(self, side: bool) -> None:
        self.said: list[str] = []
        self.model = Gpt(ModelShape(hidden=16, layers=3, heads=2, vocab=61, seq=8), 1)
        self.update = OverlappedUpdate(
            self.model,
            lambda number: self.said.append(f"update {number}"),
            lambda number: self.said.append(f"drop {number}"),
            self if side else None,
        )
        names = {self.model.position: "embeddings", self.model.norm: "norm"}
        names |= {block: f"block {number}" for number, block in enumerate(self.model.blocks, 1)}
        for module, name in names.items():
            forward = module.forward

            def noted(*given: Any, forward: Any = forward, name: str = name) -> Any:
                self.said.append(name)
                return forward(*given)

            module.forward = noted

    def run(self, work: Any) -> int:
        """As of a SideStream."""
        self.said.append("beside:")
        work()
        return int(self.said[-1].split()[1])

    def join(self, event: int) -> None:
        self.said.append(f"wait {event}")

    def forward(self) -> list[str]:
        self.said.clear()
        tokens = torch.zeros((1, 8), dtype=torch.int64)
        self.model(tokens, tokens)
        return self.said


PLAIN = ["embeddings", "block 1", "block 2", "block 3", "norm"]


def test_on_one_stream_a_part_is_updated_just_before_it_runs() -> None:
    recorded = Recorded(side=False)
    assert recorded.forward() == PLAIN
    recorded.update.begin()
    done = [[f"update {number}", f"drop {number}", part] for number, part in enumerate(PLAIN)]
    assert recorded.forward() == [one for part in done for one in part]
    assert recorded.forward() == PLAIN, "only the first micro-batch updates"


def test_beside_the_model_a_part_is_updated_while_the_one_before_runs() -> None:
    recorded = Recorded(side=True)
    recorded.update.begin()
    assert recorded.forward() == [
        *("beside:", "update 0", "beside:", "update 1", "wait 0", "drop 0", "embeddings"),
        *("beside:", "update 2", "wait 1", "drop 1", "block 1"),
        *("beside:", "update 3", "wait 2", "drop 2", "block 2"),
        *("beside:", "update 4", "wait 3", "drop 3", "block 3"),
        *("wait 4", "drop 4", "norm"),
    ]


@pytest.mark.parametrize("side", [False, True])
def test_what_is_left_is_done_once(side: bool) -> None:
    recorded = Recorded(side)
    recorded.update.begin()
    recorded.update.finish()
    recorded.update.finish()
    assert [one for one in recorded.said if one.startswith("update")] == [f"update {number}" for number in range(5)]
    assert [one for one in recorded.said if one.startswith("drop")] == [f"drop {number}" for number in range(5)]
    if side:
        assert recorded.said.index("wait 4") < recorded.said.index("drop 4")
    assert recorded.forward() == PLAIN


def test_gradients_leave_with_their_part() -> None:
    """So that they and all activations are never in memory together."""
    case = Case(ONE, LATER, "bf16", CLIP)
    engine = build(case)
    train(engine, case, range(1))
    left = []
    for block in engine.module.blocks:
        block.register_forward_pre_hook(lambda *_: left.append(_parts_with_gradients(engine)))
    tokens, targets = micro_batches(case.resolved, 0, 1)[0]
    with torch.no_grad():
        engine.module(tokens, targets)
    assert left == [PARTS - 2, PARTS - 3, PARTS - 4]
    assert _parts_with_gradients(engine) == 0


def _parts_with_gradients(engine: Any) -> int:
    masters = engine._masters
    return sum(any(masters.master_of(one).grad is not None for one in part) for part in engine._parts)
