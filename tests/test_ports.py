"""The port of a rendezvous: nobody else gets it between its choice and its use."""

import re
import socket
import subprocess
import sys
from pathlib import Path

from hpc_gpt.core.network import free_port, held_port

# In another process: chooses for the same number, says which, and holds it until it is ended.
CHOOSES = """\
import sys
from hpc_gpt.core.network import held_port
port, held = held_port(5)
print(port, flush=True)
input()
"""


def test_a_chosen_port_is_outside_those_the_system_hands_out() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10000 <= free_port(number) < low for number in (0, 5, 22767, 22768, 123456789))


def test_nobody_chooses_a_held_port_until_its_holder_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", CHOOSES], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as other:
        assert other.stdout is not None
        first = int(other.stdout.readline())
        second, held = held_port(5)
        assert held is not None
        assert len({first, second, free_port(5)}) == 3
        # Its owner can use it all the while, as torch does and as a plain program does.
        socket.create_server(("127.0.0.1", second)).close()
        held.close()
        assert free_port(5) == second
        other.kill()
    assert free_port(5) == first


def test_a_port_listened_on_is_passed_over_by_each_start() -> None:
    port = free_port(7)
    with socket.create_server(("127.0.0.1", port)):
        assert free_port(7) != port
    assert len({free_port(7, tries) for tries in range(3)}) == 3


def test_a_taken_port_repeats_the_start_with_it_in_its_cause(tmp_path: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from hpc_gpt.core.runs.run_folder import Attempt
    from hpc_gpt.launcher.attempts.judge import EndedAttempt, Rules, judge
    from hpc_gpt.trainer.supervision.ending import report_failure

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        try:
            TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            report_failure(error, 0, Attempt(tmp_path), 0)
    end = Attempt(tmp_path).ended()
    assert end["ended"] == "port_taken"
    assert re.search(rf"\b{port}\b", end["cause"])
    verdict = judge([EndedAttempt(1, "port_taken", end["cause"])], Rules())
    assert (verdict.go_on, verdict.pause_s, verdict.retries) == (True, 30.0, 1)
