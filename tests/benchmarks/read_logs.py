"""How fast `report` reads a log, beside a bare loop over the same bytes: `make bench`. Nothing passes or fails here.

    python tests/benchmarks/read_logs.py [--gb GB] [--flat GB] [--folders COUNT] [--rounds N]

Writes Megatron logs of that size into a temporary folder: lines of iterations alone, each followed by a line of timers,
and both after a rank's label or a time of day. Each is read by `hpc-gpt report LOG`, the whole command, and by
`re.finditer` with one pattern of seven groups over the mapped file, in turn and on one core. The CPU seconds' ratio is
what counts; a machine's speed is in neither. Then peak memory at two sizes, a second report after an append, and
one of many run folders.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = r"""
import mmap, re, sys
pattern = re.compile(
    rb"iteration +(\d+)/ *(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): ([\d.]+)"
    rb" \| learning rate: ([\d.E+-]+) \| global batch size: +(\d+) \| lm loss: ([\d.E+-]+)"
)
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
    for match in pattern.finditer(data):
        match.groups()
"""
REPORT = ("-m", "hpc_gpt", "report", "--json")
PREFIXES = {"": lambda _: "", "[default7]:": lambda _: "[default7]:", "time of day": lambda step: f"[{_clock(step)}]"}


def _clock(step: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1_700_000_000 + 4 * step))


def write_log(path: Path, size: int, prefix: str = "", timers: bool = False) -> None:
    """A log of so many bytes at least."""
    dice, label = random.Random(0), PREFIXES[prefix]
    with path.open("w") as file:
        first = 1
        while file.tell() < size:
            lines = []
            for step in range(first, first + 10_000):
                before = label(step)
                lines.append(
                    f"{before} iteration {step:8d}/{40_000_000:8d} | consumed samples: {step * 1024:12d} |"
                    f" elapsed time per iteration (ms): {dice.gauss(4000, 200):.1f} |"
                    f" learning rate: {dice.random() * 1e-4:.3E} | global batch size: {1024:5d} |"
                    f" lm loss: {dice.uniform(2, 9):.6E} | loss scale: 65536.0 |"
                    f" grad norm: {dice.uniform(0.1, 2):.3f} |"
                    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
                )
                if timers:
                    names = ("forward-compute", "forward-recv", "backward-compute", "backward-send", "backward-recv")
                    more = ("backward-params-all-reduce", "optimizer-copy-to-main-grad", "optimizer", "batch-generator")
                    figures = " | ".join(f"{name}: {dice.gauss(300, 60):.2f}" for name in (*names, *more))
                    lines.append(f"{before}time (ms) | {figures}\n")
            file.writelines(lines)
            first += 10_000


def run(words: tuple[str, ...], cache: Path | None = None) -> tuple[float, float, float]:
    """(CPU seconds, seconds, peak MiB) of one run of `python WORDS` on one core."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, *words],
            stdout=said,
            stderr=said,
            env={**os.environ, "HPC_GPT_CACHE": str(cache or "off")},
            preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        if child.returncode not in (0, 1):
            said.seek(0)
            sys.exit(f"{' '.join(words)}: exit {child.returncode}\n{said.read().decode(errors='replace')}")
    return used.ru_utime + used.ru_stime, took, used.ru_maxrss / 1024


def beside_bare(folder: Path, size: int, rounds: int) -> None:
    """The ratio of the command to the bare loop, for each sort of log."""
    print(f"report beside re.finditer, {size / 1e9:.3g} GB, CPU seconds on one core, median of {rounds} rounds in turn")
    print(f"{'log':32} {'finditer':>9} {'report':>9} {'ratio':>6} {'peak MiB':>9}")
    for timers in (False, True):
        for prefix in PREFIXES:
            log = folder / "run.out"
            write_log(log, size, prefix, timers)
            run(("-c", BARE, str(log)))
            pairs = [(run(("-c", BARE, str(log))), run((*REPORT, str(log)))) for _ in range(rounds)]
            bare = statistics.median(pair[0][0] for pair in pairs)
            ours = statistics.median(pair[1][0] for pair in pairs)
            ratio = statistics.median(pair[1][0] / pair[0][0] for pair in pairs)
            name = ", ".join(("iterations and timers" if timers else "iterations", *([prefix] if prefix else [])))
            print(f"{name:32} {bare:8.2f}s {ours:8.2f}s {ratio:6.2f} {pairs[-1][1][2]:9.0f}", flush=True)


def memory(folder: Path, sizes: tuple[int, ...]) -> None:
    """Peak memory of the command by the log's size."""
    for size in sizes:
        log = folder / "run.out"
        write_log(log, size, timers=True)
        cpu, _, peak = run((*REPORT, str(log)))
        print(f"peak memory of report, log of {size / 1e6:8.0f} MB: {peak:6.0f} MiB, {cpu:.2f} s", flush=True)


def appended(folder: Path, size: int) -> None:
    """A second report after 1 MB more."""
    log, cache = folder / "run.out", folder / "cache"
    write_log(log, size)
    first = run((*REPORT, str(log)), cache)[0]
    with log.open("a") as file:
        file.write(log.read_text()[-1_000_000:] if size < 10_000_000 else "a line of nothing\n" * 60_000)
    again = run((*REPORT, str(log)), cache)[0]
    print(f"second report after 1 MB more: {again:.2f} s, the first {first:.2f} s", flush=True)


def folders(folder: Path, count: int) -> None:
    """One report of many folders, each with a log of 50 KB."""
    runs = folder / "runs"
    for number in range(count):
        (runs / f"run-{number}").mkdir(parents=True)
        write_log(runs / f"run-{number}" / "main.log", 1)
        log = (runs / f"run-{number}" / "main.log").read_text()[:50_000]
        (runs / f"run-{number}" / "main.log").write_text(log)
    cpu, took, peak = run((*REPORT, str(runs)))
    print(f"{count} folders of one log of 50 KB: {took:.2f} s, {cpu:.2f} s of CPU, {peak:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=0.1)
    parser.add_argument("--flat", type=float, default=0.0, help="a log of so many GB for peak memory")
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    size = int(chosen.gb * 1e9)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        beside_bare(folder, size, chosen.rounds)
        memory(folder, tuple(sorted({1_000_000, size, *([int(chosen.flat * 1e9)] if chosen.flat else [])})))
        appended(folder, size)
        (folder / "run.out").unlink()
        folders(folder, chosen.folders)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
