"""Searches all ways to run a model on a number of GPUs for those that fit in memory, and the fastest of these.

Memory is predicted first, time only for candidates that fit. Only the best few of each layout are kept, to bound the
memory of the search.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hpc_gpt.core.engines import engine_of
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.recomputation import recomputation
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.planner.machine import DEFAULT, Constants, Machine
from hpc_gpt.planner.memory import Memory, StageMemory, host_need_gib, predict_memory
from hpc_gpt.planner.question import NO_ENGINE, NO_GAIN, OFFLOADS, Question
from hpc_gpt.planner.step_time import StepTime, predict_step

KEPT = 3  # candidates of each layout
# Settings of one engine whose speeds have a smaller ratio count as equal; then the plainer ones come first.
NEAR = 1.01
# Candidates whose speeds have a smaller ratio are as fast as each other, as far as a prediction can tell.
EQUAL = 1.03
# Up to this share of the card, memory to spare is no reason to choose another candidate that is as fast.
ROOMY = 0.75
# A candidate above this share of the card may run out of memory within the prediction's error: so it must be faster by
# the second factor than one with room.
TIGHT = 0.92
WORTH_THE_RISK = 1.15
# Above this share no speed is worth the risk: such a candidate comes after all others.
FILLED = 0.98
# Offload that makes training slower by more than this factor gets a note.
SLOW_LAYOUT = 20


@dataclass(frozen=True)
class Candidate:
    """One way to run the model, with its predictions. `step` is None if it does not fit.

    The GPUs of a host offload `host_gib` to it; it has `host_memory_gib`, None if that is unknown.
    """

    training: Training
    memory: Memory
    card_gib: float
    step: StepTime | None = None
    host_gib: float = 0.0
    host_memory_gib: float | None = None

    @cached_property
    def layout(self) -> Layout:
        return self.training.layout

    @cached_property
    def deciding(self) -> StageMemory:
        """The stage that needs the most memory."""
        return self.memory.stages[self.memory.deciding]

    @property
    def need_gib(self) -> float:
        """GiB of the card that the deciding stage needs: reserved memory and context."""
        return self.deciding.nvidia_smi

    @property
    def states_gib(self) -> float:
        """GiB of parameters, gradients and optimizer states on the deciding stage."""
        states = self.deciding
        return states.parameters + states.gradients + states.optimizer

    @property
    def needs_unknown_host(self) -> bool:
        """Whether it offloads to a host whose memory is unknown."""
        return self.host_gib > 0 and self.host_memory_gib is None

    @property
    def host_share(self) -> float:
        """The share of a host's memory that it needs; 0 if the host's memory is unknown."""
        return self.host_gib / self.host_memory_gib if self.host_memory_gib else 0.0

    @cached_property
    def share(self) -> float:
        """The share that it needs of the card or of the host's memory, whichever is larger; above 1 it does not fit."""
        return max(self.need_gib / self.card_gib, self.host_share)

    @property
    def fits(self) -> bool:
        """Whether it fits on the card, and in the host's memory as far as that is known."""
        return self.need_gib <= self.card_gib and self.host_share <= 1

    @property
    def is_tight(self) -> bool:
        """Whether it may run out of memory within the prediction's own error."""
        return self.share > TIGHT

    @property
    def is_filled(self) -> bool:
        """Whether it leaves less memory than even a good prediction errs by."""
        return self.share > FILLED

    @property
    def exposed_share(self) -> float:
        """The step's share of communication that nothing hides."""
        assert self.step is not None
        return (self.step.tp_s + self.step.p2p_s + self.step.dp_s + self.step.ep_s) / self.step.step_s

    @property
    def crowding(self) -> float:
        """The share of the card that it needs, as far as that is a reason to choose another that is as fast."""
        return max(ROOMY, round(self.share, 2))

    @property
    def axes(self) -> int:
        """The number of axes that divide the model."""
        run = self.training
        return sum(size > 1 for size in (run.tp, run.pp, run.cp, run.ep))

    @cached_property
    def risks(self) -> tuple[bool, bool, bool]:
        return self.needs_unknown_host, self.is_filled, self.is_tight

    def is_as_fast(self, best: "Candidate") -> bool:
        """Whether it is as fast as the best, as far as a prediction can tell."""
        return self.risks == best.risks and 1 / EQUAL <= self.tokens_per_s / best.tokens_per_s <= EQUAL

    @cached_property
    def tokens_per_s(self) -> float:
        assert self.step is not None
        return self.training.global_batch * self.training.shape.seq / self.step.step_s

    @property
    def setting_counts(self) -> tuple[int, ...]:
        """The settings beyond a plain run on one GPU, the costliest first, without the engine."""
        run, again = self.training, recomputation(self.training.recompute)
        return (
            OFFLOADS.index(run.offload),
            run.vp > 1,
            run.activations_on_host,
            run.loss_chunks > 1,
            run.zero_stage > 1,
            run.sequence_parallel,
            math.ceil(2 * again.share) or len(again.modules) > 0,
            run.cp,
            run.ep,
            run.pp,
            run.tp,
            run.sharded_optimizer,
        )

    @property
    def sort_key(self) -> tuple[int, ...]:
        """The first sort keys, best first: those that are known to fit and leave memory, then speed in steps of NEAR,
        reduced for a tight candidate."""
        speed = self.tokens_per_s / (WORTH_THE_RISK if self.is_tight else 1.0)
        return (self.needs_unknown_host, self.is_filled, -math.floor(math.log(speed) / math.log(NEAR)))

    @cached_property
    def rank(self) -> tuple[float | int, ...]:
        """The sort key, best first: `sort_key`, then the plainest."""
        run = self.training
        order = engine_of(run).plan_order
        plain = (*self.setting_counts, order, run.zero_stage, run.micro_batch)
        return (*self.sort_key, self.is_tight, *plain, -self.tokens_per_s)


@dataclass
class Searched:
    """The result of a search. `candidates`: those that fit, best first, at most KEPT per layout. `too_large`: for every
    layout without one, the candidate nearest to fitting. `left_out`: {reason: number of layouts that cannot run}.

    `fitting` and `not_fitting` count settings; `memory_predictions` counts predictions of memory.
    """

    question: Question
    machine: Machine
    candidates: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    fitting: int = 0
    not_fitting: int = 0
    memory_predictions: int = 0

    @property
    def best(self) -> Candidate | None:
        """The best candidate; None if nothing fits, or only candidates that offload to a host of unknown memory."""
        first = self.candidates[0] if self.candidates else None
        return None if first is None or first.needs_unknown_host else first

    @property
    def fastest(self) -> Candidate:
        """The fastest of the candidates that risk no more than the best."""
        return fastest_of(self.candidates)

    @property
    def best_of_layouts(self) -> list[Candidate]:
        """The best candidate of each layout, best first."""
        return _firsts(self.candidates)

    def shown(self, lines: int) -> list[Candidate]:
        """The first `lines` of them; one has the best's tp and pp with the next shorter cp, to show its gain."""
        layouts = self.best_of_layouts
        first = layouts[0].layout if layouts else Layout(1, 1, 1)
        alike = [
            candidate for candidate in layouts if (candidate.layout.tp, candidate.layout.pp) == (first.tp, first.pp)
        ]
        shorter = max(
            (candidate for candidate in alike if candidate.layout.cp < first.cp),
            key=lambda candidate: candidate.layout.cp,
            default=None,
        )
        if shorter is None or shorter in layouts[:lines]:
            return layouts[:lines]
        return [*layouts[: lines - 1], shorter]


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates, best first: the one rule by which a plan and a submission choose engine and layout.

    They are sorted by `rank`, and then those that equal the fastest of all by `_drawbacks`. In a layout that is slower,
    the first is chosen so among those that equal the layout's own fastest.
    """
    by_rank = sorted(candidates, key=lambda candidate: candidate.rank)
    if not by_rank:
        return []
    of_layouts: dict[Layout, list[Candidate]] = {}
    for candidate in by_rank:
        of_layouts.setdefault(candidate.layout, []).append(candidate)
    places = {id(candidate): place for place, candidate in enumerate(by_rank)}

    def key(candidate: Candidate) -> tuple[float, ...]:
        if candidate.is_as_fast(fastest):
            return (0, *_drawbacks(candidate), places[id(candidate)])
        return (1, places[id(firsts.get(id(candidate), candidate))], id(candidate) not in firsts)

    fastest = fastest_of(by_rank)
    # {id of the chosen candidate of a layout: the layout's first by rank, whose place it takes}
    firsts = {id(_chosen(alike)): alike[0] for alike in of_layouts.values()}
    return sorted(by_rank, key=key)


def fastest_of(by_rank: Sequence[Candidate]) -> Candidate:
    """The fastest of the candidates that risk no more than the first. `by_rank`: sorted by rank."""
    return max((one for one in by_rank if one.risks == by_rank[0].risks), key=lambda one: one.tokens_per_s)


def _chosen(by_rank: Sequence[Candidate]) -> Candidate:
    """The candidate with the least drawbacks of those that are as fast as the fastest."""
    fastest = fastest_of(by_rank)
    return min((candidate for candidate in by_rank if candidate.is_as_fast(fastest)), key=_drawbacks)


def _drawbacks(candidate: Candidate) -> tuple[float, ...]:
    """The sort key of candidates that are as fast as each other, the least first: offload, memory of a card that
    is nearly full, exposed communication in percent, axes, engine. If the host's memory is unknown, the one that needs
    the least of it is the likeliest to fit."""
    run, exposed = candidate.training, round(candidate.exposed_share, 2)
    offloaded = OFFLOADS.index(run.offload) + run.activations_on_host
    host_gib = candidate.host_gib if candidate.needs_unknown_host else 0.0
    return host_gib, offloaded, candidate.crowding, exposed, candidate.axes, engine_of(run).plan_order


def _firsts(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first candidate of each layout."""
    firsts: dict[Layout, Candidate] = {}
    for candidate in candidates:
        firsts.setdefault(candidate.layout, candidate)
    return list(firsts.values())


def with_margin(machine: Machine) -> Machine:
    """A smaller machine, so that all that fits on it leaves room on the real cards and host."""
    host = None if machine.host_memory_gib is None else TIGHT * machine.host_memory_gib
    return replace(machine, memory_gib=TIGHT * machine.memory_gib, host_memory_gib=host)


def search(
    question: Question, machine: Machine, constants: Constants = DEFAULT, keep: int = KEPT, first: bool = False,
    limit_s: float = math.inf,
) -> Searched:  # fmt: skip
    """Tries every setting that the question leaves open. `first`: stop at the first candidate that is known to fit,
    whatever its speed. Raises TimeoutError after `limit_s` seconds of CPU time."""
    searched = Searched(question, machine)
    # The fastest so far with room, and the fastest by tp and pp.
    fastest: Candidate | None = None
    shorter: dict[tuple[int, int], Candidate] = {}
    began = time.process_time()  # of the CPU: the answer is the same on a loaded machine
    for layout, obstacle in question.layouts():
        if time.process_time() - began > limit_s:
            raise TimeoutError(f"the search is not over after {limit_s:g} s of CPU time")
        if obstacle is not None:
            searched.left_out[obstacle] += 1
            continue
        alike = shorter.get((layout.tp, layout.pp))
        if alike is not None and alike.layout.cp == layout.cp:  # another ep
            alike = None
        if alike is not None and fastest is not None and _gains_nothing(alike, fastest):
            searched.left_out[NO_GAIN] += 1
            continue
        best, nearest = _search_layout(searched, layout, constants, keep, first)
        if best and alike is not None and min(best, key=lambda one: one.rank).tokens_per_s <= alike.tokens_per_s:
            searched.left_out[NO_GAIN] += 1
            continue
        searched.candidates += best
        if best and not best[0].is_tight and not best[0].needs_unknown_host:
            fastest_here = min(best, key=lambda one: one.rank)
            so_far = shorter.get((layout.tp, layout.pp), fastest_here)
            shorter[layout.tp, layout.pp] = max(so_far, fastest_here, key=lambda one: one.tokens_per_s)
            fastest = max(fastest or fastest_here, fastest_here, key=lambda one: one.tokens_per_s)
        if not best and nearest is not None:
            searched.too_large.append(nearest)
        if first and best and not best[0].needs_unknown_host:
            break
    searched.candidates = ranked(searched.candidates)
    searched.too_large.sort(key=lambda candidate: candidate.share)
    searched.left_out = Counter(dict(searched.left_out.most_common()))
    return searched


def _gains_nothing(alike: Candidate, fastest: Candidate) -> bool:
    """Whether a longer cp than `alike` has, with the same tp and pp, cannot win by more than a prediction's error.

    It divides the activations and multiplies the micro-batches: it can save no more than recomputation, offload and
    bubble. Everything else in the step takes at least as long, as the same ranks share parameters.
    """
    step = alike.step
    assert step is not None
    least = 1 - (step.recompute_s + step.offload_s + step.bubble_s) / step.step_s
    return alike.tokens_per_s <= EQUAL * least * fastest.tokens_per_s


def _search_layout(
    searched: Searched, layout: Layout, constants: Constants, keep: int, first: bool
) -> tuple[list[Candidate], Candidate | None]:
    """Returns (the best candidates of a layout, the one nearest to fitting). Counts settings in `searched`."""
    fitting: list[Candidate] = []
    nearest: Candidate | None = None
    batches, ways = searched.question.batches(searched.question.replicas(layout)), list(searched.question.ways(layout))
    mixture, full = searched.question.shape.is_mixture, set()
    for way in ways:
        held = (way.engine, way.zero_stage, way.offload, way.sharded_optimizer)
        if held in full:  # chunks do not change the states, which are larger than the card
            searched.not_fitting += len(batches)
            continue
        if first and way.vp > min(other.vp for other in ways):
            continue  # more chunks need more memory
        for candidate in _tried(searched, way, batches, first):
            if not candidate.fits:
                if nearest is None or candidate.share < nearest.share:
                    nearest = candidate
                if mixture and candidate.states_gib > searched.machine.memory_gib:
                    full.add(held)
                continue
            timed = replace(candidate, step=predict_step(candidate.training, searched.machine, constants))
            if first and not timed.needs_unknown_host:
                return [timed], None
            fitting.append(timed)
    if not ways:
        searched.left_out[NO_ENGINE] += 1
    elif not fitting and nearest is None:
        searched.left_out["the batch does not divide so"] += 1
    alike: dict[Layout, list[Candidate]] = {}  # with and without replicas of shards
    for candidate in fitting:
        alike.setdefault(candidate.layout, []).append(candidate)
    return [candidate for one in alike.values() for candidate in _kept(ranked(one), keep)], nearest


def _kept(best: Sequence[Candidate], keep: int) -> list[Candidate]:
    """The `keep` best candidates of a layout, and its fastest one, with which other layouts are compared."""
    fastest, kept = fastest_of(best), [*best[:keep]]
    return kept if any(candidate is fastest for candidate in kept) else [*kept, fastest]


def _tried(searched: Searched, way: Training, batches: Sequence[tuple[int, int]], first: bool) -> Iterator[Candidate]:
    """Yields each setting of a way that fits, and from every series of growing micro-batches the first
    that does not. `first`: yields only the setting that needs the least, as no other fits if it does not.

    A larger micro-batch never needs less memory; parameters, gradients and optimizer states depend on neither the
    micro-batch nor recomputation.
    """
    # With interleaved chunks, Megatron-LM needs a multiple of pp micro-batches.
    batches = [pair for pair in batches if way.vp == 1 or pair[1] % way.pp == 0]
    series, machine = searched.question.techniques(way.engine, way.tp, way.cp), searched.machine
    if first:
        batches, series = batches[:1], series[-1:]
    for place, (parallel, recompute) in enumerate(series):
        for number, (micro_batch, micro_batches) in enumerate(batches):
            training = replace(
                way,
                micro_batch=micro_batch,
                micro_batches=micro_batches,
                recompute=recompute,
                sequence_parallel=parallel,
            )
            candidate = candidate_of(training, machine)
            searched.memory_predictions += 1
            too_many = candidate.states_gib > machine.memory_gib
            if not candidate.fits and not too_many:
                for saved in searched.question.saved(training):
                    candidate = candidate_of(saved, machine)
                    searched.memory_predictions += 1
                    if candidate.fits:
                        break
            searched.fitting += candidate.fits
            yield candidate
            if candidate.fits:
                continue
            searched.not_fitting += len(batches) - number
            if too_many:
                # The states alone are larger than the card, so no setting of this way fits.
                searched.not_fitting += len(batches) * (len(series) - place - 1)
                return
            break


def candidate_of(training: Training, machine: Machine) -> Candidate:
    """A candidate with its memory predicted, but not its time."""
    memory = predict_memory(training, machine)
    host = host_need_gib(training, memory, machine)
    return Candidate(training, memory, machine.memory_gib, None, host, machine.host_memory_gib)
