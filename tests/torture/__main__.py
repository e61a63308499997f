"""`python -m tests.torture`: a number of faults of a seed, on a real Slurm cluster of virtual nodes on this machine.

Prints the order, then a line for each fault when its run is done. The results are kept under build/torture/, and the
same command continues after them. Needs root and Slurm's packages, like the tests of tests/slurm.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.slurm.cluster import Cluster, running_services
from tests.torture.campaign import Verdict, break_one, free_small_disks, unbroken
from tests.torture.faults import EARLIEST, KINDS
from tests.torture.order import Planned, planned
from tests.torture.site import FOLDER, cluster_spec, lane_name


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every run ended as if nothing had happened, else 1; 130 after Ctrl-C."""
    asked = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kinds = sorted(KINDS) if asked.ep == 1 else [name for name in sorted(KINDS) if not KINDS[name].program]
    faults = planned(kinds, asked.seed, max(asked.faults, asked.only or 0), EARLIEST)
    folder = FOLDER / f"seed-{asked.seed}{f'-ep{asked.ep}' if asked.ep > 1 else ''}"
    results = folder / "results.jsonl"
    before = {} if asked.only else _read(results, faults)
    for fault in faults:
        mark = "only" if fault.number == asked.only else "done" if fault.number in before else ""
        print(f"{fault.number:3d} {fault.words}{f'  [{mark}]' if mark else ''}")
    todo = [f for f in faults if (f.number == asked.only if asked.only else f.number not in before)]
    print(
        f"seed {asked.seed}: {len(faults)} faults, {len(before)} of them done before; results in {results}", flush=True
    )
    began = time.monotonic()
    found: dict[int, Verdict] = dict(before)
    if todo:
        try:
            found |= _strike(todo, folder, None if asked.only else results, asked)
        except (KeyboardInterrupt, SystemExit):
            print("interrupted; the same command continues from here", file=sys.stderr, flush=True)
            free_small_disks()
            os._exit(130)  # nobody waits for threads whose cluster is gone
        finally:
            free_small_disks()
    return _summary(found, asked, time.monotonic() - began)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=1, help="of the order, the moments and all other choices (1)")
    parser.add_argument("--only", type=int, help="that one fault of the seed, again")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side (2)")
    parser.add_argument("--ranks", type=int, default=8, choices=(4, 8), help="4: half the data parallelism (8)")
    parser.add_argument("--ep", type=int, default=1, choices=(1, 2, 4), help="above 1: experts over ranks (1)")
    return parser.parse_args(arguments)


def _read(results: Path, faults: list[Planned]) -> dict[int, Verdict]:
    """The verdicts so far of the faults that are planned."""
    wanted = {(fault.number, fault.kind) for fault in faults}
    lines = results.read_text().splitlines() if results.exists() else []
    verdicts = [Verdict(**json.loads(line)) for line in lines]
    return {verdict.number: verdict for verdict in verdicts if (verdict.number, verdict.kind) in wanted}


def _strike(todo: list[Planned], folder: Path, results: Path | None, asked: argparse.Namespace) -> dict[int, Verdict]:
    """Breaks a run for each fault, some at once; appends each verdict to `results` as it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    lanes, ranks, ep = asked.at_once, asked.ranks, asked.ep
    waiting: queue.SimpleQueue[Planned] = queue.SimpleQueue()
    for fault in todo:
        waiting.put(fault)
    found: dict[int, Verdict] = {}
    writing, stop = threading.Lock(), threading.Event()
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
                    with writing:
                        found[fault.number] = verdict
                        print(verdict.line(), flush=True)
                        if not verdict.ok:
                            print(f"         kept: {place}\n         again: {_again(asked, fault.number)}", flush=True)
                        if results is not None:
                            with open(results, "a", encoding="utf-8") as file:
                                file.write(verdict.to_json() + "\n")

            for future in [pool.submit(lane, number) for number in range(lanes)]:
                future.result()
        finally:
            stop.set()
            cluster.stop()
            pool.shutdown(wait=False, cancel_futures=True)
    return found


def _summary(found: dict[int, Verdict], asked: argparse.Namespace, seconds: float) -> int:
    verdicts = [found[number] for number in sorted(found)]
    lost = [verdict for verdict in verdicts if not verdict.ok]
    by_hand = sum(bool(verdict.by_hand) for verdict in verdicts)
    missed = sum(verdict.missed for verdict in verdicts)
    print(f"{len(verdicts)} faults, {len(lost)} lost runs; {seconds:.0f} s now")
    if by_hand:
        print(f"{by_hand} went on by their user's submit --resume, as their kind of fault wants it")
    if missed:
        print(f"{missed} runs were over before their fault and were repeated")
    for verdict in lost:
        print(f"lost: {verdict.number} {verdict.what}: {_again(asked, verdict.number)}")
    return 1 if lost else 0


def _again(asked: argparse.Namespace, number: int) -> str:
    """The command that repeats one fault."""
    more = f"{f' RANKS={asked.ranks}' if asked.ranks != 8 else ''}{f' EP={asked.ep}' if asked.ep > 1 else ''}"
    return f"make torture SEED={asked.seed} ONLY={number}{more}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
