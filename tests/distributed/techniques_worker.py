"""One rank of two: every technique on a model split over both, against the whole model that each rank also has."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.model.gpt import Gpt, PositionEmbedding
from hpc_gpt.model.linear import RowParallelLinear
from hpc_gpt.model.norm import Norm
from hpc_gpt.model.sequence_parallel import SequenceParallel
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import TensorParallel, split_of
from hpc_gpt.settings.experiment import Engine
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.train.engines.kernels import compile_model
from tests import without
from tests.model.whole_parameters import Piece, merge_pieces, piece_of

TIED = ModelShape(hidden=32, layers=2, heads=4, vocab=61, seq=16)
UNTIED = replace(TIED, tied=False)
SEQUENCE = Techniques(sequence_parallel=True)
BACKEND = "aot_eager"

# name -> (shape, techniques, engine.compile)
ALL_CASES: dict[str, tuple[ModelShape, Techniques, str]] = {
    "tp": (TIED, Techniques(), "none"),
    "sequence": (TIED, SEQUENCE, "none"),
    "sequence untied": (UNTIED, SEQUENCE, "none"),
    "sequence full": (TIED, replace(SEQUENCE, recompute="full"), "none"),
    "sequence selective offload": (TIED, replace(SEQUENCE, recompute="selective", activation_offload=True), "none"),
    "sequence chunks": (UNTIED, replace(SEQUENCE, loss_chunks=3), "none"),
    "sequence tiles": (TIED, replace(SEQUENCE, tiles=3), "none"),
    "chunks": (TIED, Techniques(loss_chunks=5), "none"),
    "one pass": (TIED, Techniques(one_pass_loss=True), "none"),
    "sequence one pass chunks": (UNTIED, replace(SEQUENCE, one_pass_loss=True, loss_chunks=3), "none"),
    "bias gradients": (TIED, Techniques(fused_bias_gradients=True), "none"),
    "sequence bias gradients tiles": (TIED, replace(SEQUENCE, fused_bias_gradients=True, tiles=3), "none"),
    "sequence bias gradients block": (
        TIED,
        replace(SEQUENCE, fused_bias_gradients=True, recompute="selective"),
        "block",
    ),
    "selective": (TIED, Techniques(recompute="selective"), "none"),
    "tiles": (TIED, Techniques(tiles=3), "none"),
    "tp block": (TIED, Techniques(), "block"),
    "tp whole": (TIED, Techniques(recompute="full"), "whole"),
    "sequence block": (TIED, replace(SEQUENCE, recompute="full", loss_chunks=2), "block"),
    "sequence whole": (UNTIED, SEQUENCE, "whole"),
}
# Graphs take most of the time.
TOO_LONG = ("tp block", "tp whole", "sequence whole", "sequence bias gradients block")
CASES = without(ALL_CASES, *TOO_LONG)


class Lone(SequenceParallel):
    """A group whose parameters between blocks keep the gradient of this rank's positions alone."""

    def shared(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        return parameters


class Displaced(SequenceParallel):
    """A group whose every rank takes the first positions."""

    def positions(self, count: int) -> slice:
        return slice(0, count)


class Unscattered(SequenceParallel):
    """A group that gathers, but sends no gradient back to the positions of others."""

    def scatter(self, partial: Tensor) -> Tensor:
        count = partial.shape[1] // self.size
        return partial[:, self.positions(count)].contiguous()


def broken(name: str, model: Gpt) -> None:
    """Puts the broken group into some of the model's modules."""
    kinds: dict[str, tuple[type[SequenceParallel], tuple[type[nn.Module], ...]]] = {
        "norms": (Lone, (Norm,)),
        "biases": (Lone, (RowParallelLinear,)),
        "position gradients": (Lone, (PositionEmbedding,)),
        "positions": (Displaced, (PositionEmbedding,)),
        "sums": (Unscattered, (RowParallelLinear,)),
    }
    group, modules = kinds[name]
    for module in model.modules():
        if isinstance(module, modules):
            module.tp = group(module.tp.rank, module.tp.size, module.tp.group)  # type: ignore[assignment,union-attr]


BROKEN = ["norms", "biases", "position gradients", "positions", "sums"]


def tokens(shape: ModelShape) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, shape.vocab, (3, shape.seq + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def train(model: Gpt) -> tuple[Tensor, int]:
    """(loss, elements kept for the backward pass); the gradients are in the model's parameters."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*tokens(model.shape))
    loss.backward()
    return loss.detach(), kept


def compare(shape: ModelShape, techniques: Techniques, how: str, mutation: str = "") -> dict[str, Any]:
    """Differences from the whole model: of the loss, of the worst gradient, of what should be the same on all ranks."""
    tp = TensorParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    whole = Gpt(shape, 1)
    loss, _ = train(whole)
    model = Gpt(shape, 1, tp, techniques)
    if mutation:
        broken(mutation, model)
    compile_model(model, Engine(compile=how, compile_backend=BACKEND))  # type: ignore[arg-type]
    own_loss, kept = train(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]  # those of an evaluation are others
    pieces: list[Piece] = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        pieces.append(piece_of(parameter, tp.rank, parameter.grad))
    everyone: list[Any] = [None] * tp.size
    dist.all_gather_object(everyone, (pieces, own_loss))
    merged = merge_pieces(piece for theirs, _ in everyone for piece in theirs)
    expected = merge_pieces(piece_of(p, 0, p.grad) for p in whole.parameters())
    assert merged.keys() == expected.keys()
    far = {name: float((merged[name] - gradient).abs().max()) for name, gradient in expected.items()}
    whole_here = [number for number, parameter in enumerate(model.parameters()) if split_of(parameter) is None]
    apart = [float((everyone[0][0][at].tensor - everyone[1][0][at].tensor).abs().max()) for at in whole_here]
    with torch.no_grad():
        loss_eval = float(model(*tokens(shape)))
        local = model.position(model.embedding(tokens(shape)[0])).shape
    return {
        "loss": max(abs(float(theirs) - float(loss)) for _, theirs in everyone),
        "loss_eval": abs(loss_eval - float(loss)),
        "gradient": max(far.values()),
        "worst": max(far, key=lambda name: far[name]),
        "apart": max(apart),
        "kept": kept,
        "between blocks": list(local),
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "graphs": graphs,
    }


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results = {name: compare(*case) for name, case in CASES.items()}
    results |= {f"without {name}": compare(TIED, SEQUENCE, "none", name) for name in BROKEN}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
