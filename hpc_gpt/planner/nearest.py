"""Nearby questions that have an answer, found by searching: more GPUs, another batch, other degrees of a layout; and
the refusal of a question that no layout answers, which names them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpc_gpt.core.engines import engine_of
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.format import counted
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.layout import AXES, Layout, check_nodes, nodes_for
from hpc_gpt.core.settings.shape_split import check_split
from hpc_gpt.planner.machine import DEFAULT, Constants, Machine
from hpc_gpt.planner.question import DIVIDES_NO_BATCH, NO_ENGINE, TP_SPANS, Question
from hpc_gpt.planner.search import Candidate, Searched, search, with_margin
from hpc_gpt.planner.step_time import predict_step

_STEPS = 16  # so many numbers of nodes are tried between one that is too small and twice as many
_DOUBLINGS = 6  # of a batch


def by_micro_batch(searched: Searched, constants: Constants = DEFAULT) -> list[Candidate]:
    """For each micro-batch of a search for one layout the best candidate, else the one nearest to fitting; the smallest
    micro-batch first."""
    question, candidates = searched.question, []
    layout = (searched.candidates or searched.too_large)[0].layout
    for micro_batch, _ in question.batches(question.replicas(layout)):
        one = replace(question, fixed={**question.fixed, "micro_batch": micro_batch})
        searched_size = search(one, searched.machine, constants, keep=1)
        candidates += searched_size.candidates[:1] or searched_size.too_large[:1]
    return candidates


def fewest_gpus(question: Question, machine: Machine, most: int = 65536) -> int | None:
    """The fewest GPUs above the question's, in whole nodes (of many in steps of a sixteenth), on which something is
    known to fit; None up to `most`."""
    per_node = question.gpus_per_node
    gpus = question.gpus
    while gpus < most:
        below, gpus = gpus, 2 * gpus if gpus >= per_node else min(2 * gpus, per_node)
        if search(question.on(gpus), machine, first=True).best is None:
            continue
        step = max(per_node, (gpus - below) // _STEPS // per_node * per_node)
        between = range(below - below % per_node + step, gpus, step) if gpus > per_node else ()
        fits = (count for count in between if search(question.on(count), machine, first=True).best is not None)
        return next(fits, gpus)
    return None


def without_offload(searched: Searched) -> str:
    """A note on the GPUs on which a layout fits without offload, if the best offloads unasked; else empty."""
    question, best = searched.question, searched.best
    if best is None or best.training.offload == "none" or "offload" in question.fixed:
        return ""
    fixed, savings = {**question.fixed, "offload": "none"}, question.savings - {"activation_offload"}
    gpus = fewest_gpus(replace(question, fixed=fixed, savings=savings), with_margin(searched.machine))
    return f"nothing needs to be offloaded on {gpus} GPUs: --gpus {gpus} --offload none" if gpus else ""


def overlapped(best: Candidate, machine: Machine, constants: Constants = DEFAULT) -> tuple[Candidate, tuple[str, ...]]:
    """Returns (the candidate with communication hidden, the program's arguments for it; empty if no more can be
    hidden)."""
    arguments, changed = engine_of(best.training).overlaps(best.training)
    training = replace(best.training, **changed)
    return replace(best, training=training, step=predict_step(training, machine, constants)), arguments


def near_batches(batch: int, replicas: int) -> tuple[int, ...]:
    """The global batches nearest to `batch` that so many replicas divide, at most twice as large.

    >>> near_batches(512, 3), near_batches(512, 1024), near_batches(512, 2048)
    ((510, 513), (1024,), ())
    """
    below = batch // replicas * replicas
    return tuple(size for size in (below, below + replicas) if 0 < size <= 2 * batch)


def larger_batch(searched: Searched, constants: Constants = DEFAULT) -> str:
    """A note on the gain of a larger batch, if the bubble is over half of the best layout's step; else empty."""
    question, best = searched.question, searched.best
    if best is None or question.global_batch is None or _bubble(best) <= 0.5:
        return ""
    sizes = {name: size for name, size in question.fixed.items() if name not in ("micro_batch", "micro_batches")}
    fixed = {**sizes, **vars(best.layout)}
    for power in range(1, _DOUBLINGS + 1):
        batch = question.global_batch * 2**power
        larger = replace(question, fixed=fixed, engines=(best.training.engine,), global_batch=batch)
        other = search(larger, searched.machine, constants, keep=1).best
        if other is not None and (_bubble(other) <= 0.5 or power == _DOUBLINGS):
            faster = other.tokens_per_s / best.tokens_per_s
            return (
                f"the bubble is {_bubble(best):.0%} of the step: with --gbs {batch} it is {_bubble(other):.0%}, and "
                f"{best.layout} has {faster:.1f} times the tokens/s; a larger batch also changes how the model learns"
            )
    return ""


def _bubble(candidate: Candidate) -> float:
    assert candidate.step is not None
    return candidate.step.bubble_s / candidate.step.step_s


def near_degrees(question: Question, axis: str) -> list[int]:
    """The three degrees of an axis nearest to the fixed one with which some layout can run; ascending."""
    fixed = {name: value for name, value in question.fixed.items() if name != axis}
    other, requested = replace(question, fixed=fixed), question.fixed[axis]
    can = {getattr(layout, axis) for layout, obstacle in other.layouts() if obstacle is None and other.can_run(layout)}
    return sorted(sorted(can, key=lambda degree: abs(math.log(degree / requested)))[:3])


def check_possible(question: Question, experiment: Experiment, profile: ClusterProfile, name: str) -> None:
    """Raises LayoutError or ConfigError if no layout of the experiment's `question` can run, whatever memory it needs.

    The error says why, and which numbers of GPUs work.
    """
    layouts = list(question.layouts())
    unobstructed = [layout for layout, obstacle in layouts if obstacle is None]
    if any(question.can_run(layout) for layout in unobstructed):
        return
    if not question.engines:
        _size_with(question, experiment, profile, Layout(1, 1, question.gpus))
        raise ConfigError("no engine has all the switches that are set in [engine]", "hpc-gpt help engines lists them")
    if len(layouts) == 1:  # the launcher's checks have a message of their own for it
        layout, per_node = layouts[0][0], question.gpus_per_node
        check_split(question.shape, layout)
        check_nodes(layout, nodes_for(question.gpus, per_node), per_node, question.tp_across_nodes)
    elif layouts and not unobstructed and not {"ep", "etp"}.isdisjoint(question.fixed):
        # Its message has the numbers, and an ep that divides.
        widest = next((layout for layout, _ in layouts if layout.pp == 1), layouts[0][0])
        check_split(question.shape, widest)
    if unobstructed:  # an engine's switches prevent it, and its own message says which
        _size_with(question, experiment, profile, unobstructed[0])
    fixed = {axis: question.fixed[axis] for axis in AXES if axis in question.fixed}
    if not layouts and {"tp", "pp", "dp"} <= set(fixed):
        _size_with(question, experiment, profile, Layout(**fixed))
    with_axes = " with " + ", ".join(f"{axis} {size}" for axis, size in fixed.items()) if fixed else ""
    reasons = list(dict.fromkeys(reason or NO_ENGINE for _, reason in layouts))
    if not layouts:
        reasons = [f"{' x '.join(fixed)} does not divide {question.gpus}"]
    hint = _near_options(question, fixed, reasons)
    if reasons == [TP_SPANS]:
        hint += ", or --allow-tp-across-nodes to accept the slow links"
    raise LayoutError(
        f"no layout of {name} can run on {counted(question.gpus, 'GPU')}{with_axes}: {', '.join(reasons)}", hint
    )


def _near_options(question: Question, fixed: Mapping[str, int], reasons: Sequence[str]) -> str:
    """The options of a near question that some layout answers: a near batch, near degrees of a fixed axis, or other
    numbers of GPUs."""
    if reasons == [DIVIDES_NO_BATCH] and question.global_batch is not None:
        sizes = near_batches(question.global_batch, fixed.get("dp", question.gpus))
        return f"use --gbs {' or '.join(map(str, sizes))}" if sizes else "leave --tp, --pp, --dp and the batch open"
    for axis in fixed:
        if degrees := near_degrees(question, axis):
            return f"use --{axis} {' or '.join(map(str, degrees))}"
    counts = working_counts(question)
    return f"use --gpus {' or '.join(map(str, counts))}" if counts else "leave --tp, --pp, --dp and the batch open"


def working_counts(question: Question) -> list[int]:
    """The three numbers of GPUs nearest to the question's on which some layout can run; ascending."""
    per_node, gpus = question.gpus_per_node, question.gpus
    nodes = gpus // per_node
    near = [per_node * count for count in range(max(1, nodes - 64), nodes + 66)]
    doubled = [per_node * 2**power for power in range(20)]
    counts = sorted({*range(1, per_node + 1), *near, *doubled} - {gpus}, key=lambda count: abs(count - gpus))
    working: list[int] = []
    for count in counts:
        other = question.on(count)
        if any(obstacle is None and other.can_run(layout) for layout, obstacle in other.layouts()):
            working.append(count)
            if len(working) == 3:
                break
    return sorted(working)


def _size_with(question: Question, experiment: Experiment, profile: ClusterProfile, layout: Layout) -> None:
    """Raises the error of `size_run` for the experiment's own engine with the layout, if there is one."""
    requested_layout = replace(experiment.layout, gpus=question.gpus, nodes=None, **vars(layout))
    requested_layout = replace(requested_layout, shard=experiment.layout.shard)
    engine = experiment.engine
    if "zero_stage" not in question.fixed:
        engine = replace(engine, zero_stage=None)
    size_run(replace(experiment, layout=requested_layout, engine=engine), profile)
