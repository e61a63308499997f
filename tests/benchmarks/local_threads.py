"""What a local script's choice of threads costs and gains: `python tests/benchmarks/local_threads.py [ROUNDS]`.

One rank of the demo's model, and one of a model with matrices six times as wide, once with torch's own choice (as many
threads as CPUs, which spin for milliseconds when they wait) and once with the variables that the local script sets,
started where the measured ranks start: beside the load, if there is one.
Both processes live at once and take turns of a few steps, so that what else the machine does falls on both; the one
whose turn it is not sleeps. First nothing else runs, then BURNERS processes a CPU that only count. Printed for each:
the median step, and the ratio of the script's choice to torch's within a round, with its quartiles.

Without load the ratio should be at most 1.03; with load it should be far below 1. "Idle" is only what the machine was:
the processes that ran beside are printed. `--first` gives the processes of the first part a real-time priority
(chrt -f, needs root), which on a busy machine comes near an idle one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 12
BURNERS = 6
STEPS = {"demo": 4, "wide": 1}
_CHOSEN = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def scripts_choice() -> dict[str, str]:
    """The variables that the local script of one rank sets on this machine: what it starts prints them."""
    from hpc_gpt.launch.render import render_script
    from hpc_gpt.settings.cluster import load_profile
    from hpc_gpt.settings.experiment_file import load_experiment
    from hpc_gpt.settings.resolve import resolve

    one = {"layout.gpus": 1, "layout.tp": 1, "layout.pp": 1}
    script = render_script(resolve(load_experiment("demo", one), load_profile("local")))
    with tempfile.TemporaryDirectory() as folder:
        rank = Path(folder, "python")
        rank.write_text("#!/bin/sh\nexec env\n")
        rank.chmod(0o755)
        environment = {name: text for name, text in os.environ.items() if name not in _CHOSEN} | {
            "HPC_GPT_PYTHON": str(rank), "HPC_GPT_RUN": folder, "SUBMITIT_LOCAL_GLOBALID": "0",
        }  # fmt: skip
        said = subprocess.run(["bash", "-s"], input=script, env=environment, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in said.stdout.splitlines() if line.startswith(_CHOSEN))
    return {name: found[name] for name in _CHOSEN if name in found}


class Rank:
    """A process that trains so many steps when it is asked to, with these variables."""

    def __init__(self, model: str, chosen: dict[str, str], first: bool) -> None:
        environment = {name: text for name, text in os.environ.items() if name not in _CHOSEN} | chosen
        command = [*(["chrt", "-f", "10"] if first else []), sys.executable, __file__, "--rank", model]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: list[float] = []

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a rank ended"
        return line

    def train(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.seconds.append(float(self.answer()))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def be_rank(model: str) -> None:
    """The process of a Rank: after each line on stdin trains STEPS, and prints the seconds of one."""
    import torch
    import torch.distributed as dist

    from hpc_gpt.settings.cluster import load_profile
    from hpc_gpt.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
    from hpc_gpt.settings.resolve import resolve
    from hpc_gpt.train.engines.protocol import build_engine

    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hidden, seq, micro_batch = {"demo": (128, 128, 8), "wide": (768, 512, 2)}[model]
    resolved = resolve(
        Experiment(
            model=Model(hidden=hidden, layers=4, heads=4, vocab=256, seq=seq),
            engine=Engine(name="ddp"),
            layout=LayoutRequest(gpus=1, micro_batch=micro_batch, micro_batches=1),
            train=Train(steps=10**9, dtype="fp32", lr=1e-4),
        ),
        load_profile("local"),
    )
    engine = build_engine(resolved, torch.device("cpu"))
    tokens = torch.randint(0, 256, (micro_batch, seq + 1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for _ in range(3):
        engine.train_step(iter([batch]))
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        for _ in range(STEPS[model]):
            engine.train_step(iter([batch]))
        print((time.perf_counter() - began) / STEPS[model], flush=True)


def measure(model: str, rounds: int, burners: int, first: bool) -> None:
    ranks: list[Rank] = []
    beside: list[subprocess.Popen[bytes]] = []
    try:
        before = Path("/proc/loadavg").read_text().split()[3]
        beside += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burners)]
        chosen = scripts_choice()
        for variables in ({}, chosen):
            ranks.append(Rank(model, variables, first))
        for rank in ranks:
            rank.answer()
        for turn in range(rounds):
            for rank in ranks if turn % 2 else reversed(ranks):
                rank.train()
    finally:
        for process in beside:
            process.kill()
        for rank in ranks:
            rank.end()
    torchs, ours = (rank.seconds for rank in ranks)
    ratios = sorted(own / other for own, other in zip(ours, torchs, strict=True))
    quartiles = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
    print(
        f"{model}, {burners} more processes ({before} ran before), the script sets "
        f"{' '.join(f'{name}={text}' for name, text in chosen.items())}: torch's choice "
        f"{1e3 * statistics.median(torchs):.1f} ms a step, the script's {1e3 * statistics.median(ours):.1f} ms, "
        f"ratio {statistics.median(ratios):.3f} (quartiles {quartiles})",
        flush=True,
    )


def main(words: list[str]) -> None:
    if words[:1] == ["--rank"]:
        be_rank(words[1])
        return
    rounds = next((int(word) for word in words if word.isdigit()), ROUNDS)
    cpus = len(os.sched_getaffinity(0))
    print(f"{cpus} CPUs")
    for model in STEPS:
        measure(model, rounds, 0, "--first" in words)
    for model in STEPS:
        measure(model, rounds, BURNERS * cpus, first=False)


if __name__ == "__main__":
    main(sys.argv[1:])
