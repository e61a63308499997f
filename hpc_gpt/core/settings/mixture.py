"""`[data.mix]`: the sources of a mixture, their weights per phase, and the begin of each phase, in exact fractions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MIX: Literal["mix"] = "mix"  # data.source of a mixture


@dataclass(frozen=True)
class MixedSource:
    """`[data.mix.NAME]`: a source of a mixture. Its last `data.eval_fraction` is reserved for evaluation.

    `path` and `weight` are required, but may come from different places: files that extend others, rows and options.
    """

    path: str | None = None
    "Token file of the source, or the prefix of a pair of Megatron files; searched as data.path is."
    source: Literal["tokens", "megatron"] = "tokens"
    "Format of the files: a token file, or Megatron's .bin and .idx."
    weight: float | tuple[float, ...] | None = None
    "Share of the tokens, relative to the other sources, or a list with one share per phase; for example 0.7."

    def weights(self, phases: int) -> tuple[Fraction, ...]:
        """The weight in each phase, exactly as written: 0.1 is a tenth."""
        weights = self.weight if isinstance(self.weight, tuple) else (self.weight or 0.0,) * phases
        return tuple(Fraction(repr(weight)) for weight in weights)


def mixture_shares(mix: Mapping[str, MixedSource], phases: Sequence[float]) -> list[dict[str, Fraction]]:
    """{name: share of the source} per phase, sorted by name, so that the order of the tables does not matter."""
    count = len(phases) + 1
    weights = {name: mix[name].weights(count) for name in sorted(mix)}
    totals = [sum(weight[phase] for weight in weights.values()) for phase in range(count)]
    return [{name: weight[phase] / totals[phase] for name, weight in weights.items()} for phase in range(count)]


def evaluation_shares(mix: Mapping[str, MixedSource] | None, phases: Sequence[float]) -> dict[str, float]:
    """{name: weight of the source's loss in loss_eval}, its share in the first phase. Empty without a mixture."""
    shares = mixture_shares(mix, phases)[0] if mix else {}
    return {name: float(share) for name, share in shares.items()}


def phase_steps(phases: Sequence[float], step_tokens: int) -> list[int]:
    """The number of steps before each phase, which begins with the first step at or after its number of tokens.

    >>> phase_steps([1000, 1001], 500)
    [0, 2, 3]
    """
    return [0, *(math.ceil(Fraction(tokens) / step_tokens) for tokens in phases)]
