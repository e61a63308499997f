"""CPU seconds of a look at the processes of an attempt beside 2,000 others: `python bench/processes.py`.

Beside each is what the look of 0.3 cost, which read the environment of each process, or its stat by pathlib: the ratio
is what a machine's speed does not change. Nothing passes or fails here.
"""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_gpt.core.processes import find_processes as processes
from hpc_gpt.core.processes.find_processes import Tree, task_variables
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.made_runs import add_attempt, make_run

ROUNDS, OTHERS, OWN = 15, 2000, 20


def stats_of_0_3() -> dict[str, list[str]]:
    """The stat of each process, as the signs of life of 0.3 read it each second."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
            found[name] = text.rpartition(")")[2].split()
    return found


def run_on_in_0_3() -> list[str]:
    """The processes that have two variables, with all descendants, as 0.3 found those of a run."""
    found = []
    for pid in filter(re.compile(r"[0-9]+").fullmatch, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = Path("/proc", pid, "environ").read_bytes()
            found += [pid] * all(mark in text for mark in (b"HPC_GPT_ATTEMPT=", b"HPC_GPT_CHECKPOINTS="))
    for _ in found[:]:
        stats_of_0_3()  # for the descendants of each
    return found


def cpu_ms(look: Callable[[], object]) -> float:
    """The median of the rounds, after one that fills the caches."""
    taken = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        look()
        taken.append(1000 * (time.process_time() - began))
    return statistics.median(taken[1:])


def main() -> None:
    line = "for n in $(seq $0); do sleep 3600 & done; echo; wait"
    with tempfile.TemporaryDirectory() as logs:
        run = make_run(Path(logs))
        add_attempt(run, [])
        measure(run, line)


def measure(run: RunFolder, line: str) -> None:
    """Starts the processes, and prints what the looks cost."""
    of_run = task_variables(run, run.attempts()[-1])
    groups = [
        subprocess.Popen(["bash", "-c", line, str(count)], env=environment, stdout=subprocess.PIPE, process_group=0)
        for count, environment in ((OTHERS, os.environ), (OWN, os.environ | of_run))
    ]
    try:
        for group in groups:
            assert group.stdout is not None
            group.stdout.readline()
        tree = Tree([groups[1].pid], record=run.attempts()[-1].processes)
        tree.write()
        rows = {
            "a look at a tree of 20, in a controller, a rank, a watch": (lambda: tree.look(at_once=True), stats_of_0_3),
            "what a run without a supervisor has left": (lambda: processes.run_on(run), run_on_in_0_3),
        }
        for what, (now, before) in rows.items():
            new, old = cpu_ms(now), cpu_ms(before)
            print(f"{what}, beside {OTHERS}: {new:.1f} ms, {new / old:.2f} x that of 0.3")
    finally:
        for group in groups:
            os.killpg(group.pid, 9)
            group.wait()


if __name__ == "__main__":
    main()
