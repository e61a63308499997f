"""What DeepSpeed's engines cost over our bare loop on one CPU: `python bench/engines.py`.

One rank, one thread, a GPT of 5M parameters in fp32, a step of some tenths of a second. The engines are built in one
process and take turns, a step each, in an order that moves on by one every round: what else the machine does falls on
all of them. A step's time is the CPU's that the process has used, all its threads together: nothing of it waits, and
what other processes take is not in it. Beside each engine: its ratio to ddp, which on one rank is the bare model, taken
within each round, and the median and the quartiles of these.

`python bench/engines.py host [RANKS]`: the host's time per layer and micro-batch under FSDP2, of layers so
small that little else is left, by ours and by loops of a few lines around `fully_shard`; and its parts, by a profile.
On one rank ours keeps its hooks here, which a run of one rank does not have.

`python -m bench.engines experts`: a mixture's step beside that of transformers' Qwen3-MoE with its grouped
products, and the experts of one layer, forward and backward: tokens/s over the class's, and peak memory over its.
"""

import cProfile
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.engines.fsdp import Fsdp
from hpc_gpt.trainer.model.gpt import Gpt

ROUNDS = 10
BARE = "ddp"
ENGINES = (BARE, *(f"deepspeed-zero:{stage}" for stage in (0, 1, 2, 3)), "deepspeed-3d:0", "deepspeed-3d:1", "fsdp")
SEQ, MICRO_BATCH, MICRO_BATCHES = 128, 4, 2
DENSE = {"hidden": 256, "layers": 4, "heads": 4, "vocab": 4096, "seq": SEQ}


class Rank:
    """One engine, and what a step of it takes."""

    def __init__(self, name: str, model: Mapping[str, Any] = DENSE, **train: Any) -> None:
        engine, _, stage = name.partition(":")
        resolved = resolve(
            Experiment(
                model=Model(**model),
                engine=Engine(name=engine, zero_stage=int(stage) if stage else None),  # type: ignore[arg-type]
                layout=LayoutRequest(gpus=1, micro_batch=MICRO_BATCH, micro_batches=MICRO_BATCHES),
                train=Train(steps=10**9, dtype="fp32", lr=1e-4, **train),
            ),
            load_profile("local"),
        )
        self.shape = resolved.model
        self.engine = build_engine(resolved, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 4096, (MICRO_BATCHES, MICRO_BATCH, SEQ + 1), generator=generator)
        self.batches = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]
        self.seconds: list[float] = []

    def step(self) -> Any:
        return self.engine.train_step(iter(self.batches))


def measure() -> None:
    ranks = {name: Rank(name) for name in ENGINES}
    for rank in ranks.values():
        for _ in range(3):
            rank.step()
    for turn in range(ROUNDS):
        first = turn % len(ENGINES)
        for name in ENGINES[first:] + ENGINES[:first]:
            began = time.process_time()
            ranks[name].step()
            ranks[name].seconds.append(time.process_time() - began)
    bare = ranks[BARE].seconds
    print(f"{ROUNDS} rounds; the median step of {BARE} took {statistics.median(bare):.3f} s of CPU")
    for name, rank in ranks.items():
        ratios = sorted(own / other for own, other in zip(rank.seconds, bare, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{name:20} {statistics.median(ratios):5.3f} x {BARE} (quartiles {low:.3f} to {high:.3f})")


MIXTURE = {
    **DENSE, "kv_heads": 2, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": "none", "tied": False,
    "qk_norm": True, "experts": 16, "experts_per_token": 4, "expert_ffn": 128, "norm_topk": True,
}  # fmt: skip


def measure_experts() -> None:
    """Our experts and the class's in turns: CPU time of a step as above, and the peak of what a step allocates."""
    from bench.gpu.peers import Mixture, peer_of
    from tests.allocated import peak, profiled

    ours = Rank(BARE, MIXTURE, balance="none")
    shape = ours.shape
    block, layer = ours.engine.module.blocks[0], Mixture(shape).model.model.layers[0].mlp
    hidden = torch.randn(MICRO_BATCH * MICRO_BATCHES, SEQ, shape.hidden, requires_grad=True)

    def experts(forward: Callable[[Any], Any], weights: Any) -> Callable[[], Any]:
        inputs = [hidden, *weights]
        return lambda: torch.autograd.grad(forward(hidden), inputs, torch.ones_like(hidden))

    peer = peer_of(shape, torch.device("cpu"))
    own = [*block.router.parameters(), *block.experts.parameters()]
    works = {
        "a step": (ours.step, lambda: peer(ours.batches)),
        "experts of a layer": (
            experts(lambda rows: block.experts(rows, *block.router(rows)), own),
            experts(lambda rows: first(layer(rows)), list(layer.parameters())),
        ),
    }
    for name, pair in works.items():
        ratios = []
        for turn in range(3 + 2 * ROUNDS):
            seconds = {}
            for side in (0, 1) if turn % 2 else (1, 0):
                began = time.process_time()
                pair[side]()
                seconds[side] = time.process_time() - began
            ratios += [seconds[1] / seconds[0]] * (turn >= 3)
        ratios.sort()
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        peaks = [peak(profiled(work)) / 2**20 for work in pair]
        print(
            f"{name:20} {statistics.median(ratios):5.3f} x the class's tokens/s (quartiles {low:.3f} to {high:.3f}),"
            f" {peaks[0] / peaks[1]:.3f} x its peak ({peaks[0]:.1f} and {peaks[1]:.1f} MiB)"
        )


def first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


LAYERS, PASSES = 24, 4  # layers and micro-batches of the host's row


class Bare:
    """A loop of a few lines around `fully_shard`: the same model, tokens and optimizer, and no more.

    `titan` does it as torchtitan (torchtitan/models/llama3/infra/parallelize.py, 2026): edges and head in groups of
    their own, prefetches of one, and the norm of `clip_grad_norm_`.
    """

    def __init__(self, titan: bool, reshard: bool) -> None:
        self.model: Any = Gpt(small(reshard).model, 1)
        blocks: list[Any] = [*self.model.blocks]
        for block in blocks:
            fully_shard(block, reshard_after_forward=reshard)
        if titan:
            fully_shard([self.model.norm], reshard_after_forward=False)
        fully_shard(self.model, reshard_after_forward=None if reshard else False)
        if titan:
            for block, after in pairwise(blocks):
                block.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([block])
        self.titan, self.reshard = titan, reshard
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = small_batches()

    def step(self) -> None:
        for number, batch in enumerate(self.batches, 1):
            last = number == PASSES
            self.model.set_is_last_backward(last)
            if not self.reshard:
                self.model.set_requires_gradient_sync(last)
                self.model.set_reshard_after_backward(last)
            (self.model(*batch) / PASSES).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()


def small(reshard: bool, engine: str = "fsdp", **switches: Any) -> Any:
    """A run of layers of a few numbers each, on all ranks."""
    return resolve(
        Experiment(
            model=Model(hidden=16, layers=LAYERS, heads=2, vocab=64, seq=8),
            engine=Engine(name=engine, **({"reshard": reshard} | switches if engine == "fsdp" else {})),  # type: ignore[arg-type]
            layout=LayoutRequest(gpus=dist.get_world_size(), micro_batch=1, micro_batches=PASSES),
            train=Train(steps=10**9, dtype="fp32", lr=1e-4),
        ),
        load_profile("local"),
    )


def small_batches() -> list[Any]:
    tokens = torch.randint(0, 64, (PASSES, 1, 9), generator=torch.Generator().manual_seed(1))
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]


def measure_host() -> None:
    batches, device = small_batches(), torch.device("cpu")
    together = {"ours, 4 blocks together": {"gather_blocks": 4}} if hasattr(Engine(), "gather_blocks") else {}
    one = {"gather_blocks": 1} if together else {}
    for reshard in (True, False):
        steps: dict[str, Callable[[], Any]] = {
            "no hooks (ddp)": stepper(build_engine(small(True, "ddp"), device), batches)
        }
        for name, switches in {"ours": one, **together}.items():
            steps[name] = stepper(Fsdp(small(reshard, **switches), device), batches)
        steps["bare fully_shard"] = Bare(False, reshard).step
        steps["as torchtitan"] = Bare(True, reshard).step
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(3 + 2 * ROUNDS):
            first = turn % len(steps)
            for name in [*steps][first:] + [*steps][:first]:
                began = time.process_time()
                steps[name]()
                if turn >= 3:
                    seconds[name].append(1e6 * (time.process_time() - began) / LAYERS / PASSES)
        profile = cProfile.Profile()
        for _ in range(ROUNDS):
            profile.runcall(steps["ours"])
        if dist.get_rank():
            continue
        kept = "reshard" if reshard else "gradients and weights kept"
        print(f"{dist.get_world_size()} ranks, {kept}; us per layer and pass")
        for name, own in seconds.items():
            ratios = sorted(us / bare for us, bare in zip(own, seconds["bare fully_shard"], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            median, ratio = statistics.median(own), statistics.median(ratios)
            print(f"  {name:24} {median:7.0f}   {ratio:.3f} x bare ({low:.3f} to {high:.3f})")
        print("  ours by cProfile, which makes it slower:")
        for (path, _, function), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            place = f"{os.path.basename(path)}:{function}"
            if place in PARTS:
                print(f"    {1e6 * cumulative / ROUNDS / LAYERS / PASSES:7.0f}  {place}")


# Functions that share the host's time, none of which calls another.
PARTS = {
    *("_fsdp_state.py:_pre_forward", "_fsdp_state.py:_post_forward", "_fsdp_state.py:_pre_backward"),
    *("_fsdp_param_group.py:post_backward", "_fsdp_state.py:_root_post_backward_final_callback"),
    *("fsdp.py:_accumulation", "fsdp.py:_complete_gradients", "torch_engine.py:update"),
}


def stepper(engine: Any, batches: list[Any]) -> Callable[[], Any]:
    return lambda: engine.train_step(iter(batches))


def host_of_rank(rank: int, ranks: int, store: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    measure_host()
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def main() -> None:
    if sys.argv[1:2] == ["host"]:
        ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 1
        with TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(host_of_rank, (ranks, f"{folder}/store"), ranks)
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    measure_experts() if sys.argv[1:2] == ["experts"] else measure()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
