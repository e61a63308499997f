"""A word of the program is in a second place: where it is written, read, explained or tried.

It sees a misspelt key, flag or file name, not one that is taken for another.
"""

import re
from collections import Counter

from tests.conftest import REPOSITORY

# Others' names that the program alone has: of Slurm, Megatron, DeepSpeed, torch, transformers, W&B, CSS and SVG; parts
# of secrets' names; and ends of words that a log may begin with a capital.
ELSEWHERE = """
    Retries sequential Ignore gds unmatch apikey authorization unk eod bod sot fim video speculative encryption comet
    anthropic aws azure gcp license signing neptune gpg rsa subscription inx 4294967294 DependencyNeverSatisfied
    PartitionConfig PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive BadConstraints
    AccountNotAllowed QOSNotAllowed InvalidAccount InvalidQOS JobHeldUser JobHeldAdmin JobArrayTaskLimit Licenses
    ReqNodeNotAvail ReservationDeleted Cleaning Prolog WaitingForScheduling QoS DOWN swish GptOss Deepseek autoset
    attentions beams generate torchscript Shape ramfs EXCLUSIVE OverSubscribe OVERLAP patternUnits userSpaceOnUse
    polygon ACCOUNT sattach sbcast sdiag sprio sreport sshare sstat strigger hottest CUDAMismatchException
    OutOfResources arly RAINING inished omplete hutdown rain geglu reglu entity REPORTING ARTIFACT currentColor ies xist
    ksh csh tcsh ubmitted CudaOutOfMemoryError Dist packing BytesStorageMetadata meminfo pointwise PipelineEngine
    differentiable BZh OggS RIFF ustar TIMELIMIT vgu CZ Cn sysfs devtmpfs mountinfo
"""
_TEXTS = (".py", ".j2", ".sh", ".toml", ".js", ".css", ".html", ".md", ".txt", ".json")
_QUOTED = re.compile(r'"([\w.%/-]*[A-Za-z0-9])"')
_WORD = re.compile(r"[A-Za-z]+|\d+")


def last_word(constant: str) -> str:
    return _WORD.findall(constant)[-1]


def test_a_word_of_the_program_stands_in_a_second_place() -> None:
    count, quoted = Counter[str](), dict[str, str]()
    for folder in ("hpc_gpt", "templates", "experiments", "docs", "tests"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            # The list of faults has lines of the program, with the fault, too.
            if path.suffix in _TEXTS and path.name != "faults.toml" and path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                count.update(_WORD.findall(text))
                if folder == "hpc_gpt" and path.suffix == ".py":
                    quoted.update(dict.fromkeys(_QUOTED.findall(text), str(path.relative_to(REPOSITORY))))
    assert len(quoted) > 3000
    assert {constant: path for constant, path in quoted.items() if count[last_word(constant)] < 2} == {}
