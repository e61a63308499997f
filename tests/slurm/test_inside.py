"""A look inside a running job: `shell` and `top` on two nodes of a real cluster, before and after one of them dies."""

import re

import pytest

from tests.slurm.launcher import ENDLESS, PAIR, PYTHON, UNSAVED
from tests.slurm.stories import Teller, slow_storied
from tests.terminal import on_a_terminal

# What a shell has, as words: where it is, which rank it is beside and what it may use, what it does not have.
SHOW = (
    'echo "$SLURMD_NODENAME" rank "$HPC_GPT_RANK" pid "$HPC_GPT_RANK_PID" device "$HPC_GPT_DEVICE" '
    'gpus "$SLURM_GPUS_ON_NODE" visible "$CUDA_VISIBLE_DEVICES" world "${WORLD_SIZE:-none}" '
    'master "${MASTER_ADDR:-none}" code "$PYTHONPATH" iface "$GLOO_SOCKET_IFNAME" in "$PWD"; '
    'tr "\\0" "\\n" <"/proc/$HPC_GPT_RANK_PID/environ" | grep ^RANK='
)


@pytest.mark.long
@slow_storied
def test_a_shell_is_beside_its_rank_and_top_shows_who_is_silent(teller: Teller) -> None:
    launcher = teller.launcher
    # A rank is silent after some 10 s, and for a minute the other one waits for it.
    job = launcher.submit(*PAIR, *ENDLESS, *UNSAVED, "--set", "train.hang_floor_s=60")
    job.wait_step(3)
    nodes, run = job.nodes(), job.run.run_id
    for where, rank in (((), 0), (("--rank", "1"), 1), (("--node", nodes[1]), 1)):
        shown, _ = launcher.run("shell", run, *where, "--", "bash", "-c", SHOW)
        words = (
            rf"{nodes[rank]} rank {rank} pid \d+ device cpu gpus 4 visible 0,1,2,3 world none master none "
            rf"code {re.escape(str(job.run.path))}/code:\S* iface lo in \S+\nRANK={rank}\n"
        )
        assert re.fullmatch(words, shown), shown
    launcher.run("shell", run, "--", "bash", "-c", "exit 7", code=7)
    for where, words in ((("--rank", "2"), "has no rank 2\n"), (("--node", "n99"), "has no rank on node n99\n")):
        refused = launcher.run("shell", run, *where, code=2)[1]
        assert words in refused
        assert f"hint: it has ranks 0 to 1 on {nodes[0]}, {nodes[1]}" in refused

    top = launcher.run("top", run)[0]
    assert "running  step " in top
    for rank, node in enumerate(nodes):
        assert re.search(rf"^{node} +1$", top, re.M), top
        assert re.search(rf"^{rank} +{node} +\d+ +training +\S+ s +\S+ s ago$", top, re.M), top
    assert "no GPU figures in the heartbeats" in top

    keys = {"type_in": "hostname; tty && exit 5\n", "after": "rank 0 "}
    code, typed = on_a_terminal(
        *PYTHON[1:], "shell", run, **keys, times=2, seconds=60, **launcher.environment, NO_COLOR="1"
    )
    assert re.search(r"rank 0 on n\d+: \$HPC_GPT_RANK_PID is \d+, \$HPC_GPT_DEVICE is cpu", typed), typed
    assert "/dev/pts/" in typed
    assert code == 5

    with teller.cluster.without_power(nodes[1]):
        job.wait("a silent rank", lambda: " silent" in launcher.run("top", run)[0] or job.restarts)
        top = launcher.run("top", run)[0]
        assert re.search(rf"^1 +{nodes[1]} .* ago +silent", top, re.M), top
        assert re.search(rf"^{nodes[1]} +1 +1$", top, re.M), top
        assert launcher.run("shell", run, "--", "bash", "-c", SHOW)[0].startswith(f"{nodes[0]} rank 0 pid ")
        note = launcher.run("shell", run, "--rank", "1", "--", "true", code=4)[1]
        silent = rf"rank 1 on {nodes[1]} has written no heartbeat for [\d.]+ s: it may be dead"
        assert re.match(rf"Error: {silent}, and no step starts on its node: \w.+\n\nhint: hpc-gpt logs ", note)
        teller.cluster.run("scancel", job.id, check=True)
        job.wait("its end", lambda: job.is_over)
