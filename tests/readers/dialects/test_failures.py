"""Lines that tell of a failure: class, rank, node, what is only a consequence; and lines that tell of none."""

from __future__ import annotations

import re

import pytest

from hpc_gpt.readers.causes import one_a_line
from hpc_gpt.readers.dialects import dialects
from hpc_gpt.readers.logs import Failure
from hpc_gpt.readers.logs.matches import all_patterns
from hpc_gpt.runs.failures import ENDED
from tests.readers.reading import read_lines

OURS = {
    "collectives",
    "gpu_faults",
    "launchers",
    "memory_exhausted",
    "python_exceptions",
    "slurm_words",
    "training_stopped",
}


def failure_in(line: str) -> Failure | None:
    found = one_a_line([failure for part in read_lines("a.log", [line]) for failure in part.failures])
    assert len(found) <= 1
    return found[0] if found else None


# class, "echo" for a consequence, rank, node | line
LINES = """\
hang 3 n7 | hang: no rank made a step for 8 s; rank 3 on n7 is silent, last seen after step 4; ranks 0-2 wait in recv
hang - - | hang: no rank made a step for 8 s; ranks 0-3 wait in all_reduce after step 6 (loop.py:96 in run)
error - - | ValueError: bad
error 3 - | [rank3]: ValueError: bad
error echo 2 - | ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.
error 3 - | [default3]:ValueError: bad
error 12 - | 12: KeyError: 'x'
error - r6i4n5 | r6i4n5: KeyError: 'x'
error - ip-10-0-0-1 | ip-10-0-0-1: KeyError: 'x'
error - - |   | ValueError: in a group
error - - | 2024-05-01T10:00:00.123Z RuntimeError: behind a time
error - - | [1,3]<stderr>:RuntimeError: behind mpirun's tag
error - - | ray.exceptions.RayTaskError(ValueError): ray::train() (pid=4711)
error - - | AssertionError
error - - | megatron.core.MyOwnError: words
error - - | AttributeError: 'GPT' object has no attribute 'forwrad'
user_error - - | SyntaxError: invalid syntax
user_error - - | NameError: name 'modle' is not defined
user_error - - | ImportError: cannot import name 'flash_attn_func' from 'flash_attn'
user_error - - | AssertionError: hidden_size (1023) must be divisible by num_attention_heads (16)
user_error - - | AssertionError: world size (12) is not divisible by tensor model parallel size (8)
user_error - - | train.py: error: unrecognized arguments: --micro-batch
user_error - - | python: can't open file 'train.py': [Errno 2] No such file or directory
user_error - - | RuntimeError: CUDA error: invalid device ordinal
user_error - - | OSError: gpt9 is not a local folder and is not a valid model identifier
user_error - - | FileNotFoundError: [Errno 2] No such file or directory: 'vocab.json'
data - - | FileNotFoundError: [Errno 2] No such file or directory: '/data/c4.00001.parquet'
data - - | IndexError: Caught IndexError in DataLoader worker process 0.
data - - | UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0
disk_full - - | OSError: [Errno 28] No space left on device
disk_full - - | tar: ckpt: Wrote only 4096 of 10240 bytes: No space left on device
disk_full - - | OSError: [Errno 122] Disk quota exceeded
disk_full - - | safetensors_rust.SafetensorError: IoError(Os { code: 28, kind: StorageFull })
cancelled echo - - | KeyboardInterrupt
error echo - - | BrokenPipeError: [Errno 32] Broken pipe
error echo - - | ConnectionResetError: [Errno 104] Connection reset by peer
gpu_memory - - | RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.75 GiB total)
gpu_memory 5 - | [rank5]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1 GiB
gpu_memory - - | RuntimeError: CUDA error: out of memory
gpu_memory - - | torch.AcceleratorError: CUDA error: out of memory
gpu_memory - - |   what():  CUDA error: out of memory
gpu_memory - - | Cuda failure 2 'out of memory'
gpu_memory - - | n1:4711:4800 [3] NCCL WARN Cuda failure 'out of memory'
gpu_memory - - | RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
gpu_memory - - | jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying
host_memory - - | MemoryError
host_memory - - | MemoryError: Unable to allocate 7.28 TiB for an array
host_memory - - | OSError: [Errno 12] Cannot allocate memory
host_memory - - | RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.
host_memory - - | slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the
host_memory 12 r6i4n5 | srun: error: r6i4n5: task 12: Out Of Memory
node_failure - - | RuntimeError: CUDA error: unspecified launch failure
node_failure 7 - | [rank7]: RuntimeError: CUDA error: uncorrectable NVLink error
node_failure - - | RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable
node_failure - - | NVRM: Xid (PCI:0000:1a:00): 74, pid=4711, NVLink: fatal error detected
error - - | NVRM: Xid (PCI:0000:1a:00): 13, Graphics SM Warp Exception
data - - | RuntimeError: CUDA error: device-side assert triggered
error - - | RuntimeError: CUDA error: an illegal memory access was encountered
collective_timeout 8 - | [E ProcessGroupNCCL.cpp:737] [Rank 8] Watchdog caught collective operation timeout: WorkNCCL(
collective_timeout - - | RuntimeError: [1] is setting up NCCL communicator; store->get('0') got error: Socket Timeout
collective_timeout - - | RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv
error echo - - | torch.distributed.DistNetworkError: Connection reset by peer
error echo - - | ncclRemoteError: A call failed possibly due to a network error or a remote process exiting early
node_failure echo - r6i4n5 | r6i4n5:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.1.1.1<4242> with status=12
error echo 3 gpu-a100-07 | srun: error: gpu-a100-07: task 3: Exited with exit code 137
walltime 0 - | 0: slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2021-05-27T21:52:36 DUE TO TIME LIMIT ***
walltime - - | slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2021-05-27T21:52:36 DUE TO TIME LIMIT ***
cancelled - - | 7|gpt|CANCELLED by 1000|0:0
cancelled - - | 4            allocation CANCELLED+      0:0
user_error - - | slurmstepd-n4: error: execve(): /no/such/file: No such file or directory
node_failure - - | 7_3          gpt   research         64  NODE_FAIL      1:0
nan - - | AssertionError: Rank 12: found NaN in local grad norm in backward pass
nan - - | FloatingPointError: Minimum loss scale reached (0.0001).
"""


def cases() -> list[tuple[str, str, str, int | None, str | None]]:
    rows = []
    for row in LINES.splitlines():
        said, line = row.split(" | ", 1)
        *ended, rank, node = said.split()
        echo = "echo" if "echo" in ended else ""
        rows.append((line, ended[0], echo, None if rank == "-" else int(rank), None if node == "-" else node))
    return rows


@pytest.mark.parametrize(("line", "ended", "echo", "rank", "node"), cases())
def test_a_line_is_of_its_class(line: str, ended: str, echo: str, rank: int | None, node: str | None) -> None:
    found = failure_in(line)
    assert found is not None
    assert (found.ended, "echo" if found.echo else "", found.rank, found.node) == (ended, echo, rank, node)
    assert found.words in line
    assert len(found.words) > 8


@pytest.mark.parametrize(
    "line",
    [
        "  exit_on_error ................................... False",
        "  error_rate ...................................... 0.01",
        "[INFO] errors so far: 0, ignoring errors in the data",
        "UserWarning: this RuntimeError: x is ignored",
        "FutureWarning: torch.load with weights_only=False",
        '    raise ValueError("bad")',
        "    except OSError:",
        "catching KeyError: not at the line's start",
        "NCCL INFO Launch mode Parallel",
        "NCCL version 2.20.5+cuda12.4",
        "[rank0]:n1:2914:2914 [0] misc/ibvwrap.cc:185 (wrap_ibv_alloc_pd) NCCL WARN lib wrapper not initialized.",
        'n1:4711:4800 [3] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instability',
        "[Rank 0] memory after OutOfMemory checks: fine",
        "step 100 loss 3.1 exit code 0",
        "[2023-01-01 00:00:00,000] [INFO] [launch.py:347:main] Process 4711 exits successfully.",
        "[INFO] [launch.py] exits with return code = 0",
        "hosts: r6i4n5",
        "rank: 3, world size: 8",
        "Error: this has no name of its own",
        "srun: job 4711 queued and waiting for resources",
        "srun: job 4711 has been allocated resources",
        "#SBATCH --signal=SIGTERM@60",
        "  COMPLETED_STEPS = 10",
        "4711 tokens were TIMEOUTED",
        "  nan_check ....................................... NaN",
        " iteration       30/    1000 | lm loss: 3.2E+00 | loss scale: 16384.0 | number of nan iterations:   0 |",
        "total CUDA memory 31.75 GiB, none out of it",
        "Job started",
        "JobState=RUNNING Reason=None Dependency=(null)",
        "loading vocab from file that is not truncated",
        "warning: line 12: 4711 tokens were left out",
    ],
)
def test_what_only_mentions_a_failure_is_none(line: str) -> None:
    assert failure_in(line) is None


def test_the_job_id_of_slurms_words_is_a_fact() -> None:
    line = "slurmstepd: error: *** JOB 1999618 ON r6i4n5 CANCELLED AT 2021-05-27T21:52:36 ***"
    fact = read_lines("a.out", [line])[0].fact("job_id")
    assert fact is not None
    assert fact.value == "1999618"


def test_a_completed_job_is_done() -> None:
    assert [ended for ended, _ in read_lines("a", ["7|gpt|COMPLETED|0:0"])[0].ends] == ["done"]
    assert [ended for ended, _ in read_lines("a", ["   JobState=COMPLETED Reason=None"])[0].ends] == ["done"]


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_pattern_of_failures_matches_a_line_of_its_specimen(name: str) -> None:
    dialect = next(dialect for dialect in dialects() if dialect.name == name)
    lines = dialect.specimen.splitlines()
    for each in all_patterns():
        if each.dialect is dialect:
            assert any(each.pattern.literal in line and each.regex.search(line) for line in lines), each.pattern.regex
    for line in lines:
        assert any(part.failures or part.ends or part.facts for part in read_lines("a", [line])), line


def test_every_class_is_one_of_a_record_and_every_failure_has_words() -> None:
    for dialect in dialects():
        for pattern in dialect.patterns:
            if pattern.kind == "failure":
                assert pattern.ended in ENDED, pattern
            if pattern.kind == "failure" and dialect.name in OURS:
                assert "words" in re.compile(pattern.regex).groupindex, pattern


@pytest.mark.parametrize(
    "line",
    [
        " " * 60_000 + "rror",
        "|" * 60_000 + "Error",
        "a." * 30_000 + "Error",
        "[x]" * 20_000 + "Error: ",
        "1: " * 20_000 + "Exception",
        "A" * 60_000 + "Error",
        "x " * 30_000 + "No space left on device rror",
        "4711|" + "a" * 60_000 + "TIMEOUT FAIL CANCELLED",
        "NCCL WARN" * 6_000,
        "(" * 60_000 + "rror NCCL exit ignal Kill host  (local_rank srun: : line NaN",
        "host      " * 6_000,
        "Assertion `" * 5_000,
        "line 1: " * 8_000,
    ],
    ids=range(13),
)
def test_a_hostile_line_is_read_in_a_moment(line: str) -> None:
    """A regex that goes back over its steps would take hours here."""
    assert len(read_lines("a", [line] * 3)) >= 1
