"""The interface over which ranks meet, on two hosts: network namespaces whose interfaces differ in name."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.network import GLOO, choose_interface, describe_interfaces, list_interfaces
from tests.conftest import REPOSITORY
from tests.waiting import LIMIT_S

FIRST, SECOND = "10.77.0.1", "10.77.0.2"
RANK = """
import os
import torch, torch.distributed as dist
from hpc_gpt.core.network import use_interface
use_interface(nodes=2, local_rank=0)
dist.init_process_group("gloo", init_method="env://")
mine = torch.ones(1) + dist.get_rank()
dist.all_reduce(mine)
print("sum", mine.item(), flush=True)
os._exit(0)
"""

# A name server that takes a while to know no name; then rank 0 of so many ranks, to whose store eight others connect.
STORE = """
import socket, sys, threading, time
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from hpc_gpt.trainer.ranks import _client, _store
asked = 0
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("10.77.0.1", 53))
def answer():
    global asked
    while True:
        query, sender = server.recvfrom(4096)
        asked += 1
        time.sleep(0.05)
        server.sendto(query[:2] + bytes([0x81, 0x83]) + query[4:6] + bytes(6) + query[12:], sender)
threading.Thread(target=answer, daemon=True).start()
store = _store("10.77.0.1", 29511, RankIdentity(0, int(sys.argv[1]), 0))
others = [_client() for _ in range(8)]
print("asked", asked)
try:
    socket.gethostbyname("somewhere")
except OSError as fault:
    print("again", asked, fault)
"""


@pytest.fixture
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Commands that start another one on the first and on the second host."""
    if shutil.which("ip") is None:
        pytest.skip("no network of two hosts can be made here: no ip of Debian's iproute2")
    names = [f"hpcgpt{os.getpid()}{end}" for end in "ab"]
    steps = [["netns", "add", name] for name in names]
    steps.append(["link", "add", "slow0", "netns", names[0], "type", "veth", "peer", "name", "eno7", "netns", names[1]])
    for name, link, address in zip(names, ("slow0", "eno7"), (FIRST, SECOND), strict=True):
        steps += [["-n", name, "address", "add", f"{address}/24", "dev", link]]
        steps += [["-n", name, "link", "set", each, "up"] for each in (link, "lo")]
    try:
        for step in steps:
            made = subprocess.run(["ip", *step], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network of two hosts can be made here: {made.stderr.strip()}")
        yield tuple(["ip", "netns", "exec", name] for name in names)  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def environment(rank: int, **more: str) -> dict[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": FIRST, "MASTER_PORT": "29511"}
    kept = {name: text for name, text in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return kept | own | {"PYTHONPATH": str(REPOSITORY)} | more


def test_ranks_of_two_hosts_meet_over_interfaces_of_other_names(hosts: tuple[list[str], list[str]]) -> None:
    ranks = [
        subprocess.Popen(
            [*host, sys.executable, "-c", RANK],
            env=environment(number, **({"NCCL_SOCKET_IFNAME": "ib0"} if number else {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, host in enumerate(hosts)
    ]
    said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    node = platform.node()
    assert f"{node}: gloo over slow0, NCCL over what it chooses\n" in said[0]
    assert f"{node}: gloo over eno7, NCCL over ib0\n" in said[1]
    assert all("sum 3.0" in each for each in said)


@pytest.mark.parametrize("ranks", [4, 16384])
def test_names_that_are_slow_to_look_up_are_left_out(tmp_path: Path, ranks: int) -> None:
    (resolv := tmp_path / "resolv.conf").write_text("nameserver 10.77.0.1\n")
    here = f"ip link set lo up && ip address add 10.77.0.1/24 dev lo && mount --bind {resolv} /etc/resolv.conf"
    alone = ["unshare", "--net", "--mount", "sh", "-c", f'{here} || exit 77; exec "$@"', "sh"]
    own = {"MASTER_ADDR": FIRST, "MASTER_PORT": "29511"}
    try:
        done = subprocess.run(
            [*alone, sys.executable, "-c", STORE, str(ranks)], env=environment(0, **own), capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no machine with a name server of its own can be made here: no unshare")
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"no machine with a name server of its own can be made here: {done.stderr.strip()}")
    assert not done.returncode, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    if ranks == 4:
        assert "note:" not in said
        assert int(said["asked"]) > 2 * 8
    else:
        assert "rank 0 leaves out the names of 32,768 connections" in said["note:"]
        assert int(said["asked"]) == 1
        assert "err=-3" in done.stderr, "torch gives a warning of it"
    assert int(said["again"].split()[0]) > int(said["asked"]), "other names are still looked up"


def test_without_a_route_the_fault_names_node_and_address(hosts: tuple[list[str], list[str]]) -> None:
    asked = "from hpc_gpt.core.network import choose_interface; choose_interface('192.0.2.9', 2)"
    done = subprocess.run(
        [*hosts[1], sys.executable, "-c", asked], env=environment(1), capture_output=True, text=True, check=False
    )
    assert f"node {platform.node()} has no route to 192.0.2.9, where the ranks meet" in done.stderr
    assert "ConfigError" in done.stderr


@pytest.fixture
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the environment names an interface."""
    monkeypatch.delenv(GLOO, raising=False)


@pytest.mark.usefixtures("no_interface")
def test_loopback_is_for_one_node() -> None:
    assert choose_interface("127.0.0.1", 1) == {GLOO: "lo"}
    assert choose_interface("localhost", 1) == {GLOO: "lo"}
    with pytest.raises(
        ConfigError, match=rf"node {platform.node()} reaches localhost.* of 2 nodes .*loopback"
    ) as fault:
        choose_interface("localhost", 2)
    assert platform.node() in str(fault.value)
    assert "HPC_GPT_MASTER_ADDR" in fault.value.hint


def test_a_given_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "ib0")
    assert choose_interface("192.0.2.9", 2) == {}


@pytest.mark.usefixtures("no_interface")
def test_a_name_without_an_address_is_no_route() -> None:
    with pytest.raises(ConfigError, match=r"has no route to nosuch\.invalid"):
        choose_interface("nosuch.invalid", 2)


def test_interfaces_are_those_of_the_system() -> None:
    assert list_interfaces()["127.0.0.1"] == "lo"
    assert set(list_interfaces().values()) <= {name for _, name in socket.if_nameindex()}


def test_what_is_used_is_described_without_a_choice_too() -> None:
    assert describe_interfaces({}) == "gloo over the interface of the node's name, NCCL over what it chooses"
