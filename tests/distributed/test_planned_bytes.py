"""What a mixture's plan says that a rank sends and holds, beside what ranks of each engine of ours send and hold."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.step_time import predict_step
from hpc_gpt.planner.training import training_of
from hpc_gpt.trainer.model.router import Router
from tests.allocated import peak, profiled_whole
from tests.distributed.equality_cases import PROFILE
from tests.distributed.ranks import Task
from tests.distributed.test_expert_ranks import DDP, DP4_EP2, FSDP, TP2_EP2, each, task_of
from tests.distributed.trainings import build
from tests.planner.held_bytes import live_bytes, pairs
from tests.planner.test_parts import EXACT, LINKS

Found = Callable[[Task], Any]
Table = Callable[[str], None]
DP4, TP2_DP2 = Layout(1, 1, 4), Layout(2, 1, 2)
ZERO_1, ZERO_2, PIPELINE = Engine("deepspeed-zero", 1), Engine("deepspeed-zero", 2), Engine("deepspeed-3d", 1)


def settings(layout: Layout, engine: Engine) -> Resolved:
    """A mixture in bf16, with sequences so long that what layers keep is most of what a rank holds. A CPU gathers less
    at once than is planned, and buffers of reductions are there when activations are not; a plan adds them up."""
    passes = 2 if engine == ZERO_2 else 1  # it sums gradients in each
    return resolve(
        Experiment(
            name="planned",
            model=Model(vocab=64, seq=512, hidden=128, layers=3, heads=4, head_dim=64, mlp="swiglu", bias="none",
                        positions="rope", experts=8, experts_per_token=4, expert_ffn=96, norm_topk=True),
            engine=engine,
            layout=LayoutRequest(**asdict(layout), gpus=layout.gpus, micro_batch=4, micro_batches=passes),
            train=Train(steps=5, dtype="bf16"),
        ),
        PROFILE,
    )  # fmt: skip


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends in collectives, as in a ring, by the part of a step's time that has them."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.tp = {tuple(ranks) for ranks in layout.groups("tp")} if layout.tp > 1 else set()

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if called.namespace == "c10d" and "barrier" not in called.name():
            name, tensors = called.name(), [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            groups = [one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())]
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0])))
            # Of input and output one has what all ranks have; `coalesced` has several tensors.
            size = (sum if "coalesced" in name else max)(one.nbytes for one in tensors)
            part = "ep_s" if "alltoall" in name else "tp_s" if ranks in self.tp else "dp_s"
            self.bytes[part] += size * (len(ranks) - 1) / len(ranks) * (2 if "allreduce" in name else 1)
        return called(*args, **(kwargs or {}))


def balanced(router: Router, scores: Tensor) -> Tensor:
    """A choice that gives each expert equally many tokens."""
    places = torch.arange(scores[..., 0].numel() * router.used)
    return (places % router.experts).view(*scores.shape[:-1], router.used)


def counted(folder: Path, layout: Layout, engine: Engine) -> Any:
    """The bytes that rank 0 sends in its third step, by part, and the most that it holds in the fourth."""
    resolved, before = settings(layout, engine), live_bytes()
    with patch.object(Router, "_choose", balanced):
        ours = build(resolved)
        for _ in range(2):
            ours.train_step(pairs(resolved))
        held = live_bytes() - before
        with Sent(layout) as sent:
            ours.train_step(pairs(resolved))
        return {"sent": sent.bytes, "held": held + peak(profiled_whole(lambda: ours.train_step(pairs(resolved))))}


def at_the_edges(resolved: Resolved) -> dict[str, float]:
    """Bytes that no plan counts: the embedding's and the head's sums over tp, and FSDP's gathers and sums of theirs."""
    layout, batch, shape = resolved.layout, resolved.batch, resolved.model
    tokens, weights = batch.micro_batch * shape.seq * shape.hidden, shape.padded_vocab * shape.hidden / layout.tp
    of_fsdp = (2 + 4) * weights * (layout.dp - 1) / layout.dp if resolved.engine.name == "fsdp" else 0.0
    edges = {"tp_s": 2 * 2 * 2 * tokens * (layout.tp - 1) / layout.tp, "dp_s": of_fsdp}
    return {part: batch.micro_batches * sent for part, sent in edges.items()}


COUNTED = [
    task_of(counted, layout, engine)
    for layout, engine in (
        *((layout, DDP) for layout in (DP4_EP2, DP4)),
        *((layout, FSDP) for layout in (TP2_EP2, DP4, DP4_EP2, TP2_DP2)),
        *((layout, engine) for engine in (ZERO_1, ZERO_2, PIPELINE) for layout in (DP4, TP2_DP2)),
    )
]
SHORT = [COUNTED[0], COUNTED[2]]
# Under ZeRO-2 also a dense plan says a tenth too much here: its two buckets and the activations are there in turn.
HELD = [task for task in COUNTED if task.given[1] != ZERO_2]


@each(COUNTED, SHORT)
def test_a_mixture_sends_what_is_planned(task: Task, found: Found, table: Table) -> None:
    resolved, sent = settings(*task.given), found(task)["sent"]
    # Links of 1 GB/s, behind which nothing hides.
    step = predict_step(replace(training_of(resolved), routing="forced balance"), LINKS, EXACT, ranged=False)
    edges = at_the_edges(resolved)
    for part in ("tp_s", "dp_s", "ep_s"):
        planned, moved = 1e9 * getattr(step, part), sent.get(part, 0.0) - edges.get(part, 0.0)
        table(f"{task.name:60s} {part} planned {planned:.4g} sent {moved:.4g}")
        assert planned == pytest.approx(moved, rel=0.03, abs=1e-3 * sum(sent.values()))


@each(HELD, SHORT)
def test_a_mixture_holds_what_is_planned(task: Task, found: Found, table: Table) -> None:
    training = replace(training_of(settings(*task.given)), routing="forced balance")
    planned, held = predict_memory(training).stages[0].allocated * 2**30, found(task)["held"]
    table(f"{task.name:60s} planned {planned:.4g} held {held:.4g}, {planned / held:.3f}")
    assert planned == pytest.approx(held, rel=0.1)
