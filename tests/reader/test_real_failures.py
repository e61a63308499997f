"""Programs that really fail, and what is read from the words that they really print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.reader.failures.causes import Cause, first_cause
from hpc_gpt.reader.lines.part import Failure
from hpc_gpt.reader.lines.read_log import read_log
from tests.programs import python
from tests.waiting import LIMIT_S

PROGRAMS = {
    "host_memory": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\nbytearray(1 << 33)",
        "MemoryError",
    ),
    "disk_full": ("open('/dev/full', 'w').write('x' * 100_000)", "OSError: [Errno 28] No space left on device"),
    "user_error": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--layers', type=int)\n"
        "parser.parse_args(['--layers', 'many'])",
        "program.py: error: argument --layers: invalid int value: 'many'",
    ),
    "data": (
        "open('/data/my-gpt2_text_document.bin')",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/my-gpt2_text_document.bin'",
    ),
    "nan": (
        "loss = float('nan')\nassert loss == loss, 'Rank 3: found NaN in local grad norm'",
        "found NaN in local grad norm",
    ),
    "error": (
        "for step in (1, 2, 3):\n    print(f'iter {step}: loss 3.2000, time 2767.30ms', flush=True)\n"
        "try:\n    {}['loss']\nexcept KeyError:\n    [][3]",
        "KeyError: 'loss'",
    ),
    "hang": (
        "import faulthandler, time\nfaulthandler.dump_traceback_later(0.1, exit=True)\ntime.sleep(60)",
        "Timeout (0:00:00.100000)!",
    ),
}


def cause_of_log(path: Path) -> Cause:
    return first_cause(read_log(path).parts, False)


def run(tmp_path: Path, command: list[str], **environment: str) -> Cause:
    """What is read from the log of a command, which must fail."""
    log = tmp_path / "train.log"
    with open(log, "w") as out:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, **environment},
        )
    assert done.returncode != 0, log.read_text()
    return cause_of_log(log)


@pytest.mark.parametrize("ended", PROGRAMS)
def test_a_program_that_fails_is_of_its_class(tmp_path: Path, ended: str) -> None:
    program, words = PROGRAMS[ended]
    (tmp_path / "program.py").write_text(program + "\n")
    cause = run(tmp_path, [sys.executable, "program.py"])
    assert (cause.ended, cause.sure) == (ended, ""), cause
    assert words in cause.text
    assert cause.failure is not None
    shown = (tmp_path / "train.log").read_text().splitlines()[cause.failure.place.line - 1]
    assert cause.failure.message.partition(" at `")[0] in shown


@pytest.mark.parametrize(
    ("ending", "words", "sure"),
    [
        ("import ctypes; ctypes.string_at(0)", "Segmentation fault", ""),
        ("import os; os.kill(os.getpid(), 9)", "Killed", "nothing says who killed it"),
    ],
)
def test_a_signal_in_the_words_of_the_shell(tmp_path: Path, ending: str, words: str, sure: str) -> None:
    (tmp_path / "program.py").write_text(ending + "\n")
    (tmp_path / "job.sh").write_text(f"{sys.executable} program.py\nexit $?\n")
    cause = run(tmp_path, ["bash", "job.sh"])
    assert cause.ended == "error"
    assert words in cause.text
    assert sure in cause.sure


# One process, for torch takes seconds to load: what each of its failures prints, apart by a line.
TORCH = """\
import os, signal, traceback
import torch
from torch.utils.data import DataLoader

class Killed(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

def fail(what):
    print("--------", what.__name__, flush=True)
    try:
        what()
    except Exception:
        traceback.print_exc(file=sys.stdout)

def host_memory(): torch.empty(1 << 50)
def data(): torch.nn.Embedding(10, 2)(torch.tensor([11]))
def worker(): list(DataLoader(Killed(), num_workers=1))
def user_error(): torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3, 3)})
def disk_full(): torch.save(torch.zeros(1 << 20), "/dev/full")

import sys
for what in (host_memory, data, worker, user_error, disk_full): fail(what)
"""


@pytest.mark.long
def test_what_torch_prints(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TORCH)
    done = python("program.py", cwd=tmp_path, code=0)
    found = {}
    for piece in done.stdout.split("-------- ")[1:]:
        name, _, text = piece.partition("\n")
        (tmp_path / "piece.log").write_text(text)
        found[name] = cause_of_log(tmp_path / "piece.log").ended
    wanted = {name: name for name in ("host_memory", "data", "user_error", "disk_full")}
    assert found == {**wanted, "worker": "host_memory"}, done.stdout


PEERS = """\
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
"""


@pytest.mark.long
def test_of_two_ranks_the_killed_one_is_named_not_its_loser(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PEERS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]

    def is_lost(failure: Failure) -> bool:
        return failure.rank == 0 and "Connection" in failure.message

    # On a busy machine torchrun may end the other rank before that has said what it lost.
    for _ in range(3):
        cause = run(tmp_path, launch, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        if any(map(is_lost, cause.echoes)):
            break
    assert (cause.ended, cause.rank) == ("error", 1), cause
    assert "signal 9 (SIGKILL)" in cause.text
    assert "nothing says who killed it" in cause.sure
    assert any(map(is_lost, cause.echoes))
