"""Collectives that time out or lose a peer: PyTorch's watchdog, NCCL, gloo, and the store in which ranks meet."""

from hpc_gpt.readers.pattern import ANY_NAME, EXCEPTION_START, Dialect, echo, failure, raised

_RANK = r"(?:\b[Rr]ank (?P<rank>\d{1,7})\] {0,4})?"

# Of what NCCL warns when it starts and then does without.
_HARMLESS = (
    r"lib wrapper not initialized|NET/Plugin|Failed to open (?:lib|/)|Could not find|MSCCL|Missing |"
    r"[^\n]{0,120}(?:not supported|[Dd]isabling|falling back|deprecated|ignor(?:ed|ing)\b)"
)

# NCCL's words about a network card, after `NCCL WARN` or as the last error of an exception.
_IB = r"NET/IB ?:? ?(?:\S{1,40}:\d{1,4} )?(?:Got (?:completion|async|fatal|error)|async fatal)"
# 12: the peer did not acknowledge, 13: it was not ready; then what a card reports of itself.
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
        failure("collective_timeout", "rror",
            r"(?P<words>Timed out initializing process group in store based barrier on rank:? (?P<rank>\d{1,7}).{0,300})"),
        failure("collective_timeout", "rror", raised(ANY_NAME,
            r"[Ss]ocket [Tt]imeout|client socket has timed out|waiting for clients|wait timeout after \d"
            r"|Timed out waiting \d{1,12} ?ms for|Application timeout caused pair closure|RendezvousTimeoutError"
            r"|timed out after \d{1,9} ?(?:ms|s|seconds)|operation timed out|DEADLINE_EXCEEDED: ")),
        failure("hang", "NCCL", r"(?P<words>(?:Heartbeat monitor timed out|[Ff]irst PG on this rank that detected "
            r"no heartbeat|ProcessGroupNCCL's watchdog got stuck).{0,300})"),
        failure("hang", "NCCL", r"(?P<words>\S{0,80} ?watchdog got stuck.{0,300})"),
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
        # A link that gave up; status 5 (flushed) and the others follow from that, here or at the peer.
        failure("node_failure", "NET/IB", rf"(?P<words>(?:NCCL WARN )?{_IB}.{{0,200}}?(?:{_LINK_FAULT}).{{0,300}})"),
        failure("node_failure", "ransport retry count exceeded",
            r"(?:\[(?P<node>[A-Za-z][\w.-]{0,80}):\d{1,9}[^\]]{0,60}\] {1,4})?(?P<words>\S{0,40} ?Transport retry count"
            r" exceeded.{0,200})"),
        echo("node_failure", "NET/IB",
            rf"(?P<words>(?:NCCL WARN )?{_IB}(?!.{{0,200}}(?:{_LINK_FAULT}|{_LINK_NEWS})).{{0,300}})"),
        echo("error", "NCCL WARN ", r"(?P<words>NCCL "
            rf"WARN (?!NET/IB ?:? ?(?:Got|\S{{1,40}} (?:Got|async))|Cuda failure.{{0,8}}out of memory|{_HARMLESS}).{{0,300}})"),
        echo("error", "remote peer",
            r"(?P<words>\w{0,40}:? ?Connection closed by remote peer(?: (?P<node>[A-Za-z][\w-]{0,80})[\w.-]{0,80}"
            r"<\d{1,5}>)?.{0,100})"),
        echo("error", "rror", raised(ANY_NAME,
            r"[Cc]onnection (?:was |was likely )?(?:closed|reset)|[Bb]roken pipe|remote process exited"
            r"|ncclRemoteError|[Ff]ailed to recv|recvValue failed|NCCL communicator was aborted"
            r"|unhandled system error|[Cc]onnection refused")),
        echo("error", "ncclRemoteError: ", EXCEPTION_START + r"(?P<words>ncclRemoteError: .{0,300})"),
        echo("error", "c10d", r"(?P<words>The client socket has (?:failed to connect|timed out).{0,200})"),
        echo("error", "MPI_ABORT", r"(?P<words>MPI_ABORT was invoked on rank (?P<rank>\d{1,7}).{0,200})"),
    ),
    specimen="""\
[E ProcessGroupNCCL.cpp:566] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1812332) ran for 1853723 milliseconds before timing out.
[rank1]:[E1021 10:35:53.456789789 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=606758) ran for 604843 milliseconds before timing out.
RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 10454 ms
[rank2]: RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.
RuntimeError: Timed out initializing process group in store based barrier on rank: 3, for key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:04:51)
torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.
[rank0]:[F1021 10:43:53.4 ProcessGroupNCCL.cpp:1250] [PG 0 Rank 0] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.
[rank0]:[E1021 10:42:53.4 ProcessGroupNCCL.cpp:1240] [PG 0 Rank 0] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=1
[rank2]:[E1021 10:35:53.5 ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Received a dump signal due to a collective timeout from rank 1 and we will try our best to dump the debug info.
[rank1]:[E1021 10:35:53.6 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Timeout at NCCL work: 12, last enqueued NCCL work: 12, last completed NCCL work: 11.
[E ProcessGroupNCCL.cpp:325] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.
[rank1]:[I1021 10:35:54.4 ProcessGroupNCCL.cpp:1400] Finished writing FlightRecorder debug info to /tmp/nccl_trace_rank_1
  what():  [Rank 3] NCCL watchdog thread terminated with exception: CUDA error: unspecified launch failure
cn0417:4711:4800 [3] NCCL WARN NET/IB : Got completion from peer 10.148.3.4<40744> with error 12, opcode 0, len 32269, vendor err 129
cn0417:4711:4800 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.148.3.4<40744> with status=5 opcode=32656 len=32659 vendor err 249 (Recv)
[cn0417:4711 :0:4711] ib_mlx5_log.c:171  Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81 hw_synd 0/0)
cn0417:4711:4800 [3] NCCL WARN Call to connect to 10.148.3.4<40744> failed : Connection refused
Last error: socketProgress: Connection closed by remote peer cn0418.ib0<37408>
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.1.1]:12345
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
[W socket.cpp:601] [c10d] The client socket has failed to connect to [cn0417]:29500 (errno: 111 - Connection refused).
MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD
""",
    seen="torch/csrc/distributed/c10d of PyTorch 1.8 to 2.9, NCCL, gloo, Open MPI",
)  # fmt: skip
