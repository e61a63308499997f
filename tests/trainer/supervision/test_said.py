"""What a failure is taken for, and what is said of it: each of torch's and the system's words, in either case."""

import pytest

from hpc_gpt.core.errors import UserError
from hpc_gpt.trainer.supervision.ending import classify_exception, explain_exception, lost_peer

LOST = ("connection closed", "socket was likely reset", "reset by remote peer", "remote peer closed", "broken pipe",
        "remote process exit", "recvvalue failed", "failed to recv", "socket timeout")  # fmt: skip
MET_NOBODY = ("trying to connect: broken pipe", "failed to connect: socket timeout", "failed to listen: broken pipe")
DRIVER = "update NVIDIA's driver on this node, or use a torch that was built for its version of CUDA"
COMPILER = (
    'use engine.compile = "none", for a window also engine.attention = "efficient"; TORCHDYNAMO_VERBOSE=1 prints more'
)
FAILURES = {
    "Error: address already in use": "port_taken",
    "DistNetworkError: failed to listen: eaddrinuse": "port_taken",
    "DistStoreError: timed out after 601 s": "collective_timeout",
    "DistBackendError: timeout": "collective_timeout",
    "StoreError: timed out": "error",
    "CudaOutOfMemoryError: ": "gpu_memory",
    "Error: driver on your system is too old\n(1.4)\nmore": f"driver on your system is too old (1.4) | {DRIVER}",
    "Error: cuda driver version is insufficient": f"cuda driver version is insufficient | {DRIVER}",
    "torch._dynamo.Unsupported: a break\nin f\nand more": f"torch.compile failed: a break in f | {COMPILER}",
    "torch._inductor.LoweringException: ": f"torch.compile failed: LoweringException | {COMPILER}",
    "torch._inductors.Error: out": "error",
}


def raised(kind: str, text: str) -> Exception:
    module, _, name = kind.rpartition(".")
    return type(name, (RuntimeError,), {"__module__": module})(text)  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [str, str.title])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_taken_for_what_its_words_say(failure: str, change) -> None:
    kind, _, text = failure.partition(": ")
    said = explain_exception(raised(kind, change(text)))
    found = f"{said} | {said.hint}" if isinstance(said, UserError) else classify_exception(said)[0]
    assert found.lower() == FAILURES[failure].lower()


def test_only_who_had_met_another_rank_lost_it() -> None:
    for change in (str, str.title):
        assert all(lost_peer(raised("Error", change(f"[1] {text} [2]"))) for text in LOST)
        assert not any(lost_peer(raised("Error", change(text))) for text in (*MET_NOBODY, "a path/peer closed"))
