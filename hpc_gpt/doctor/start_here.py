"""`python -m hpc_gpt.doctor.start_here NODES RANKS_PER_NODE COMMAND…`: as srun does it, on this machine alone.

The command is started once for each rank of each node; NODES are names with blanks between. What comes in goes to every
rank, and what the ranks say comes out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading


def main(nodes: str, ranks_per_node: str, *command: str) -> int:
    ranks = []
    for number, node in enumerate(nodes.split()):
        for local in range(int(ranks_per_node)):
            own = {"SLURMD_NODENAME": node, "SLURM_LOCALID": str(local), "SLURM_NODEID": str(number)}
            ranks.append(subprocess.Popen(command, env=os.environ | own, stdin=subprocess.PIPE))

    def hand_on() -> None:
        told = sys.stdin.buffer.read()
        for rank in ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(told)
                rank.stdin.close()
            except OSError:
                continue

    threading.Thread(target=hand_on, daemon=True).start()
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
