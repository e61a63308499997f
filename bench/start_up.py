"""CPU seconds of the commands that are typed often, beside an empty Python: `make bench`. Nothing passes or fails here.

A machine's speed is in every figure, so each is also given as a multiple of `python -c pass`. What does pass or fail
is tests/test_start_up.py: which modules these commands load. `status` is asked for 200 ended runs.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sweep import timed
from tests.made_runs import add_attempt, make_run, metrics_line

ROUNDS = 7
# (words after python, seconds that the design allows it)
COMMANDS = (
    (("-c", "pass"), None),
    (("-m", "hpc_gpt", "--help"), 0.15),
    (("-m", "hpc_gpt", "submit", "--help"), 0.15),
    (("-m", "hpc_gpt", "render", "--gpus", "64", "--pp", "16"), 0.3),
    (("-m", "hpc_gpt", "render", "demo", "--cluster", "local"), 0.3),
    (("-m", "hpc_gpt", "status", "--all"), 0.3),
)
RUNS = 200


def main() -> None:
    print(f"CPU seconds, median of {ROUNDS} runs (lowest), after one that fills the caches")
    with tempfile.TemporaryDirectory() as logs:
        for _ in range(RUNS):
            add_attempt(make_run(Path(logs)), [metrics_line(step) for step in range(1, 30)])
        os.environ["HPC_GPT_LOGS"] = logs
        measure()


def measure() -> None:
    """Print the figures of every command."""
    empty = 0.0
    for words, allowed in COMMANDS:
        timed(words, os.environ, Path())
        runs = [timed(words, os.environ, Path())[1] for _ in range(ROUNDS)]
        middle = statistics.median(runs)
        empty = empty or middle
        name = " ".join(words).replace("-m hpc_gpt", "hpc-gpt") if words[0] == "-m" else "python -c pass"
        limit = f"  design: {allowed} s" if allowed else ""
        print(f"{name:<36} {middle:.3f} s ({min(runs):.3f})  {middle / empty:5.1f} x python -c pass{limit}")


if __name__ == "__main__":
    main()
