"""What a shared disk sees of a run's ranks: `python bench/disk_calls.py [--engine fsdp]`.

Real ranks over gloo on two nodes, 2, 4 and 8 in all, train, save and resume a checkpoint; each notes what it opens,
lists, makes, names and removes below the run's folder, but not what it asks for the state of. Printed are the calls of
rank 0, of the second node's first rank and of its last, of start and end together, of a save and of a resumption, and
what they come to on 2,048 nodes of 8.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_gpt.core.network import held_port
from hpc_gpt.core.processes.heartbeats import period_s
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.trainer.tokens.build import build_tokens
from tests.trainer.launch import Launch, new_run, settings

NODES, A_NODE = 2048, 8


def calls_of(folder: Path, engine: str, ranks: int, saves: int) -> tuple[list[list[str]], list[list[str]]]:
    """(each rank's calls in an attempt that saves so often, those of one that resumes it)"""
    folder.mkdir()
    data = build_tokens(Path(__file__).parent, folder / "own.tokens").path
    layout = {"tp": 1, "pp": 1, "dp": ranks}
    resolved = settings(data, layout, Engine(name=engine), steps=saves, save_every=1)
    run, found = new_run(folder / "logs", resolved), []
    for attempt in (1, 2):
        if attempt == 2:
            more = replace(resolved, train=replace(resolved.train, steps=saves + 1, save_every=0))
            (run.path / "resolved.json").write_text(more.to_json())
        counted = os.pathsep.join([f"{folder}/calls-{attempt}-{{rank}}", str(run.path)])
        port, held = held_port(os.getpid())
        places = {"LOCAL_RANK": "{local}", "SLURMD_NODENAME": "n{node}", "GLOO_SOCKET_IFNAME": "lo"}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        launched = Launch(run, ranks, COUNT_OPENS_IN=counted, **places)
        assert set(launched.wait()) == {0}, launched.log
        if held is not None:
            held.close()
        assert attempt == 1 or f"resumed after step {saves}" in launched.log, launched.log
        found.append([(folder / f"calls-{attempt}-{rank}").read_text().splitlines() for rank in range(ranks)])
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="ddp")
    asked = parser.parse_args()
    floor_s = Train().hang_floor_s
    print(f"{asked.engine}: calls of rank 0, of a node's first rank and of another")
    for ranks in (2, 4, 8):
        Launch.a_node = ranks // 2
        with tempfile.TemporaryDirectory() as name:
            once, _ = calls_of(Path(name) / "once", asked.engine, ranks, 1)
            thrice, resumed = calls_of(Path(name) / "thrice", asked.engine, ranks, 3)
        each = [0, ranks // 2, ranks - 1]
        saves = [(len(thrice[rank]) - len(once[rank])) / 2 for rank in each]
        starts = [len(once[rank]) - save for rank, save in zip(each, saves, strict=True)]
        again = [float(len(resumed[rank])) for rank in each]
        for what, found in (("start", starts), ("a save", saves), ("resume", again)):
            print(f"{ranks:3} ranks  {what:7}" + "".join(f"{calls:8.1f}" for calls in found), flush=True)
    for what, (first, of_node, other) in (("start", starts), ("a save", saves), ("resume", again)):
        total = first + (NODES - 1) * of_node + NODES * (A_NODE - 1) * other
        print(f"{NODES * A_NODE:,} ranks, {what}: {total:,.0f} calls")
    print(f"{NODES * A_NODE:,} ranks, a second: {NODES / period_s(floor_s):,.0f} heartbeats of nodes")


if __name__ == "__main__":
    main()
