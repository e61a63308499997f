"""What follows from the stated fields: layout, batch, vocabulary, dtype, engine, memory of each stage.

A program's own rates and counts also show settings that it does not print. Each value says how it was inferred.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hpc_gpt.readers.fields import dtype_named
from hpc_gpt.readers.logs.part import Memory, Part
from hpc_gpt.readers.runs.draft import Draft
from hpc_gpt.readers.runs.log_steps import LogSteps
from hpc_gpt.settings.cluster import device_named
from hpc_gpt.settings.layout import Layout

_MOST_GPUS = 64  # of more, rates of three digits do not tell one more or less
_STAGE = re.compile(r"(\d{1,7}) STAGE=(\d{1,5})")
_ALIKE = 0.02  # the two halves of a run whose batch stays the same
# Engines that split nothing but the batch.
DATA_PARALLEL = frozenset(("hf", "hf-deepspeed", "ddp", "nanogpt", "modded-nanogpt", "llm.c"))


def derive(draft: Draft, dialects: Sequence[str], arguments: Mapping[str, str]) -> None:
    """Add what follows from what is stated."""
    _words(draft)
    _engine(draft, dialects)
    _layout(draft, arguments)
    _batch(draft)
    _vocab(draft, arguments)


def _words(draft: Draft) -> None:
    """Names as the record has them."""
    if (dtype := draft.get("dtype")) is not None:
        draft.values["dtype"] = dtype_named(str(dtype)) or str(dtype).lower().replace("torch.", "").strip()
    if (device := draft.get("device")) is not None:
        draft.values["device"] = device_named(str(device)) or str(device)


def _engine(draft: Draft, dialects: Sequence[str]) -> None:
    deepspeed = [name for name in dialects if name.startswith("deepspeed")]
    stage, said = draft.get("zero_stage"), draft.get("engine")
    if said in (None, "megatron-lm", "hf") and (deepspeed or (stage or 0) >= 1):
        why = f"{deepspeed[0]}'s lines" if deepspeed else f"ZeRO stage {stage}"
        if said == "hf":
            draft.set("engine", "hf-deepspeed", f"inferred: a Trainer's log with {why}")
        elif said == "megatron-lm" and deepspeed:
            pipes = ((draft.whole("pp") or 1) > 1 or "deepspeed_pipe" in deepspeed) and (stage or 0) < 2
            which = "deepspeed-3d" if pipes else "deepspeed-zero"
            draft.set(
                "engine", which, f"inferred: Megatron's log with {why}, {'a pipeline' if pipes else 'no pipeline'}"
            )


def _layout(draft: Draft, arguments: Mapping[str, str]) -> None:
    if (nodes := draft.whole("nodes")) and (each := draft.whole("gpus_per_node")):
        draft.infer("gpus", nodes * each, f"nodes {nodes} x gpus_per_node {each}")
    gpus = draft.whole("gpus")
    splits = [name for name in ("tp", "pp") if name not in draft]
    if gpus == 1:
        for name in ("tp", "pp", "dp"):
            draft.infer(name, 1, "one GPU")
    elif draft.get("engine") in DATA_PARALLEL:
        for name in splits:
            draft.infer(name, 1, f"{draft.get('engine')} splits the batch alone")
        _ranks_of_batch(draft)
    elif arguments and len(splits) == 1:
        draft.infer(splits[0], 1, "the dump of arguments names none")
    tp, pp, dp = (draft.whole(name) for name in ("tp", "pp", "dp"))
    cp = draft.whole("cp") or 1
    ways = "tp x pp" + (" x cp" if cp > 1 else "")
    if gpus and tp and pp and not dp and gpus % (tp * pp * cp) == 0:
        draft.infer("dp", gpus // (tp * pp * cp), f"gpus {gpus} / ({ways})")
    elif gpus and tp and dp and not pp and gpus % (tp * dp * cp) == 0:
        draft.infer("pp", gpus // (tp * dp * cp), f"gpus {gpus} / (tp x dp{' x cp' if cp > 1 else ''})")
    elif tp and pp and dp and not gpus:
        draft.infer("gpus", tp * pp * dp * cp, f"{ways} x dp")
    gpus, dp = draft.whole("gpus"), draft.whole("dp")
    if gpus and tp and pp and not dp:
        draft.flag(f"{gpus} GPUs are no multiple of {ways} = {tp * pp * cp}: the layout cannot be")
    elif gpus and tp and pp and dp and tp * pp * dp * cp != gpus:
        layout = Layout(tp, pp, dp)
        draft.flag(f"layout {layout} needs {tp * pp * dp * cp} GPUs, but {gpus} are stated ({draft.sources['gpus']})")
    if gpus and (each := draft.whole("gpus_per_node")):
        draft.infer("nodes", math.ceil(gpus / each), f"gpus {gpus} / gpus_per_node {each}")


def _ranks_of_batch(draft: Draft) -> None:
    """How many ranks share the batch, if only the batch itself says so."""
    micro, chunks, whole = (draft.whole(name) for name in ("micro_batch", "micro_batches", "global_batch"))
    if not draft.whole("gpus") and micro and chunks and whole and whole % (micro * chunks) == 0:
        how = f"global_batch {whole} / (micro_batch {micro} x micro_batches {chunks})"
        draft.infer("dp", whole // (micro * chunks), how)


def _batch(draft: Draft) -> None:
    tokens, seq = draft.whole("global_batch_tokens"), draft.whole("seq")
    if tokens and seq and tokens % seq == 0:
        draft.infer("global_batch", tokens // seq, f"{tokens} tokens a batch / seq {seq}")
    names = ("micro_batch", "micro_batches", "global_batch")
    micro, chunks, whole = (draft.whole(name) for name in names)
    dp = draft.whole("dp")
    if not dp:
        return
    if micro and chunks and not whole:
        draft.infer("global_batch", micro * chunks * dp, f"micro_batch {micro} x micro_batches {chunks} x dp {dp}")
    elif micro and whole and not chunks and whole % (micro * dp) == 0:
        draft.infer("micro_batches", whole // (micro * dp), f"global_batch {whole} / (micro_batch {micro} x dp {dp})")
    elif chunks and whole and not micro and whole % (chunks * dp) == 0:
        draft.infer("micro_batch", whole // (chunks * dp), f"global_batch {whole} / (micro_batches {chunks} x dp {dp})")
    micro, chunks, whole = (draft.whole(name) for name in names)
    if micro and whole and not chunks:
        draft.flag(f"global_batch {whole} is no multiple of micro_batch {micro} x dp {dp} = {micro * dp}")
    elif micro and chunks and whole and micro * chunks * dp != whole:
        product = f"micro_batch {micro} x micro_batches {chunks} x dp {dp} = {micro * chunks * dp}"
        draft.flag(f"{product}, but the global batch is {whole} ({draft.sources['global_batch']})")


def _vocab(draft: Draft, arguments: Mapping[str, str]) -> None:
    plain, multiple = draft.whole("vocab_unpadded"), number(arguments, "make_vocab_size_divisible_by")
    if "vocab" in draft or not plain:
        return
    if multiple and (tp := draft.whole("tp")):
        rows = multiple * tp
        how = f"vocabulary {plain} padded to a multiple of {multiple} x tp {tp}"
        draft.infer("vocab", math.ceil(plain / rows) * rows, how)
    else:
        draft.set("vocab", plain, f"{draft.sources['vocab_unpadded']}, not padded")


def step_tokens(draft: Draft) -> int | None:
    """Tokens of one step, None if the batch is not known."""
    batch, seq = draft.whole("global_batch"), draft.whole("seq")
    return batch * seq if batch and seq else draft.whole("global_batch_tokens")


def is_on(arguments: Mapping[str, str], *names: str) -> bool:
    """Whether one of the arguments is given and true."""
    return any(arguments.get(name, "").strip().lower() in ("true", "1", "yes") for name in names)


def number(arguments: Mapping[str, str], *names: str) -> int | None:
    """The first of the arguments that is a whole number."""
    for name in names:
        if re.fullmatch(r"\d{1,15}", arguments.get(name, "").strip()):
            return int(arguments[name])
    return None


def add_gpus(draft: Draft, steps: LogSteps) -> None:
    """Add how many GPUs the job has, by its tokens a second over those of one GPU, if it prints both."""
    with np.errstate(all="ignore"):
        ratio = steps["tokens_per_s"] / steps["tokens_per_s_gpu"]
    ratio = ratio[np.isfinite(ratio)]
    if "gpus" in draft or not len(ratio):
        return
    gpus = np.round(ratio)
    if 1 <= gpus[0] <= _MOST_GPUS and (gpus == gpus[0]).all() and (np.abs(ratio - gpus) < 0.25).all():
        draft.infer("gpus", int(gpus[0]), f"tokens_per_s / tokens_per_s of one GPU, the same over {len(ratio)} lines")


def consumed_by_step(steps: LogSteps) -> float | None:
    """Tokens that one step consumed, by the count of all so far; None if that is not known, or changed."""
    known = np.flatnonzero(np.isfinite(steps["consumed_tokens"]) & np.isfinite(steps["step"]) & steps.counts)
    if len(known) < 3 or not steps.numbered:
        return None
    of, tokens = steps["step"][known], steps["consumed_tokens"][known]
    middle = len(known) // 2
    with np.errstate(all="ignore"):
        each = [float((tokens[b] - tokens[a]) / (of[b] - of[a])) for a, b in ((0, middle), (middle, -1), (0, -1))]
    alike = each[2] > 0 and max(abs(each[0] / each[2] - 1), abs(each[1] / each[2] - 1)) <= _ALIKE
    return each[2] if alike else None


def add_stages(draft: Draft, parts: Sequence[Part]) -> None:
    """Add the layout by DeepSpeed's line of each stage, which the first of its replicas prints: `RANK=2 STAGE=1`.

    Only if the ranks of these lines hold all parameters together: else some stages are not in the log.
    """
    found: dict[tuple[int, int], float] = {}
    for name, (params, _) in ((name, each) for part in parts for name, each in part.rank_params.items()):
        if match := _STAGE.fullmatch(name):
            found[int(match[1]), int(match[2])] = params
    total = draft.whole("params_of_ranks")
    stages = {stage for _, stage in found}
    if not total or len(found) % max(1, len(stages)) or abs(sum(found.values()) - total) > 0.5:
        return
    source = f"the {len(found)} ranks that name their stage hold all parameters ({draft.sources['params_of_ranks']})"
    draft.infer("pp", len(stages), source)
    draft.infer("tp", len(found) // len(stages), source)


def add_memory(draft: Draft, parts: Iterable[Part], arguments: Mapping[str, str]) -> None:
    """Add both lists of peak memory: one figure a stage if ranks of every stage print theirs, else the highest of all.

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
    """rank -> pipeline stage; None if the layout is not known."""
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
