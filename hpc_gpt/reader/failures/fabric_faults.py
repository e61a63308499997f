"""Networks of libfabric (Slingshot's CXI, EFA) and the plugins by which NCCL and RCCL use them.

If a plugin does not start, NCCL may continue over TCP: such a line is an echo, which explains the failure of a collective
(`causes`). libfabric names a return code by its number or its text, so the code decides what to do.
"""

import re

from hpc_gpt.reader.failures.failure_families import LOCKED_MEMORY, failure_family
from hpc_gpt.reader.lines.pattern import EXCEPTION_START, Dialect, Pattern, failure

_PLUGIN = (
    "NCCL's network plugin is not in the job's environment: load its module (aws-ofi-nccl, rccl-net-plugin), or the"
    " container's hook for it, so that libnccl-net.so is in LD_LIBRARY_PATH, or leave NCCL_NET out"
)
_VERSIONS = (
    "libfabric and the network plugin do not fit the node's: use the host's libfabric and aws-ofi-nccl (bind them into the"
    " image, or take its hook), built for this NCCL or RCCL; FI_PROVIDER names the provider"
)
_NO_PROVIDER = (
    "libfabric finds no network card here: `fi_info -p cxi` or `-p efa` must list one in the job; give the container"
    " /dev/cxi* or /dev/infiniband, and the host's libfabric"
)
_NO_RIGHT = (
    "the step has no right to the network card: start the ranks by srun (on Slingshot with --network=job_vni or"
    " single_node_vni, as the site says), and give the container its device files"
)
_QUEUE = (
    "a queue of the network card was too short: FI_CXI_DEFAULT_CQ_SIZE=131072 or more, FI_CXI_DEFAULT_TX_SIZE=2048,"
    " FI_CXI_RDZV_PROTO=alt_read; with many peers FI_CXI_RX_MATCH_MODE=software"
)
_MATCHING = "the card had no entries left to match messages: FI_CXI_RX_MATCH_MODE=software (or hybrid)"
_CARD_ENTRIES = "the network card had no entries left: fewer processes and communicators on each node"
_PEER = "another rank died before, or its node left the network: the cause is in the other ranks' logs"
_VNI = (
    "another step on the node uses the same endpoint of the card: one srun on a node at a time, or a FI_CXI_DEFAULT_VNI of"
    " its own for each"
)
_FORK = "the EFA provider cannot fork here: FI_EFA_FORK_SAFE=1, and FI_EFA_USE_HUGE_PAGE=0 for data workers"
_LOST = (
    "the network lost a message, or the peer's node left it: nothing of the program; start again, on Slingshot with"
    " FI_CXI_RX_MATCH_MODE=software if it comes back"
)
_NET_LACKING = "NCCL does not find its network card: it must be visible in the container; or NCCL of another version"
_MIXED = "the ranks have different versions of NCCL or RCCL: start the same environment or image on every node"

_MENTIONS = r"(?!.{0,120}\b(?:INFO|DEBUG|TRACE)\b|.{0,120}<(?:info|debug|trace)>)"
# A line about libfabric: the plugin's, the library's own, a call of it.
_ABOUT = r"(?:NET/OFI|[Ll]ibfabric|\bOFI\b|\bofi_\w|\bfi_[a-z]+|\bcxip?[_:]|\befa[_:]|\bEFA\b)"
# ... that reports a failure.
_FAILS = r"(?:[Cc]ould ?n[o']t|[Cc]annot|[Uu]nable|[Ff]ail|[Ee]rror|ERROR|<warn>|WARN\b)"


def _by_code(texts: str, codes: str, to_do: str) -> tuple[Pattern, ...]:
    """The patterns of failures with a return code of libfabric: by the system's texts for it, and by its numbers, both
    separated by `|`."""
    forms = {text: re.escape(text) for text in texts.split("|")}
    forms |= {
        form: re.escape(form) for code in codes.split("|") for form in (f"RC: -{code},", f"(-{code})", f"ret -{code},")
    }
    about = rf"{EXCEPTION_START}{_MENTIONS}(?=.{{0,500}}?{_ABOUT})(?=.{{0,500}}?{_FAILS})"
    return tuple(
        Pattern(
            "failure",
            rf"{about}(?P<words>.{{0,600}}?{form}.{{0,200}})",
            literal,
            ended="user_error",
            echo=True,
            to_do=to_do,
        )
        for literal, form in forms.items()
    )


DIALECT = Dialect(
    name="fabric_faults",
    patterns=(
        # --- a peer that is gone; queues of the card
        *(
            Pattern("failure", rf"{EXCEPTION_START}{_MENTIONS}(?!MPIDI_OFI_handle_cq_error\()(?P<words>.{{0,400}}?\b{code}.{{0,200}})", code,
                    ended="error", echo=True, to_do=_PEER)
            for code in ("PTLTE_NOT_FOUND", "UNDELIVERABLE", "TRANSACTION_TIMEOUT")
        ),
        # MPICH's own message, with which it ends the job.
        Pattern("failure", r"(?P<words>MPIDI_OFI_handle_cq_error\(\d{1,6}\): OFI poll failed .{0,300})",
                "MPIDI_OFI_handle_cq_error(", ended="node_failure", to_do=_LOST),
        *failure_family("user_error", _QUEUE,
            line="Event Queue overflow | CQ overflow | Completion Queue overrun | EQ overflow"),
        Pattern("failure", r"(?P<words>(?:MPICH WARNING: |\bOFI is ).{0,200}completion queue exhaustion.{0,200})",
                "completion queue exhaustion", ended="user_error", to_do=_QUEUE),
        *failure_family("user_error", _MATCHING,
            line="LE resources not recovered | FI_CXI_RX_MATCH_MODE=…is required | LE_LIST…exhaust | LE exhaust | out of LEs"),
        # --- plugins
        *failure_family("user_error", _PLUGIN, echo=True,
            line=("Error: network…not found | Failed to initialize any NET plugin | "
            "NCCL_NET_PLUGIN…not found | WARN…NET plugin…not found | WARN…Failed to load NET plugin")),
        *failure_family("user_error", _NET_LACKING, echo=True, line="WARN Could not find NET with id"),
        *failure_family("user_error", _MIXED, line="Mismatched NCCL version | Mismatched RCCL version | NCCL version mismatch"),
        *failure_family("user_error", _FORK,
            line="call to the fork() system call | EFA provider is operating in a condition"),
        # --- by return code
        *_by_code("Cannot allocate memory", "12", LOCKED_MEMORY),
        *_by_code("No data available|output empty list", "61", _NO_PROVIDER),
        *_by_code("Permission denied|Operation not permitted|Key was rejected", "13|1", _NO_RIGHT),
        *_by_code("No space left on device", "28", _CARD_ENTRIES),
        *_by_code("Address already in use", "98", _VNI),
        *_by_code("Function not implemented|Invalid argument|Operation not supported|Protocol not available|No such device",
                  "38|22|95|92|19", _VERSIONS),
        *failure_family("user_error", _NO_PROVIDER, echo=True,
            says="NET/OFI Unable to find a protocol | NET/OFI No eligible providers | NET/OFI OFI fi_getinfo | NET/OFI fi_getinfo"),
        *failure_family("user_error", _VERSIONS, echo=True,
            says=("NET/OFI Creating new endpoint…failed | NET/OFI Couldn't open | NET/OFI Couldn't enable | NET/OFI Unable to register memory | "
            "aws-ofi-nccl initialization failed | NET/OFI Failed to initialize")),
        failure("node_failure", "ibfabric", r"(?P<words>libfabric:\d.{0,160}<warn> .{0,120}(?:[Ll]ink (?:is )?down|NIC (?:is )?(?:down|dead)|[Dd]evice fatal).{0,200})"),
    ),
)  # fmt: skip
