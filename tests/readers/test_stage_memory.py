"""Memory told before training began is told so."""

from __future__ import annotations

from hpc_gpt.readers.draft import Draft
from hpc_gpt.readers.lines import read_lines
from hpc_gpt.readers.stage_memory import settle_memory

MEMORY = (
    "[INFO] [utils.py:589:see_memory_usage] MA 1.73 GB         Max_MA 6.63 GB         CA 6.75 GB         Max_CA 7 GB"
)
STEP = "[2021-05-27 04:02:02,142] steps: 2 loss: 12.8004 iter time (s): 145.206 samples/sec: 7.052"


def flags(*lines: str) -> list[str]:
    draft = Draft()
    settle_memory(draft, read_lines("log", lines), {})
    assert draft.get("memory_allocated_gib") == [6.63]
    return draft.flags


def test_before_the_first_step() -> None:
    assert flags(MEMORY, STEP) == ["memory was told of before the first step (log:1): training may take more"]
    assert flags(STEP, MEMORY) == []
    assert flags(MEMORY) == []
