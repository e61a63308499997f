"""Seconds that `hpc-gpt submit --sweep` takes for many runs: `python bench/sweep.py [RUNS]` (1000).

On this machine's Slurm if it has one, else with stand-ins for sbatch and scontrol that take every job and run none: the
figure says which. CPU seconds are of hpc-gpt and all it starts. The design allows 10 s of wall for 1,000 runs, and 2 s
for the status of them. Nothing passes or fails here.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

BASE = """name = "many"
model = { hidden = 256, layers = 8, heads = 8, vocab = 512, seq = 128 }
data = { source = "random" }
engine = { name = "ddp" }
layout = { global_batch = 64 }
train = { steps = 10 }
[rows]
"""
STAND_INS = {
    "sbatch": 'echo "Submitted batch job 4711"',
    "scontrol": 'echo "Slurmctld(primary) at here is UP"; echo "MaxArraySize = 1001"',
    "srun": "exit 1",
    "squeue": "exit 0",
}


def sweep_text(runs: int) -> str:
    """A sweep over learning rate, seed and micro-batch on 1, 2 and 4 GPUs: three sets of equal directives."""
    rows = [
        f'"r{n}" = {{ train.lr = {1e-4 * (1 + n):.6g}, train.seed = {n}, layout.gpus = {(1, 2, 4)[n % 3]}, '
        f"layout.micro_batch = {1 + n // 3 % 2} }}"
        for n in range(runs)
    ]
    return BASE + "\n".join(rows) + "\n"


def make_stand_ins(folder: Path) -> None:
    folder.mkdir()
    for name, line in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


def timed(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of `python WORDS`, its children included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, *words], env=environment, cwd=folder, check=True, capture_output=True)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(runs: int, environment: Mapping[str, str], folder: Path, options: tuple[str, ...] = ()) -> list[str]:
    """Lines with what submitting the sweep, and showing it, took."""
    (folder / "many.toml").write_text(sweep_text(runs))
    lines = []
    for name, words in {
        f"submit --sweep of {runs} runs": ["submit", "--sweep", "many.toml", *options],
        f"status of {runs} runs, one line": ["status"],
        f"status --open of {runs} runs": ["status", "--open", "--all"],
    }.items():
        wall, cpu = timed(["-m", "hpc_gpt", *words], environment, folder)
        lines.append(f"{name:34} {wall:6.2f} s wall  {cpu:6.2f} s CPU")
    return lines


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {f"HPC_GPT_{key}": str(folder / key.lower()) for key in ("LOGS", "CONFIG", "STATE", "DATA")}
        environment = {**os.environ, **own, "HPC_GPT_CLUSTER": "generic-slurm"}
        real = shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0
        if not real:
            make_stand_ins(folder / "bin")
            environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
        print(f"on {len(os.sched_getaffinity(0))} CPUs, with {'Slurm' if real else 'a stand-in for sbatch'}")
        # Held, so that on a real cluster none of them starts.
        print("\n".join(measure(runs, environment, folder, ("--set", 'job.sbatch=["--hold"]') if real else ())))


if __name__ == "__main__":
    main()
