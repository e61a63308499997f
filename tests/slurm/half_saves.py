"""Trains 30 steps and saves every ten, as one writer of checkpoints does: `half_saves.py WRITER`.

The first start is killed in the save of step 20; a later one resumes from HPC_GPT_RESUME_FROM.
"""

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, EVERY, KILLED = 30, 10, 20
# {writer: pattern of its checkpoints}
PATTERNS = {
    "torch": "out/step-*.pt",
    "dcp": "out/step-*",
    "safetensors": "out/step-*",
    "accelerate": "out/step-*",
    "megatron": "out/iter_*",
    "deepspeed": "out/global_step*",
    "orbax": "out/[0-9]*",
}
Loader = Callable[[str], object]


def die(*_: object, **__: object) -> Any:
    """The kill in the middle of a save."""
    os.kill(os.getpid(), signal.SIGKILL)


class HalfFile(io.FileIO):
    """A file that a kill cuts off after its first bytes."""

    def write(self, data: Any) -> int:
        """Writes, and dies once the file has more than a kilobyte."""
        if self.tell() > 1024:
            die()
        return super().write(data)


def save_with_torch(path: Path, dies: bool) -> Loader:
    """One archive of torch.save."""
    import torch

    with (HalfFile if dies else io.FileIO)(path.with_suffix(".pt"), "w") as file:
        torch.save({"weights": torch.ones(1000)}, file)
    return torch.load


def save_with_dcp(path: Path, dies: bool) -> Loader:
    """A folder of torch.distributed.checkpoint, whose .metadata is its last file."""
    import torch
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(path)
    if dies:
        writer.finish = die
    dcp.save({"weights": torch.ones(1000)}, storage_writer=writer, no_dist=True)
    return lambda name: dcp.load(
        {"weights": torch.zeros(1000)}, storage_reader=dcp.FileSystemReader(name), no_dist=True
    )


def save_with_safetensors(path: Path, dies: bool) -> Loader:
    """One file of safetensors in a folder."""
    import torch
    from safetensors.torch import load_file, save

    data = save({"weights": torch.ones(1000)})
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(data[: len(data) // 2] if dies else data)
    if dies:
        die()
    return lambda name: load_file(f"{name}/model.safetensors")


def save_with_accelerate(path: Path, dies: bool) -> Loader:
    """`Accelerator.save_state`, which has no last file that marks the end."""
    import torch
    from accelerate import Accelerator, checkpointing

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    if dies:
        checkpointing.random.getstate = die
    accelerator.save_state(str(path))
    return accelerator.load_state


def save_files(path: Path, dies: bool, weights: str, mark: Path, text: str) -> Loader:
    """The files of a program that is not installed: the weights, then a mark."""
    (path / weights).parent.mkdir(parents=True, exist_ok=True)
    (path / weights).write_text("weights")
    if dies:
        die()
    mark.write_text(text)
    return lambda name: (Path(name) / weights).read_text()


def save(writer: str, step: int, dies: bool) -> Loader:
    """Writes the checkpoint of a step; returns what loads it."""
    out = Path("out")
    out.mkdir(exist_ok=True)
    if writer == "megatron":
        weights, mark = "mp_rank_00/model_optim_rng.pt", out / "latest_checkpointed_iteration.txt"
        return save_files(out / f"iter_{step:07d}", dies, weights, mark, f"{step}")
    if writer == "deepspeed":
        folder = f"global_step{step}"
        return save_files(out / folder, dies, "mp_rank_00_model_states.pt", out / "latest", folder)
    if writer == "orbax":
        return save_files(out / f"{step}", dies, "d/0", out / f"{step}" / "commit_success.txt", "ok")
    savers = {
        "torch": save_with_torch,
        "dcp": save_with_dcp,
        "safetensors": save_with_safetensors,
        "accelerate": save_with_accelerate,
    }
    return savers[writer](out / f"step-{step}", dies)


def main() -> None:
    """Trains from the checkpoint that this start is given."""
    writer = sys.argv[1]
    given, first = os.environ["HPC_GPT_RESUME_FROM"], int(os.environ["HPC_GPT_RESUME_STEP"] or 0)
    print(f"given {given or 'none'} {first}", flush=True)
    load: Loader | None = None
    for step in range(first + 1, STEPS + 1):
        print(f"step {step}/{STEPS} loss {5 - step / 10:.2f}", flush=True)
        time.sleep(0.05)  # srun loses the last lines of a task that is killed at once
        if step % EVERY == 0:
            time.sleep(0.5)
            load = save(writer, step, dies=step == KILLED and not first)
    if load is not None and given:
        load(given)
        print("the given checkpoint can be read", flush=True)


if __name__ == "__main__":
    main()
