"""Collectives that time out or lose a peer: PyTorch's watchdog, NCCL, gloo, and the store in which ranks meet."""

from hpc_gpt.reader.failures.failure_families import NEVER_MET
from hpc_gpt.reader.lines.pattern import ANY_NAME, EXCEPTION_START, Dialect, Pattern, echo, failure, raised

_RANK = r"(?:\b[Rr]ank (?P<rank>\d{1,7})\] {0,4})?"

# NCCL's warnings at its start about things that it can do without.
_HARMLESS = (
    r"lib wrapper not initialized|NET/Plugin|Failed to open (?:lib|/)|Could not find|MSCCL|Missing |"
    r"[^\n]{0,120}(?:not supported|[Dd]isabling|falling back|deprecated|ignor(?:ed|ing)\b)"
)

# NCCL's messages about a network card, after `NCCL WARN` or as the last error of an exception.
_IB = r"NET/IB ?:? ?(?:\S{1,40}:\d{1,4} )?(?:Got (?:completion|async|fatal|error)|async fatal)"
# Codes of a network card: 12, the peer did not acknowledge; 13, it was not ready. Then the events that a card reports
# about itself.
_LINK_FAULT = (
    r"(?:status|error)[= ](?:\w{0,40}\()?1[23]\b|RETRY_EXC_ERR|port error|catastrophic|fatal event|(?<!non-)fatal async"
    r"|fatal error"
)
_LINK_NEWS = r"port active|GID|P_Key|LID|SM change|reregist|client|migrat"

DIALECT = Dialect(
    name="collectives",
    patterns=(
        failure("collective_timeout", "NCCL",
            rf"{_RANK}(?P<words>Watchdog caught collective operation timeout.{{0,400}})"),
        failure("collective_timeout", "rror",
            r"(?:\[Rank (?P<rank>\d{1,7})\]: )?(?P<words>Ranks? [\d, ]{1,300} failed to pass monitoredBarrier.{0,200})"),
        Pattern("failure",
            r"(?P<words>Timed out initializing process group in store based barrier on rank:? (?P<rank>\d{1,7}).{0,300})",
            literal="store based barrier", ended="collective_timeout", to_do=NEVER_MET),
        failure("collective_timeout", "rror", raised(ANY_NAME,
            r"[Ss]ocket [Tt]imeout|client socket has timed out|waiting for clients|wait timeout after \d"
            r"|Timed out waiting \d{1,12} ?ms for|Application timeout caused pair closure|RendezvousTimeoutError"
            r"|timed out after \d{1,9} ?(?:ms|s|seconds)|operation timed out|DEADLINE_EXCEEDED: ")),
        failure("hang", "NCCL", r"(?P<words>(?:Heartbeat monitor timed out|[Ff]irst PG on this rank that detected "
            r"no heartbeat|ProcessGroupNCCL's watchdog got stuck).{0,300})"),
        failure("hang", "NCCL", r"(?P<words>(?:(?<!\S)\S{0,80} ?)?watchdog got stuck.{0,300})"),
        # consequences
        echo("collective_timeout", "monitoredBarrier",
            r"(?:\S{0,60}Error: )?(?P<words>Rank (?P<rank>\d{1,7}) successfully reached monitoredBarrier, but received"
            r" errors.{0,200})"),
        echo("collective_timeout", "NCCL",
            rf"{_RANK}(?P<words>Received a dump signal due to a collective timeout.{{0,300}})"),
        echo("collective_timeout", "Timeout at NCCL work", rf"{_RANK}(?P<words>Timeout at NCCL work.{{0,300}})"),
        echo("collective_timeout", "Some NCCL", rf"{_RANK}(?P<words>Some NCCL operations have failed.{{0,200}})"),
        echo("collective_timeout", "NCCL", r"(?P<words>(?:Finished writing|ProcessGroupNCCL preparing to dump)"
            r".{0,80}(?:FlightRecorder|debug info).{0,200})"),
        echo("error", "NCCL",
            rf"{_RANK}(?P<words>(?:NCCL|Process group) watchdog thread terminated with exception.{{0,300}})"),
        # JAX's: the tasks that a barrier missed, or that its coordinator lost, one per line; then the reporter
        echo("collective_timeout", "/task:", r"^(?:\d{1,7}: )?(?P<words>/job:\w{1,40}/replica:\d{1,7}/task:(?P<rank>\d{1,7}))\s*$"),
        failure("collective_timeout", " heartbeat timeout",
            r"(?P<words>Task /job:\w{1,40}/replica:\d{1,7}/task:\d{1,7} heartbeat timeout.{0,200})"),
        failure("collective_timeout", "stopped sending heartbeats",
            r"(?P<words>The following tasks are unhealthy \(stopped sending heartbeats\).{0,200})"),
        # NCCL took sockets on a node with Slingshot, whose interfaces are hsn0 and so on.
        Pattern("fact", r"\bNET/Socket ?: Using [^\n]{0,60}?\bhsn\d", literal="NET/Socket", weak=True,
            facts={"over_sockets": True}),
        # EFA's and other networks of libfabric, by NCCL's plugin and by libfabric itself
        failure("node_failure", "NET/OFI",
            r"(?P<words>(?:NCCL WARN )?NET/OFI (?:Request \S{1,40} completed with error|(?=.{0,200}\b[Rr]ails?\b).{0,80}"
            r"(?:[Ff]ailed|[Ee]rror|\bdown|[Uu]nexpected)|.{0,200}Unresponsive receiver).{0,300})"),
        failure("node_failure", "libfabric:",
            r"(?P<words>libfabric:\d.{0,120}<warn> .{0,80}(?:Unresponsive|[Uu]nreachable|err: \d).{0,300})"),
        # A link that gave up; status 5 (flushed) and the others follow from that, here or at the peer.
        failure("node_failure", "NET/IB", rf"(?P<words>(?:NCCL WARN )?{_IB}.{{0,200}}?(?:{_LINK_FAULT}).{{0,300}})"),
        failure("node_failure", "ransport retry count exceeded",
            r"(?:\[(?P<node>[A-Za-z][\w.-]{0,80}):\d{1,9}[^\]]{0,60}\] {1,4})?(?P<words>(?:(?<!\S)\S{0,40} ?)?Transport retry count"
            r" exceeded.{0,200})"),
        echo("node_failure", "NET/IB",
            rf"(?P<words>(?:NCCL WARN )?{_IB}(?!.{{0,200}}(?:{_LINK_FAULT}|{_LINK_NEWS})).{{0,300}})"),
        echo("error", "NCCL WARN ", r"(?P<words>NCCL "
            rf"WARN (?!NET/IB ?:? ?(?:Got|\S{{1,40}} (?:Got|async))|NET/OFI Request|(?:Cuda|HIP) failure.{{0,8}}out of memory|{_HARMLESS}).{{0,300}})"),
        echo("error", "remote peer",
            r"(?P<words>(?:\b\w{1,40}:? ?)?Connection closed by remote peer(?: (?P<node>[A-Za-z][\w-]{0,80})[\w.-]{0,80}"
            r"<\d{1,5}>)?.{0,100})"),
        echo("error", "rror", raised(ANY_NAME,
            r"[Cc]onnection (?:was |was likely )?(?:closed|reset)|[Bb]roken pipe|remote process exited"
            r"|ncclRemoteError|[Ff]ailed to recv|recvValue failed|NCCL communicator was aborted"
            r"|unhandled system error|[Cc]onnection refused")),
        echo("error", "ncclRemoteError: ", EXCEPTION_START + r"(?P<words>ncclRemoteError: .{0,300})"),
        echo("error", "c10d", r"(?P<words>The client socket has (?:failed to connect|timed out).{0,200})"),
        echo("error", "MPI_ABORT", r"(?P<words>MPI_ABORT was invoked on rank (?P<rank>\d{1,7}).{0,200})"),
    ),
)  # fmt: skip
