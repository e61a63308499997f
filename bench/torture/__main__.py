"""`python -m bench.torture`: a number of faults of a seed, on a real Slurm cluster of virtual nodes on this machine.

Prints the order, then a line for each fault when its run is done. The lines are kept under build/torture/, and the
same command continues after them. Needs root and Slurm's packages, like the tests of tests/slurm.
"""

import argparse
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.torture.campaign import break_one, free_small_disks, unbroken
from bench.torture.faults import EARLIEST, KINDS
from bench.torture.order import Planned, planned
from bench.torture.site import FOLDER, cluster_spec, lane_name
from tests.slurm.cluster import Cluster, running_services


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every run ended as if nothing had happened, else 1; 130 after Ctrl-C."""
    asked = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kinds = sorted(KINDS) if asked.ep == 1 else [name for name in sorted(KINDS) if not KINDS[name].program]
    faults = planned(kinds, asked.seed, max(asked.faults, asked.only or 0), EARLIEST)
    folder = FOLDER / f"seed-{asked.seed}{f'-ep{asked.ep}' if asked.ep > 1 else ''}"
    results = folder / "results.txt"
    before = _read(results) if not asked.only else {}
    for fault in faults:
        print(f"{fault.number:3d} {fault.words}{'  [done]' if fault.number in before else ''}")
    todo = [fault for fault in faults if fault.number not in before and asked.only in (None, fault.number)]
    print(f"seed {asked.seed}: {len(todo)} of {len(faults)} faults are to be done; results in {results}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    began, writing = time.monotonic(), threading.Lock()

    def say(number: int, text: str) -> None:
        with writing, open(results, "a", encoding="utf-8") as file:
            before[number] = text
            print(text, flush=True)
            if not asked.only:
                file.write(f"{text}\n")

    if todo:
        try:
            _strike(todo, folder, asked, say)
        except (KeyboardInterrupt, SystemExit):
            print("interrupted; the same command continues from here", file=sys.stderr, flush=True)
            free_small_disks()
            os._exit(130)  # nobody waits for threads whose cluster is gone
        finally:
            free_small_disks()
    lost = sum(text.startswith("LOST") for text in before.values())
    print(f"{len(before)} faults, {lost} lost runs; {time.monotonic() - began:.0f} s now")
    return 1 if lost else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=1, help="of the order, the moments and all other choices (1)")
    parser.add_argument("--only", type=int, help="that one fault of the seed, again")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side (2)")
    parser.add_argument("--ranks", type=int, default=8, choices=(4, 8), help="4: half the data parallelism (8)")
    parser.add_argument("--ep", type=int, default=1, choices=(1, 2, 4), help="above 1: experts over ranks (1)")
    return parser.parse_args(arguments)


def _read(results: Path) -> dict[int, str]:
    """Fault -> the first line of its verdict."""
    text = results.read_text() if results.exists() else ""
    return {int(found[1]): found[0] for found in re.finditer(r"(?m)^(?:ok  |LOST) +(\d+) .*", text)}


def _strike(todo: list[Planned], folder: Path, asked: argparse.Namespace, say: Callable[[int, str], None]) -> None:
    """Breaks a run for each fault, some at once, and says each verdict as it is there."""
    lanes, ranks, ep = asked.at_once, asked.ranks, asked.ep
    waiting: queue.SimpleQueue[Planned] = queue.SimpleQueue()
    for fault in todo:
        waiting.put(fault)
    stop = threading.Event()
    with running_services() as services:
        cluster = Cluster(cluster_spec(lanes), services)
        # The kernel ends a daemon with the thread that started it, so the threads stay until the cluster is gone.
        pool = ThreadPoolExecutor(lanes)
        try:
            cluster.start()
            reference: dict[int, float] = {}
            if not all(KINDS[fault.kind].program for fault in todo):
                alone = [
                    pool.submit(
                        unbroken, cluster, folder / f"unbroken-{nodes}", lane_name(number % lanes), nodes, ranks, ep
                    )
                    for number, nodes in enumerate((4, 2) if ranks == 8 else (2,))
                ]
                references = [run.result() for run in alone]
                reference = references[0]
                assert all(other == reference for other in references), "the unbroken runs on 2 and on 4 nodes differ"
                print(f"unbroken: {len(reference)} steps, final loss {reference[len(reference)]!r}", flush=True)

            def lane(number: int) -> None:
                while not stop.is_set():
                    try:
                        fault = waiting.get_nowait()
                    except queue.Empty:
                        return
                    place = folder / f"{fault.number:03d}-{fault.kind}"
                    verdict = break_one(cluster, place, lane_name(number), fault, lambda: reference, ranks, ep)
                    if stop.is_set():
                        return
                    more = f" RANKS={ranks}" * (ranks != 8) + f" EP={ep}" * (ep > 1)
                    again = f"\n         again: make torture SEED={asked.seed} ONLY={fault.number}{more}; kept: {place}"
                    say(fault.number, verdict.line() + again * (not verdict.ok))

            for future in [pool.submit(lane, number) for number in range(lanes)]:
                future.result()
        finally:
            stop.set()
            cluster.stop()
            pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
