"""The rank and the node at fault for failures that do not name them."""

import re
from collections.abc import Mapping, Sequence

from hpc_gpt.core.ends.failures import meaning
from hpc_gpt.core.format import some
from hpc_gpt.reader.lines.part import Failure, Part

# What `causes` appends to the message of the rank that torchelastic lists under `Root Cause`.
FIRST_OBSERVED = "the first that its launcher saw fail"
_SEQUENCE = re.compile(r"SeqNum=(\d{1,12})")
MISSING = re.compile(r"\bRanks? (\d{1,7}(?:, ?\d{1,7}){0,63}) failed to pass monitoredBarrier")
# Our own watchdog's message names the rank without a heartbeat, or the late one.
_WATCHDOG = re.compile(
    r"hang: no rank made a step for \d{1,9} s; ranks? (\d{1,7})[-\d, .()]{0,120} on \S{1,80} (is|are) "
)
_OPERATION = re.compile(r"OpType=([A-Z_a-z]{1,40})")
_NODE_IN_FILE = re.compile(r"(?:^|[/_.-])([a-z][a-z0-9-]{0,30}\d)(?=\.(?:out|err|log|txt)$)")
_OWN_EXIT = re.compile(
    r"\bexit code \d|\bended by signal (?!15\b)\d|\bexited on signal \d"
    r"|^srun: error: .{1,400}: (?:Segmentation fault|Bus error|Illegal inst|Floating point)"
)
_NODE = re.compile(r"[A-Za-z][A-Za-z0-9.-]{0,63}")
# If more than this share of the ranks did not report, no rank is blamed.
_FEW = 0.25
_NCCL = re.compile(r"NCCL WARN|NET/IB|Cuda failure")
# Lines of JAX: first those that list the tasks a barrier misses, or without a heartbeat; then those that name the
# reporter.
_JAX_TASK = re.compile(
    r"^/job:\w+/replica:\d+/task:(\d{1,7})$|Task /job:\w+/replica:\d+/task:(\d{1,7}) heartbeat timeout"
)
_JAX = re.compile(r"Barrier timed out|heartbeat timeout|stopped sending heartbeats")
OF_JAX = "JAX's coordinator misses"
_LOCAL_RANK = re.compile(r"\blocal_rank[: ]|\bChildFailedError\b")
_TASKS = re.compile(r"^srun: error: ([\w.-]{1,80}): tasks? ([\d,-]{1,400}): ")
_LAUNCHER = re.compile(rf"^srun: error: |{_OWN_EXIT.pattern}")


def rank_to_blame(timeouts: Sequence[Failure], parts: Sequence[Part]) -> tuple[int | None, str]:
    """Returns (the rank that the others waited for, why) for a collective that timed out; (None, "") if it is unknown.

    In this order: the rank that our own watchdog, a barrier or JAX's coordinator names; the rank that reports an
    earlier collective than the others; the first of the ranks that report nothing while the others do.
    """
    for failure in timeouts:
        if named := _WATCHDOG.search(failure.message):
            return int(named[1]), f"the ranks' heartbeats name rank {named[1]}"
        if named := MISSING.search(failure.message):
            absent = [int(rank) for rank in named[1].split(",")]
            listed = some([str(rank) for rank in absent], 8)
            return absent[0], f"rank{'s' if len(absent) > 1 else ''} {listed} did not reach the barrier"
    absent = [int(match[1] or match[2]) for failure in timeouts if (match := _JAX_TASK.search(failure.message))]
    if absent and any(_JAX.search(failure.message) for failure in timeouts):
        listed = some([str(task) for task in dict.fromkeys(absent)], 8)
        return absent[0], f"{OF_JAX} task{'s' if len(set(absent)) > 1 else ''} {listed}"
    reports: dict[int, Failure] = {}
    for failure in timeouts:
        if failure.rank is not None:
            reports.setdefault(failure.rank, failure)
    numbers = {rank: int(match[1]) for rank, failure in reports.items() if (match := _SEQUENCE.search(failure.message))}
    if len(numbers) > 2:
        late = [rank for rank, number in numbers.items() if number == min(numbers.values())]
        if len(late) <= max(1, int(_FEW * len(numbers))) and len(set(numbers.values())) > 1:
            most = max(set(numbers.values()), key=list(numbers.values()).count)
            doing = _OPERATION.search(reports[late[0]].message)
            where = f"collective {numbers[late[0]]}" + (f" ({doing[1]})" if doing else "")
            return late[0], f"rank {late[0]} is at {where}, the others at {most}"
    stated = (fact.value for part in parts if (fact := part.fact("gpus")))
    size = next((value for value in stated if isinstance(value, int) and 0 < value < 10_000_000), None)
    if size is None and reports and len(reports) == max(reports):
        size = max(reports) + 1  # one rank below the highest is silent
    if size is None or len(reports) < 2 or size > 100_000:
        return None, ""
    silent = [rank for rank in range(size) if rank not in reports]
    if silent and len(silent) <= max(1, int(_FEW * size)):
        one = len(silent) == 1
        ranks = some([str(rank) for rank in silent], 8)
        return silent[0], f"rank{'' if one else 's'} {ranks} did not report it, {len(reports)} of {size} ranks did"
    return None, ""


def everyone_waits(cause: Failure, failures: Sequence[Failure], parts: Sequence[Part]) -> str:
    """The ranks that report the collective of a cause, in words, if they are all ranks; empty if one is missing."""
    reports = [each for each in failures if each.ended == cause.ended and meaning(cause.ended).victim]
    numbers = {each.rank: match[1] for each in reports if (match := _SEQUENCE.search(each.message))}
    size, stated = len(numbers), [fact.value for part in parts if (fact := part.fact("gpus"))]
    whole = size > 1 and {*numbers} == {*range(size)} and all(value == size for value in stated[:1])
    return f"all {size} ranks report it" if whole and len({*numbers.values()}) == 1 else ""


def has_left(failure: Failure) -> bool:
    """Whether it is a launcher's message that a rank, which it names, ended with an error."""
    return failure.rank is not None and bool(_OWN_EXIT.search(failure.message))


def only_one_that_left(echoes: Sequence[Failure]) -> Failure | None:
    """The launcher's message about the only rank that ended with an error, or about the first one; None if it names
    several."""
    left = [failure for failure in echoes if has_left(failure)]
    if any(_LOCAL_RANK.search(failure.message) for failure in echoes):
        left = [failure for failure in left if not _TASKS.match(failure.message)]  # a task is a launcher of many ranks
    if root := [failure for failure in left if failure.message.endswith(FIRST_OBSERVED)]:
        return root[0]
    alone = len({failure.rank for failure in left}) == 1 and not any("tasks " in failure.message for failure in left)
    return left[0] if alone else None


def nodes_of_tasks(failures: Sequence[Failure]) -> dict[int, str]:
    """The node per task, by srun's messages: `srun: error: n7: tasks 20-23,25: …`."""
    nodes: dict[int, str] = {}
    for failure in failures:
        if match := _TASKS.match(failure.message):
            for piece in match[2].split(","):
                first, _, last = piece.partition("-")
                if first.isdigit() and (not last or last.isdigit()):
                    nodes |= dict.fromkeys(range(int(first), min(int(last or first), int(first) + 4096) + 1), match[1])
    return nodes


def only_node_that_failed(echoes: Sequence[Failure]) -> str | None:
    """The only node whose tasks failed by themselves, by srun's messages, while other nodes' tasks ran until they were
    ended; None if there are several such nodes, or no other nodes."""
    ends = [(match[1], echo.ended) for echo in echoes if (match := _TASKS.match(echo.message))]
    failed = {node for node, ended in ends if ended == "error"}
    ran = {node for node, ended in ends if ended == "cancelled"} - failed
    return failed.pop() if len(failed) == 1 and ran else None


def node_of_failure(
    failure: Failure, rank: int | None, nodes: Mapping[int, str], parts: Sequence[Part], blamed: bool
) -> str | None:
    """The node of a failure: the node in its line, else its rank's, else its file's, else the only node of the job."""
    if failure.node and not blamed:
        return failure.node
    if rank is not None and rank in nodes:
        return nodes[rank]
    if failure.ended in ("node_failure", "host_memory"):
        every = (candidate for part in parts for candidate in part.failures if candidate.node and not candidate.echo)
        if (other := next((candidate for candidate in every if candidate.ended == failure.ended), None)) is not None:
            return other.node
    if blamed:
        return None
    lists = {str(fact.value) for part in parts for fact in part.facts.get("node_list", [])}
    named = {candidate.node for part in parts for candidate in part.failures} | set(_NODE.findall(" ".join(lists)))
    if (in_name := _NODE_IN_FILE.search(failure.place.file)) and in_name[1] in named:
        return in_name[1]
    only = next(iter(lists)) if len(lists) == 1 else ""
    return only if _NODE.fullmatch(only) else None


def node_the_launcher_names(cause: Failure, echoes: Sequence[Failure]) -> tuple[str | None, str]:
    """Finds the node of a failure that names neither node nor rank: the first node that the launcher reports after
    it. If a failure of this class is never a node's fault, only the single node with NCCL errors counts. Returns
    (node, evidence)."""
    for echo in sorted(echoes, key=lambda echo: (echo.place.file != cause.place.file, echo.place.line)):
        is_later = echo.place.file != cause.place.file or echo.place.line > cause.place.line
        if is_later and echo.node and echo.ended == "error" and _LAUNCHER.search(echo.message):
            return echo.node, "the launcher names this node first"
    complain = {echo.node for echo in echoes if echo.node and _NCCL.match(echo.message)}
    return (complain.pop(), "") if len(complain) == 1 and not meaning(cause.ended).of_node else (None, "")
