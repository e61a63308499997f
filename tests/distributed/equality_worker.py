"""One rank of a launch: cases and scenarios one after the other, each from a clean start; rank 0 writes what they give.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the launch's folder as argument. What to run lies there as
`plan.pickle`, and `begin` says where in it; each result is written when it is there, so that a rank that dies takes
no other result with it.
"""

import json
import os
import pickle
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.train.engines.protocol import build_engine, module_of
from tests.distributed.copies import digest
from tests.distributed.counted import count_parameters
from tests.distributed.equality_cases import EVALUATION, STEPS, Case, micro_batches
from tests.distributed.groups import forget, meet
from tests.distributed.mutation import mutate
from tests.distributed.save_now import save_now

_ALL_FAIL_S = 20.0  # ranks that fail of one cause do so at about the same time
# A group of gloo's that outlives its case has threads, each of which looks for work 100 times a second.
_THREADS_LEFT = 10  # by a case, on average; fsdp with tensor parallelism leaves 6


@dataclass(frozen=True)
class Plan:
    """What the ranks of a launch run, in order."""

    cases: tuple[Case, ...]
    scenarios: tuple[str, ...]
    path: str  # where compilers are found

    def names(self) -> list[str]:
        """The cases' names, then the scenarios'."""
        return [*(case.name for case in self.cases), *self.scenarios]


def run(case: Case, folder: Path, number: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(figures, whole weights after the last step, which rank 0 alone has) of one case.

    The weights are read from the engine's own checkpoint, as `export` reads them.
    """
    resolved = case.resolved
    started = time.monotonic()
    engine: Any = build_engine(resolved, torch.device("cpu"))
    initial = digest(engine)
    if case.mutation:
        mutate(engine, case.mutation)
    results, kept = [], 0
    for step in range(STEPS):
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step, engine.context.part)))
        results.append((float(result.loss), float(result.grad_norm), result.lr, bool(result.skipped)))
        kept += kept_outputs(engine)
    losses, norms, lrs, skipped = zip(*results, strict=True)
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION, engine.context.part)
    loss_eval = float(engine.evaluate(iter(pairs), len(pairs)))
    kept += kept_outputs(engine)
    figures = {
        "losses": losses,
        "norms": norms,
        "lrs": lrs,
        "skipped": skipped,
        "loss_eval": loss_eval,
        "step": engine.step,
        "parameters": count_parameters(engine),
        "initial": initial.sums,
        "apart": [*initial.apart, *digest(engine).apart],
        "kept_outputs": kept,
    }
    weights = saved_weights(engine, resolved, folder / f"{number}.checkpoint")
    return figures | {"seconds": time.monotonic() - started}, weights


def kept_outputs(engine: Any) -> int:
    """Micro-batches whose stage output, logits on the last, still takes memory; the pipeline alone keeps any."""
    if engine.__class__.__name__ != "Deepspeed3D":
        return 0
    return sum(output is not None for output in engine._engine.pipe_buffers["outputs"])


def saved_weights(engine: Any, resolved: Resolved, folder: Path) -> dict[str, Tensor]:
    """What the engine's checkpoint holds, on rank 0; the checkpoint is deleted."""
    first = dist.get_rank() == 0
    if first:
        folder.mkdir()
    dist.barrier()
    save_now(engine, folder)
    dist.barrier()
    if not first:
        return {}
    module = module_of(resolved.engine.name)
    weights = {name: weight.clone() for name, weight in module.read_weights(folder, resolved)}
    shutil.rmtree(folder)
    return weights


def run_item(plan: Plan, number: int, folder: Path) -> None:
    """Runs one case or scenario; rank 0 writes what it gives."""
    if number < len(plan.cases):
        case = plan.cases[number]
        os.environ["PATH"] = plan.path if case.engine.compile_backend == "inductor" else "/nonexistent"
        figures, weights = run(case, folder, number)
        if dist.get_rank() == 0:
            torch.save(weights, folder / f"{number}.pt")
    else:
        from tests.distributed.scenarios import scenarios_of

        figures = scenarios_of(dist.get_world_size())[plan.scenarios[number - len(plan.cases)]](folder)
    if dist.get_rank() == 0:
        (folder / f"{number}.json").write_text(json.dumps(figures))


def redirect(file: Path) -> None:
    """Sends all that is printed from here on to `file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan: Plan = pickle.loads((folder / "plan.pickle").read_bytes())
    first = int((folder / "begin").read_text())
    for number in range(first, len(plan.names())):
        redirect(folder / f"{number}.output-{rank}")
        meet(folder, str(number))
        try:
            run_item(plan, number, folder)
            dist.barrier()
        except Exception:
            (folder / f"{number}.failed-{rank}").write_text(traceback.format_exc())
            deadline = time.monotonic() + _ALL_FAIL_S
            while len(list(folder.glob(f"{number}.failed-*"))) < world:
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.1)
        forget()
        threads = len(os.listdir("/proc/self/task"))
        if threads > 30 + _THREADS_LEFT * (number - first):
            (folder / f"{number}.failed-{rank}").write_text(f"{threads} threads are left: engines outlive their cases")
    (folder / f"done-{rank}").touch()
    while len(list(folder.glob("done-*"))) < world:
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
