"""The meaning of a failure by what the run did before it: before the first step it is the request's own."""

import re
from collections.abc import Sequence
from dataclasses import replace

from hpc_gpt.reader.failures.failure_families import OTHER_SIZE
from hpc_gpt.reader.failures.part_failures import makes_steps
from hpc_gpt.reader.lines.matches import OF_NO_YEAR
from hpc_gpt.reader.lines.part import Failure, Part

# Exceptions of code that got an input it does not accept, before the first step: a retry ends the same way.
_OF_SETUP = re.compile(
    r"(?:[\w.]{1,200}\()?(?:[A-Za-z_]\w*\.)*(?:(?:Value|Key|Type|Attribute|NotImplemented|Assertion)Error\b"
    r"|(?:OS|IO)Error: (?!\[Errno (?!2\b|13\b|20\b|21\b|22\b)).{0,400}?(?:^|[\s'\"(])\.{0,2}/\w)"
)
# These exceptions count, too, if code that reads a program's inputs raises them.
_OF_GIVEN = re.compile(r"(?:RuntimeError|Exception): ")
_READS_GIVEN = re.compile(r"(?i)config|arguments|args\.py$|settings|state_dict|checkpoint|planner|model_?loader")
_EXCEPTION = re.compile(r"(?:\w{1,60}\.){0,8}[A-Z]\w{1,60}(?:Error|Exception)\b")
_MASKED = re.compile(r"\d+")
# Words of what may fail by itself; the same exception of several ranks is then not the program's. `cuda` is a device.
_OF_MACHINE = re.compile(
    r"CUDA|Cuda|(?i:cudnn|cublas|nccl|\bhip|rocm|\bxpu|gloo|network|socket|connect|timed? ?out|memory|file ?system"
    r"|\[errno|input/output|disk|device-side|hardware)"
)
_MISSING_SAMPLE = re.compile(r"FileNotFoundError: (?!.{0,400}(?i:checkpoint|ckpt|\.pth?\b|safetensors|/tmp/))")
# Pieces of a tensor that two numbers of ranks divide, or these numbers.
_SIZES = re.compile(
    r"size of tensor [ab] \((\d{1,15})\)|(?i:world|parallel)[ _-]size(?: of| is|:| =|=)? ?(\d{1,7})\b"
    r"|\b(\d{1,7}) (?:ranks?|GPUs|processes|devices|workers)\b"
)
_IN_OPTIMIZER = re.compile(r"\boptim")
_OF_LAST_SAVE = (
    "all steps were made, so the last save needs the memory: gather the weights on the CPU, or save them sharded"
)
_NEARLY_FULL = 80  # percent of a host's memory
_SETUP_S = 900.0
_SETUP_LINES = 4000  # the limit in lines, in place of _SETUP_S if the log has no times of day
OF_SETUP = "correct what the message names: the program ended before its first step, and would end so again"


def in_context(failure: Failure, failures: Sequence[Failure], parts: Sequence[Part], reached_end: bool) -> Failure:
    """The failure, with another class and advice if what the run did before it shows them."""
    if failure.ended == "gpu_memory" and reached_end and not failure.to_do:
        return replace(failure, to_do=_OF_LAST_SAVE)
    has_trained, vague = any(map(makes_steps, parts)), not (failure.to_do or failure.echo)
    if failure.ended == "user_error" and has_trained and vague and _MISSING_SAMPLE.match(failure.message):
        return replace(failure, ended="data")
    if has_trained or failure.ended not in ("error", "user_error"):
        return failure
    loads = _IN_OPTIMIZER.search(failure.raised_in) or any(part.fact("resumes") for part in parts)
    loads = (vague and (loads or "checkpoint" in failure.message)) or failure.to_do == OTHER_SIZE
    if loads and (ratio := _ratio_of(failure.message)):
        by = f"another number of ranks saved the checkpoint, as {ratio}"
        return replace(failure, ended="user_error", to_do=f"{by}: {OTHER_SIZE}")
    if failure.ended == "error" and vague and _is_of_setup(failure, failures, parts):
        return replace(failure, ended="user_error", to_do=OF_SETUP)
    return failure


def _ratio_of(message: str) -> str:
    """`8 is 4 x 2` for the first two sizes in a message if one is a multiple of the other, else an empty text."""
    sizes = [int(next(filter(None, groups))) for groups in _SIZES.findall(message)]
    small, large = sorted(sizes[:2]) if len(sizes) > 1 else (0, 0)
    ratio = round(large / max(small, 1))
    # The last rank's piece may be padded.
    return f"{large} is {ratio} x {small}" if ratio > 1 and abs(large - ratio * small) < ratio else ""


def _is_of_setup(failure: Failure, failures: Sequence[Failure], parts: Sequence[Part]) -> bool:
    """Whether an exception before the first step is of a program that got an input it does not accept: raised within
    minutes of the start, by its name or by two ranks in the same words."""
    if any(part.evals or part.saves for part in parts):
        return False
    said = _MASKED.sub("0", failure.message)
    ranks = {other.rank for other in failures if other.rank is not None and _MASKED.sub("0", other.message) == said}
    by_several = len(ranks) > 1 and _EXCEPTION.match(failure.message) and not _OF_MACHINE.search(failure.message)
    of_given = _OF_GIVEN.match(failure.message) and _READS_GIVEN.search(failure.raised_in)
    if not (by_several or (failure.raised_in and (of_given or _OF_SETUP.match(failure.message)))):
        return False
    begins = [part.first_at for part in parts if part.first_at is not None]
    ends = [part.last_at for part in parts if part.last_at is not None and part.file == failure.place.file]
    end = failure.at if failure.at is not None and failure.at >= OF_NO_YEAR else max(ends, default=None)
    if begins and end is not None and end > min(begins):
        return end - min(begins) <= _SETUP_S
    return failure.place.line <= _SETUP_LINES


def full_host(parts: Sequence[Part]) -> str:
    """Says that a host had hardly any memory left, by the program's own line; empty if no line does."""
    used = [fact for part in parts for fact in part.facts.get("host_used_percent", ())]
    most = max(used, key=lambda fact: float(fact.value), default=None)
    if most is None or float(most.value) < _NEARLY_FULL:
        return ""
    return f"signal 9 after a line that {most.value:g} % of the host's memory were in use ({most.place})"
