"""A candidate in words: its settings, where its time goes, and why it is not the first."""

from __future__ import annotations

from typing import NamedTuple

from hpc_gpt.plan.prediction import StepTime
from hpc_gpt.plan.search import NEAR, Candidate
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.engines import has_zero


class Part(NamedTuple):
    """A part of a step: the field of a StepTime, its letter in a bar, its name, and what it is."""

    field: str
    letter: str
    name: str
    means: str


PARTS = (
    Part("compute_s", "c", "compute", "forward and backward passes"),
    Part("recompute_s", "r", "recompute", "forward passes done again"),
    Part("tp_s", "t", "tp", "communication within layers, over the tensor-parallel group"),
    Part("bubble_s", "b", "bubble", "stages that wait for the pipeline to fill and to drain"),
    Part("p2p_s", "p", "p2p", "activations sent from stage to stage"),
    Part("dp_s", "d", "dp", "gradients and parameters between replicas, as far as nothing hides it"),
    Part("optimizer_s", "o", "optimizer", "the update"),
    Part("offload_s", "f", "offload", "what moves between host and GPU"),
)


def settings_words(training: Training) -> str:
    """What a candidate has besides its layout and micro-batch.

    >>> from hpc_gpt.plan.training import Shape
    >>> settings_words(Training(Shape(64, 2, 2), engine="deepspeed-zero", zero_stage=3, recompute="full"))
    'ZeRO-3, recompute full'
    """
    words = []
    if has_zero(training.engine):
        words.append(f"ZeRO-{training.zero_stage}")
    if training.distributed_optimizer:
        words.append("sharded optimizer")
    if training.recompute != "none":
        words.append(f"recompute {training.recompute}")
    if training.sequence_parallel:
        words.append("sequence parallel")
    if training.vp > 1:
        words.append(f"{training.vp} chunks a stage")
    if training.offload != "none":
        words.append(f"offload {training.offload}")
    return ", ".join(words) or "-"


def shares(step: StepTime) -> dict[str, float]:
    """Each part's share of the step, by the part's name, 0 to 1."""
    return {part.name: getattr(step, part.field) / step.step_s for part in PARTS}


def does_not_fit(candidate: Candidate) -> str:
    """How far it is from fitting, and where."""
    return f"does not fit: {_needs(candidate)}"


def _needs(candidate: Candidate) -> str:
    return f"{candidate.need_gib:.1f} of {candidate.card_gib:.1f} GiB on stage {candidate.memory.deciding}"


def seconds(figure: float) -> str:
    """Three digits, or all before the point.

    >>> seconds(0.12345), seconds(88.0), seconds(1512.3)
    ('0.123', '88.0', '1,512')
    """
    if figure >= 100:
        return f"{figure:,.0f}"
    return f"{figure:#.3g}"


def _smaller(candidate: Candidate, best: Candidate) -> str:
    """What makes a GPU's products smaller, and so slower, than the best one's; nothing where nothing does."""
    run, other = candidate.training, best.training
    if run.micro_batch < other.micro_batch:
        return f" (micro-batch {run.micro_batch} against {other.micro_batch})"
    return f" (tp {run.tp} against {other.tp})" if run.tp > other.tp else ""


def count_words(params: float) -> str:
    """Parameters in 10^9.

    >>> count_words(51_966_918_656), count_words(3.71e12)
    ('52.0e9', '3,710e9')
    """
    return f"{seconds(params / 1e9)}e9"


def loses(candidate: Candidate, best: Candidate) -> str:
    """Why the candidate is not the first: the part of its step that costs most against the best one's, per token."""
    if candidate.step is None or best.step is None:
        return does_not_fit(candidate)
    if candidate is best:
        return "best" if not best.is_tight else "best, but tight"
    if candidate.tokens_per_s * NEAR >= best.tokens_per_s:
        if candidate.is_tight and not best.is_tight:
            return (
                f"tight: {candidate.need_gib:.1f} of {candidate.card_gib:.1f} GiB on stage {candidate.memory.deciding}"
            )
        return "as fast within 1 %, but less plain"
    scale = best.training.global_batch / candidate.training.global_batch
    costs = {
        part: getattr(candidate.step, part.field) * scale - getattr(best.step, part.field) for part in PARTS
    }  # fmt: skip
    worst = max(costs, key=lambda part: costs[part])
    own, other = shares(candidate.step)[worst.name], shares(best.step)[worst.name]
    if worst.name == "compute" or round(100 * own) <= round(100 * other):
        mine = seconds(getattr(candidate.step, worst.field) * scale)
        return f"{worst.name} {mine} s against {seconds(getattr(best.step, worst.field))} s{_smaller(candidate, best)}"
    return f"{worst.name} {100 * own:.0f} % against {100 * other:.0f} %"
