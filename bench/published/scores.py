"""Published rows predicted and compared with their figures: constants by cluster, and the scores of the errors.

A cluster is a name in `{"clusters": {name: rows}}`, else the rows of one device, node and fabric.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.published.rows import LeftOut, PublishedRow, Rows
from hpc_gpt.core.errors import UserError
from hpc_gpt.planner import calibration
from hpc_gpt.planner.calibration import Calibrated
from hpc_gpt.planner.machine import DEFAULT, Constants
from hpc_gpt.planner.memory import Memory, predict_memory
from hpc_gpt.planner.step_time import StepTime, predict_step

WITHIN_TIME, WITHIN_MEMORY, WITHIN_PICK = 0.15, 0.10, 0.05
DATA_SHEET = "data sheets"


@dataclass(frozen=True)
class Cluster(Calibrated):
    """Constants, and whose rows may take them."""

    device: str = ""
    gpus_per_node: int = 0
    fabrics: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()


def fastest(rows: Iterable[PublishedRow]) -> list[PublishedRow]:
    """The rows whose time counts: of a source's several times for one layout only the shortest, and no noisy one."""
    groups: dict[tuple[str, str], list[PublishedRow]] = {}
    every = list(rows)
    for row in every:
        groups.setdefault((row.source, row.fabric), []).append(row)
    kept = {id(row) for group in groups.values() for row in calibration.fastest(group)}
    return [row for row in every if id(row) in kept]


def calibrate(name: str, rows: Sequence[PublishedRow]) -> Cluster:
    """The constants of one cluster; the defaults if no row has a time."""
    fitted, machine = calibration.calibrate(name, fastest(rows)), rows[0].machine
    return Cluster(
        **vars(fitted),
        device=machine.device,
        gpus_per_node=machine.gpus_per_node,
        fabrics=frozenset(row.fabric for row in rows),
        sources=frozenset(row.source for row in rows),
    )


def calibrate_clusters(rows: Sequence[PublishedRow]) -> list[Cluster]:
    """Every cluster that has a time, in the file's order."""
    groups: dict[str, list[PublishedRow]] = {}
    for row in rows:
        groups.setdefault(row.cluster or cluster_name(row), []).append(row)
    return [calibrate(name, group) for name, group in groups.items() if fastest(group)]


def cluster_name(row: PublishedRow) -> str:
    """A name from a row's machine, for rows that name no cluster: `a100-80g-8-infiniband-4x200g`."""
    name = f"{row.machine.device}-{row.machine.gpus_per_node}-{row.fabric}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def chosen_for(row: PublishedRow, clusters: Sequence[Cluster]) -> Cluster | None:
    """The cluster whose constants predict a row: one of the same device and node size; None if there is none.

    Of several, those with rows of the same source, else of the same fabric, else all. If several are left, their
    geometric mean: the row's cluster is as likely to be above as below each.
    """
    machine = (row.machine.device, row.machine.gpus_per_node)
    alike = [cluster for cluster in clusters if (cluster.device, cluster.gpus_per_node) == machine]
    nearest = (
        [cluster for cluster in alike if row.source in cluster.sources]
        or [cluster for cluster in alike if row.fabric in cluster.fabrics]
        or alike
    )
    if len(nearest) < 2:
        return nearest[0] if nearest else None
    logarithms = [[math.log(value) for value in vars(cluster.constants).values()] for cluster in nearest]
    return Cluster(
        "the middle of " + ", ".join(cluster.name for cluster in nearest),
        device=machine[0],
        gpus_per_node=machine[1],
        fabrics=frozenset().union(*(cluster.fabrics for cluster in nearest)),
        sources=frozenset().union(*(cluster.sources for cluster in nearest)),
        constants=Constants(*(math.exp(sum(column) / len(nearest)) for column in zip(*logarithms, strict=True))),
    )


Chosen = tuple[Constants, str]


@dataclass(frozen=True)
class Predicted:
    """A row with its predictions, and the name of the constants that were used."""

    row: PublishedRow
    step: StepTime
    memory: Memory
    fits: bool
    calibration: str = DATA_SHEET

    @property
    def memory_kind(self) -> str:
        """The kind of memory that the row states; nvidia_smi if it states none."""
        return self.row.published.memory_kind or "nvidia_smi"

    @property
    def memory_gib(self) -> float:
        """GiB of the stage that needs the most, in the row's kind, among the stages that the source lists."""
        stages = self.memory.stages
        listed = [stages[stage] for stage, _ in self.row.published.by_stage] or list(stages)
        if self.memory_kind == "component":
            first = stages[0]
            return first.parameters + first.gradients + first.optimizer + first.activations
        return max(float(getattr(stage, self.memory_kind)) for stage in listed)

    @property
    def time_error(self) -> float | None:
        """Predicted over published seconds, less 1."""
        published = self.row.published.step_s
        return None if published is None else self.step.step_s / published - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over published GiB, less 1."""
        published = self.row.published.memory_gib
        return None if published is None else self.memory_gib / published - 1


def choosing(clusters: Sequence[Cluster], always: Calibrated | None = None) -> Callable[[PublishedRow], Chosen]:
    """A function from a row to its constants: `always`, else those of `chosen_for`, else those of data sheets."""

    def choose(row: PublishedRow) -> Chosen:
        cluster = always or chosen_for(row, clusters)
        return (cluster.constants, cluster.name) if cluster else (DEFAULT, DATA_SHEET)

    return choose


def predict_rows(rows: Rows, choose: Callable[[PublishedRow], Chosen]) -> list[Predicted | LeftOut]:
    """Every entry of a file in its order; a row that cannot be predicted is left out with the reason."""
    return [entry if isinstance(entry, LeftOut) else predict_row(entry, *choose(entry)) for entry in rows.entries]


def predict_row(row: PublishedRow, constants: Constants, name: str) -> Predicted | LeftOut:
    try:
        memory = predict_memory(row.training, row.machine)
        step = predict_step(row.training, row.machine, constants)
    except UserError as fault:
        return LeftOut(row.id, row.source, row.cluster, f"cannot be predicted: {' '.join(str(fault).split())[:200]}")
    return Predicted(row, step, memory, memory.stages[memory.deciding].nvidia_smi <= row.machine.memory_gib, name)


def predicted_only(entries: Iterable[Predicted | LeftOut]) -> list[Predicted]:
    """The entries that are not left out."""
    return [entry for entry in entries if isinstance(entry, Predicted)]


def without_source(rows: Sequence[PublishedRow]) -> list[Predicted]:
    """Every source's rows, predicted with constants fitted to other sources: those of the same device if there are any.

    These are the errors to expect on unseen rows. Sources without a time are left out.
    """
    predicted: list[Predicted] = []
    for source in dict.fromkeys(row.source for row in fastest(rows)):
        own = [row for row in rows if row.source == source]
        others = [row for row in rows if row.source != source]
        for device in dict.fromkeys(row.machine.device for row in own):
            alike = [row for row in others if row.machine.device == device]
            fitted_to = alike if fastest(alike) else others
            predicted += _predict_from(fitted_to, [row for row in own if row.machine.device == device])
    return predicted


def without_row(rows: Sequence[PublishedRow]) -> list[Predicted]:
    """Every row of each cluster, predicted with constants fitted to the cluster's other rows."""
    predicted: list[Predicted] = []
    for cluster in dict.fromkeys(row.cluster for row in rows if row.cluster is not None):
        own = fastest(row for row in rows if row.cluster == cluster)
        for row in own:
            predicted += _predict_from([each for each in own if each is not row], [row])
    return predicted


def _predict_from(fitted_to: Sequence[PublishedRow], rows: Sequence[PublishedRow]) -> list[Predicted]:
    """The rows, predicted with constants fitted to `fitted_to`, or with those of data sheets if none of these has a
    time."""
    chosen = (calibrate("others", fitted_to).constants, "others") if fastest(fitted_to) else (DEFAULT, DATA_SHEET)
    return predicted_only(predict_row(row, *chosen) for row in rows)


@dataclass(frozen=True)
class Errors:
    """The number of rows, their mean absolute error as a share, and the shares of rows within 10 % and 15 %."""

    rows: int
    mean: float | None
    within_10: float | None
    within_15: float | None
    bias: float | None  # the geometric mean of predicted over published, less 1


@dataclass(frozen=True)
class SourceScore:
    source: str
    time: Errors
    memory: Errors


@dataclass(frozen=True)
class Pick:
    """Rows that differ only in layout: the one predicted to be fastest, and how much slower it is than the true
    best."""

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
    """The scores of a file. `time_mean` and `memory_mean` are means over sources; `time` and `memory` are of all
    rows."""

    sources: tuple[SourceScore, ...]
    time: Errors
    memory: Errors
    time_mean: float | None
    memory_mean: float | None
    said_to_fit: tuple[str, ...]  # but ran out of memory
    said_not_to: tuple[str, ...]  # but ran
    fits_judged: int
    picks: tuple[Pick, ...]


def score(predicted: Sequence[Predicted]) -> Scores:
    """The scores of a file's predicted rows. Noisy rows and rows without a figure do not count."""
    by_row = {id(entry.row): entry for entry in predicted}
    counted = [by_row[id(row)] for row in fastest(entry.row for entry in by_row.values())]
    weighed = [entry for entry in predicted if entry.memory_error is not None and not entry.row.published.noisy]
    names = list(dict.fromkeys(entry.row.source for entry in predicted))
    sources = tuple(
        SourceScore(
            name,
            _errors(entry.time_error for entry in counted if entry.row.source == name),
            _errors(entry.memory_error for entry in weighed if entry.row.source == name),
        )
        for name in names
    )
    judged = [entry for entry in predicted if tells_fit(entry)]
    return Scores(
        sources=sources,
        time=_errors(entry.time_error for entry in counted),
        memory=_errors(entry.memory_error for entry in weighed),
        time_mean=_mean([each.time.mean for each in sources if each.time.mean is not None]),
        memory_mean=_mean([each.memory.mean for each in sources if each.memory.mean is not None]),
        said_to_fit=tuple(entry.row.id for entry in judged if entry.fits and not entry.row.published.fits),
        said_not_to=tuple(entry.row.id for entry in judged if entry.row.published.fits and not entry.fits),
        fits_judged=len(judged),
        picks=tuple(_picks(counted)),
    )


def _errors(signed: Iterable[float | None]) -> Errors:
    """The errors of rows, from each row's predicted over published less 1."""
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


def _picks(counted: Sequence[Predicted]) -> list[Pick]:
    """A pick for each group of rows with the same source, model, batch and machine in two settings or more."""
    groups: dict[tuple[object, ...], list[Predicted]] = {}
    for entry in counted:
        training, machine = entry.row.training, entry.row.machine
        shape = training.shape  # without its vocabulary, which is padded by tp
        model = (shape.hidden, shape.layers, shape.heads, shape.key_heads, shape.mlp_width, shape.seq)
        where = (entry.row.source, machine.device, machine.gpus_per_node, entry.row.fabric)
        groups.setdefault((*where, training.gpus, training.global_batch, *model), []).append(entry)
    found = []
    for group in groups.values():
        if len({_setting(entry) for entry in group}) < 2:
            continue
        picked = min(group, key=lambda entry: entry.step.step_s)
        best = min(group, key=_published_s)
        slower = _published_s(picked) / _published_s(best) - 1
        found.append(Pick(picked.row.source, picked.row.training.gpus, len(group), picked.row.id, best.row.id, slower))
    return found


def tells_fit(entry: Predicted) -> bool:
    """Whether a row ran out of memory, or ran: if nothing was measured of a row that fits, it is theory."""
    published = entry.row.published
    measured = published.step_s is not None or (published.memory_gib is not None and entry.memory_kind != "component")
    return published.fits is False or (published.fits is True and measured)


def _setting(entry: Predicted) -> tuple[object, ...]:
    run = entry.row.training
    return (run.layout, run.vp, run.micro_batch, run.zero_stage, run.recompute, run.offload)


def _published_s(entry: Predicted) -> float:
    seconds = entry.row.published.step_s
    assert seconds is not None
    return seconds


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
