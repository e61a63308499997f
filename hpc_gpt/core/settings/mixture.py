"""`[data.mix]`: the sources of a mixture, their weights per phase, and the begin of each phase, in exact fractions."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from hpc_gpt.core.format import counted
from hpc_gpt.core.formulas import MOST_TOKENS

MIX: Literal["mix"] = "mix"  # data.source of a mixture
# A source's name is part of dotted keys, and of the tags of its losses.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


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


def mixture_faults(
    source: str, path: str | None, mix: Mapping[str, MixedSource] | None, phases: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """(fault, hint) of each contradiction in these keys of `[data]`."""
    if mix is None:
        without = "give the sources as [data.mix.NAME] with path and weight, or leave it out"
        if source == MIX:
            yield 'data.source is "mix", but there is no [data.mix.NAME]', without
        if phases:
            yield f"data.phases is {_listed(phases)}, but there is no mixture", without
        return
    if source != MIX:
        yield (f'data.source is "{source}" beside the mixture [data.mix]', 'set data.source = "mix"')
    if path is not None:
        yield f"data.path is {path} beside the mixture [data.mix]", "give each source's path, data.mix.NAME.path"
    if not mix:
        yield "[data.mix] has no source", "give some as [data.mix.NAME] with path and weight"
    rising = all(a < b for a, b in zip((0.0, *phases), phases, strict=False)) and all(map(math.isfinite, phases))
    if not rising:
        hint = "a phase begins after so many tokens, for example data.phases = [30e9, 40e9]"
        yield f"data.phases is {_listed(phases)}, but its numbers of tokens must be above 0 and rise", hint
    elif phases and phases[-1] > MOST_TOKENS:
        yield f"data.phases is {_listed(phases)}, but a run has at most 2^63 - 1 tokens", "begin its phases earlier"
    faults = [fault for name, one in mix.items() for fault in _source_faults(name, one, len(phases) + 1)]
    yield from faults
    if mix and not faults:
        weights = [one.weights(len(phases) + 1) for one in mix.values()]
        for phase in range(len(phases) + 1):
            if not any(weight[phase] for weight in weights):
                yield f"every source's weight is 0 in phase {phase + 1}", "give one of them a weight above 0 there"


def _source_faults(name: str, one: MixedSource, phases: int) -> Iterator[tuple[str, str]]:
    key = f"data.mix.{name}"
    if not _NAME.fullmatch(name):
        yield (
            f"a source of the mixture is called {name!r}",
            "use letters and digits, and after the first character also _ and -",
        )
    if not one.path:
        yield f"{key} names no file", f"make one with hpc-gpt data, then set {key}.path"
    weight = one.weight
    if weight is None:
        yield f"{key} has no weight", f"set {key}.weight, its share of the tokens relative to the others'"
    elif not isinstance(weight, tuple):
        if not (math.isfinite(weight) and weight > 0):
            yield f"{key}.weight is {weight:g}, but must be a number above 0", "leave the source out to read none of it"
    elif len(weight) != phases:
        yield (
            f"{key}.weight has {counted(len(weight), 'weight')}, but data.phases makes {counted(phases, 'phase')}",
            "give a weight for each phase: one more than data.phases has",
        )
    elif not all(math.isfinite(part) and part >= 0 for part in weight) or not any(weight):
        hint = "0 reads none of the source in that phase; leave it out to read none at all"
        yield f"{key}.weight is {_listed(weight)}, but must be numbers of at least 0, one of them above 0", hint


def _listed(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"
