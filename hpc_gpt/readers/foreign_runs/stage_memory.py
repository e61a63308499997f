"""Peak memory of each pipeline stage, from what ranks say of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hpc_gpt.readers.foreign_runs.derived import is_on
from hpc_gpt.readers.foreign_runs.draft import Draft
from hpc_gpt.readers.part import Memory, Part


def settle_memory(draft: Draft, parts: Iterable[Part], arguments: Mapping[str, str]) -> None:
    """Settles both memory lists: one figure a stage where every stage's ranks say theirs, else the highest of all.

    Ranks go through tp fastest, then cp and dp, then pp, as Megatron and DeepSpeed have them; with Megatron's
    `--use-tp-pp-dp-mapping` through pp before dp.
    """
    parts = list(parts)
    seen = [(rank, memory) for part in parts for rank, memory in part.memory.items()]
    if not seen:
        return
    begun = {part.file: line for part in reversed(parts) if (line := _first_step_line(part)) is not None}
    stages = _stage_of(draft, arguments)
    few: list[int] = []
    pp = draft.whole("pp") or 1
    for name, key in (("memory_allocated_gib", "allocated_gib"), ("memory_reserved_gib", "reserved_gib")):
        figures = [(rank, value, memory) for rank, memory in seen if (value := _figure(memory, key)) is not None]
        if not figures:
            continue
        _, highest, memory = max(figures, key=lambda each: each[1])
        if memory.place.line < begun.get(memory.place.file, 0):
            draft.flag(f"memory was told of before the first step ({memory.place}): training may take more")
        peaks: dict[int, float] = {}
        for rank, value, _ in figures:
            if rank is not None and stages is not None and (stage := stages(rank)) is not None:
                peaks[stage] = max(peaks.get(stage, 0.0), value)
        if len(peaks) == pp > 1:
            listed = [peaks[stage] for stage in range(pp)]
            ranks = len({rank for rank, _, _ in figures})
            draft.set(
                name, listed, f"the highest of each stage over {ranks} ranks, the highest of all at {memory.place}"
            )
        else:
            draft.set(name, [highest], f"{memory.place}, the highest the log tells of")
            few.append(len(peaks))
    if few and pp > 1:
        told = f"of {max(few)} of {pp} stages" if max(few) else "without saying of which rank"
        draft.flag(f"memory is told {told}: one figure, the highest")


def _first_step_line(part: Part) -> int | None:
    lines = [int(steps.line[0]) for steps in part.steps.values() if len(steps)]
    lines += [line for _, _, line in part.progress[:1]]
    return min(lines, default=None)


def _figure(memory: Memory, key: str) -> float | None:
    value: float | None = getattr(memory, key)
    return value if value is not None and 0 < value < 1e6 else None


def _stage_of(draft: Draft, arguments: Mapping[str, str]) -> Callable[[int], int | None] | None:
    """rank -> pipeline stage; None where the layout is not known."""
    tp, pp, dp = (draft.whole(name) for name in ("tp", "pp", "dp"))
    if not (tp and pp and dp):
        return None
    ways, each = tp * pp * dp * (draft.whole("cp") or 1), tp * dp * (draft.whole("cp") or 1)
    pipes_first = is_on(arguments, "use_tp_pp_dp_mapping")

    def stage(rank: int) -> int | None:
        if not 0 <= rank < ways:
            return None
        return rank // (ways // pp // dp) % pp if pipes_first else rank // each

    return stage
