"""DeepSpeed's own lines: its launcher's command, memory, timers, progress, checkpoints, versions, FLOPs profile."""

import base64
import json
from collections.abc import Mapping

from hpc_gpt.reader.pattern import Dialect, Fields, Pattern, line

_GB = r"\d{1,6}(?:\.\d{1,6})?"


def _interpret(arguments: Mapping[str, str]) -> Fields:
    """The GPUs of the launcher's `--world_info`: base64 of `{"node": [0, 1, …], …}`."""
    try:
        nodes = json.loads(base64.urlsafe_b64decode(arguments.get("--world_info", "")))
        return {"nodes": len(nodes), "gpus": sum(map(len, nodes.values()))}
    except (ValueError, AttributeError, TypeError):
        return {}


DIALECT = Dialect(
    name="deepspeed",
    interpret=_interpret,
    patterns=(
        Pattern(
            "memory",
            rf"\bMA {_GB} GB {{1,20}}Max_MA (?P<memory_allocated_gib>{_GB}) GB {{1,20}}CA {_GB} GB {{1,20}}"
            rf"Max_CA (?P<memory_reserved_gib>{_GB}) GB",
        ),
        Pattern(
            "timers",
            r"(?:\]|rank=\d{1,7}) time \(ms\)(?P<value>(?: \| [^|:]{1,60}: \d{1,12}\.\d{1,6}){1,200})",
        ),
        # step=0 is printed before training begins.
        Pattern(
            "step",
            r"\bstep=(?P<step>[1-9]\d{0,11}), skipped=(?P<skipped_so_far>\d{1,12}), lr=\[(?P<lr>[^\],\[]{1,32})(?=[,\]])",
        ),
        Pattern("save", r"\bSaving model checkpoint: \S{0,1000}global_step(?P<step>\d{1,12})/"),
        Pattern(
            "argument",
            r" cmd = [^\n]{1,400} (?P<key>--world_info)=(?P<value>[\w=-]{8,1000})(?=\s)",
        ),
        Pattern("fact", r"DeepSpeed info: version=(?P<deepspeed_version>[^,\s]{1,64})"),
        Pattern("fact", r"^deepspeed info \.{2,40} (?P<deepspeed_version>[^,\s]{1,64})"),
        Pattern("fact", r"^torch version \.{2,40} (?P<torch_version>\S{1,64})"),
        # Printed only without model parallelism: then both sizes are the same.
        line("fact", "data_parallel_size: {gpus}, parameter_parallel_size: "),
        line("fact", "data_parallel_size: {dp}, parameter_parallel_size: "),
        Pattern("fact", r"^world size: {12,}(?P<gpus>\d{1,9})\s*$"),
        Pattern("fact", r"^data parallel size: {12,}(?P<dp>\d{1,9})\s*$"),
        Pattern("fact", r"^batch size per GPU: {12,}(?P<micro_batch>\d{1,9})\s*$"),
        Pattern(
            "fact",
            r"^params of model = params per GPU \* mp_size: {2,70}(?P<params>\d{1,6}(?:\.\d{1,4})? ?[kKMGB])\s*$",
        ),
        line("end", "[launch.py:{}:main] Process {} exits successfully", ended="done"),
    ),
    flags=("memory by DeepSpeed's see_memory_usage is the peak up to its line; reserved memory is in whole GiB",),
)
