"""Real ranks for the trainer's tests: processes that meet over gloo, signals, and what they left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder, create_run
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.resolved import Resolved
from tests.forked import FORKED
from tests.processes import state_of
from tests.waiting import wait_for


def run_rank(environment: dict[str, str], log: str) -> None:
    """Runs in the forked process."""
    from tests.trainer.rank import run_rank as run

    run(environment, log)


LOCAL = ClusterProfile(name="local", scheduler="local", gpus_per_node=8, gpu_flag="none", chain="none")


def settings(
    tokens: Path,
    layout: Mapping[str, int],
    engine: Engine | None = None,
    shape: Mapping[str, Any] | None = None,
    **train: Any,
) -> Resolved:
    """A tiny GPT on real text: 2 layers, hidden 32, 4 heads, windows of 32 bytes; other keys of its `shape`."""
    train = {"dtype": "fp32", "lr": 1e-3, "log_every": 1, "seed": 5, **train}
    experiment = Experiment(
        name="tiny",
        model=Model(hidden=32, layers=2, heads=4, vocab=256, seq=32, **(shape or {})),
        data=Data(source="tokens", path=str(tokens)),
        engine=engine or Engine(),
        layout=LayoutRequest(**{"micro_batch": 2, "micro_batches": 2, **layout}),
        train=Train(**train),
    )
    return resolve(experiment, LOCAL)


def new_run(logs: Path, resolved: Resolved) -> RunFolder:
    return create_run(logs, resolved, "#!/bin/sh\n", "", engine_named(resolved.engine.name).config_files(resolved))


class Launch:
    """The ranks of one attempt, as processes of this machine. `{rank}` in their environment is their number;
    `{node}` and `{local}` are those on nodes of `a_node`.
    """

    a_node = 8

    def __init__(
        self, run: RunFolder, ranks: int, attempt: Attempt | None = None, log: Path | None = None, **environment: str
    ) -> None:
        self.attempt: Attempt = attempt or run.new_attempt()
        self.log_path = log or self.attempt.log
        self.log_path.touch()
        self.ranks = []
        for rank in range(ranks):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "HPC_GPT_RUN": str(run.path),
                "HPC_GPT_ATTEMPT": str(self.attempt.number),
            }
            places = {"{rank}": rank, "{node}": rank // self.a_node, "{local}": rank % self.a_node}
            for name, value in environment.items():
                for word, number in places.items():
                    value = value.replace(word, str(number))
                own[name] = value
            process = FORKED.Process(target=run_rank, args=(own, str(self.log_path)), daemon=True)
            process.start()
            self.ranks.append(process)

    def await_words(self, words: str, after: str = "") -> None:
        """Waits until the log says `words`, behind `after`."""
        self.await_state(lambda: words in self.log.partition(after)[2] if after else words in self.log, repr(words))

    def writes(self) -> int:
        """The number of writes of rank 0, which make some in each step."""
        return int(Path(f"/proc/{self.ranks[0].pid}/io").read_text().split("syscw: ")[1].split()[0])

    def await_steps_unseen(self, writes: int = 500) -> None:
        """Waits until rank 0 has worked on for some steps that a full disk keeps from being seen."""
        before = self.writes()
        self.await_state(lambda: self.writes() > before + writes, "further steps")

    def await_hold(self) -> None:
        """Waits until rank 0 has stopped itself, HOLD_AT_LINE being in its environment."""
        self.await_stop(0)

    def await_stop(self, rank: int) -> None:
        """Waits until SIGSTOP has reached a rank."""
        self.await_state(lambda: state_of(self.ranks[rank].pid) == "T", f"stop of rank {rank}")

    def await_state(self, happened: Callable[[], object], what: str) -> None:
        """Waits until something has happened, which ranks that have all ended cannot do any more."""

        def decided() -> bool:
            # Asked first: the last thing that a rank does may be what is waited for.
            have_ended = not any(rank.is_alive() for rank in self.ranks)
            return bool(happened()) or have_ended

        try:
            wait_for(what, decided, lambda: self.log)
            assert happened(), f"no {what} before the ranks ended:\n{self.log}"
        except BaseException:
            # One that stands still would be waited for when the tests end.
            for rank in self.ranks:
                rank.kill()
            raise

    def signal(self, number: signal.Signals, ranks: Iterable[int] | None = None) -> None:
        """Sends a signal to every rank, as Slurm and a terminal do, or to some."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            os.kill(self.ranks[rank].pid, number)

    def wait(self) -> list[int]:
        """The exit codes of all ranks."""
        try:
            wait_for("end of all ranks", lambda: not any(rank.is_alive() for rank in self.ranks), lambda: self.log)
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.join()
        return [rank.exitcode for rank in self.ranks]

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def ended(self) -> tuple[str, int, bool]:
        """(class, step, whether the job goes back to the queue)"""
        end = self.attempt.ended()
        return end["ended"], end["step"], end["requeue"]


def train(run: RunFolder, ranks: int, **environment: str) -> Launch:
    """An attempt that nobody interrupts, waited for."""
    launch = Launch(run, ranks, **environment)
    launch.wait()
    return launch


def train_alone(run: RunFolder, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """An attempt of one rank in a Python of its own, which has imported nothing yet; stderr is among stdout."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "HPC_GPT_RUN": str(run.path)}
    own["HPC_GPT_ATTEMPT"] = str(run.new_attempt().number)
    return subprocess.run(
        [sys.executable, *options, "-m", "hpc_gpt.trainer"],
        env=os.environ | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def lines(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of all attempts' metrics, in order."""
    return [
        json.loads(line)
        for attempt in run.attempts()
        if attempt.metrics.exists()
        for line in attempt.metrics.read_text().splitlines()
    ]


def figures(run: RunFolder) -> list[tuple[Any, ...]]:
    """What must not depend on interruptions, a step each: losses, norm and rate to the last digit."""
    return [(line["step"], line["loss"], line["loss_eval"], line["grad_norm"], line["lr"]) for line in lines(run)]
