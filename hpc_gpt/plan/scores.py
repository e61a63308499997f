"""How far predictions are from what was published: means of a source, wrong fits, the pick among layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from hpc_gpt.plan.calibrate import fastest
from hpc_gpt.plan.validate import Predicted
from hpc_gpt.runs.record import finite

WITHIN_TIME, WITHIN_MEMORY, WITHIN_PICK = 0.15, 0.10, 0.05


@dataclass(frozen=True)
class Errors:
    """Of some rows: how many, the mean absolute error as a share, and the share of rows within 10 or 15 %."""

    rows: int
    mean: float | None
    within_10: float | None
    within_15: float | None
    bias: float | None  # the geometric mean of predicted over published, less 1


@dataclass(frozen=True)
class SourceScore:
    """One source's errors."""

    source: str
    time: Errors
    memory: Errors


@dataclass(frozen=True)
class Pick:
    """Rows that differ by layout alone: what was predicted fastest, and how much slower it was than the fastest."""

    source: str
    gpus: int
    layouts: int
    picked: str
    best: str
    slower: float

    @property
    def is_good(self) -> bool:
        return self.slower <= WITHIN_PICK


@dataclass(frozen=True)
class Scores:
    """All of a file. `time_mean` and `memory_mean` are means over sources; the shares are of all rows."""

    sources: tuple[SourceScore, ...]
    time: Errors
    memory: Errors
    time_mean: float | None
    memory_mean: float | None
    said_to_fit: tuple[str, ...]  # that ran out
    said_not_to: tuple[str, ...]  # that ran
    fits_judged: int
    picks: tuple[Pick, ...]

    def to_tables(self) -> dict[str, object]:
        """As JSON's own kinds."""
        return dict(finite(asdict(self)))


def score(predicted: Sequence[Predicted]) -> Scores:
    """The scores of a file's predicted rows. Noisy rows and those without a figure are not in the means."""
    counted = counted_times(predicted)
    weighed = [entry for entry in predicted if entry.memory_error is not None and not entry.row.published.noisy]
    names = list(dict.fromkeys(entry.row.source for entry in predicted))
    sources = tuple(
        SourceScore(
            name,
            errors(entry.time_error for entry in counted if entry.row.source == name),
            errors(entry.memory_error for entry in weighed if entry.row.source == name),
        )
        for name in names
    )
    judged = [entry for entry in predicted if _tells_fit(entry)]
    return Scores(
        sources=sources,
        time=errors(entry.time_error for entry in counted),
        memory=errors(entry.memory_error for entry in weighed),
        time_mean=_mean([each.time.mean for each in sources if each.time.mean is not None]),
        memory_mean=_mean([each.memory.mean for each in sources if each.memory.mean is not None]),
        said_to_fit=tuple(entry.row.id for entry in judged if entry.fits and not entry.row.published.fits),
        said_not_to=tuple(entry.row.id for entry in judged if entry.row.published.fits and not entry.fits),
        fits_judged=len(judged),
        picks=tuple(picks(counted)),
    )


def counted_times(predicted: Iterable[Predicted]) -> list[Predicted]:
    """Those whose time is in the means: `fastest` of the rows."""
    entries = {id(entry.row): entry for entry in predicted}
    return [entries[id(row)] for row in fastest(entry.row for entry in entries.values())]


def errors(signed: Iterable[float | None]) -> Errors:
    """The errors of some rows, each predicted over published less 1."""
    sizes = [error for error in signed if error is not None]
    if not sizes:
        return Errors(0, None, None, None, None)
    count = len(sizes)
    return Errors(
        rows=count,
        mean=sum(map(abs, sizes)) / count,
        within_10=sum(abs(error) <= WITHIN_MEMORY for error in sizes) / count,
        within_15=sum(abs(error) <= WITHIN_TIME for error in sizes) / count,
        bias=math.exp(sum(math.log(max(1 + error, 1e-12)) for error in sizes) / count) - 1,
    )


def picks(counted: Sequence[Predicted]) -> list[Pick]:
    """Groups of rows of one source, model, batch and machine in two layouts or more."""
    groups: dict[tuple[object, ...], list[Predicted]] = {}
    for entry in counted:
        training, machine = entry.row.training, entry.row.machine
        shape = training.shape  # vocab is padded by tp
        model = (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.mlp, shape.seq)
        where = (entry.row.source, machine.device, machine.gpus_per_node, entry.row.fabric)
        groups.setdefault((*where, training.gpus, training.global_batch, *model), []).append(entry)
    found = []
    for group in groups.values():
        if len({_layout(entry) for entry in group}) < 2:
            continue
        picked = min(group, key=lambda entry: entry.step.step_s)
        best = min(group, key=_published_s)
        slower = _published_s(picked) / _published_s(best) - 1
        found.append(Pick(picked.row.source, picked.row.training.gpus, len(group), picked.row.id, best.row.id, slower))
    return found


def _tells_fit(entry: Predicted) -> bool:
    """Whether a row ran out, or ran: of one that fits something was measured, else it is theory."""
    published = entry.row.published
    measured = published.step_s is not None or (published.memory_gib is not None and entry.memory_kind != "component")
    return published.fits is False or (published.fits is True and measured)


def _layout(entry: Predicted) -> tuple[object, ...]:
    training = entry.row.training
    split = (training.tp, training.pp, training.dp, training.vp)
    return (*split, training.micro_batch, training.zero_stage, training.recompute, training.offload)


def _published_s(entry: Predicted) -> float:
    seconds = entry.row.published.step_s
    assert seconds is not None
    return seconds


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
