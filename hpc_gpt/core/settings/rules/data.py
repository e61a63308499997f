"""The rules of [data]: its source, and the sources of a mixture with their weights per phase."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hpc_gpt.core.errors import Fault
from hpc_gpt.core.format import counted
from hpc_gpt.core.formulas import MOST_TOKENS
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.data_source import MIX, MixedSource
from hpc_gpt.core.settings.experiment import Data, Experiment

SET_END_TOKEN = "set data.end_token to the number of the token that ends a document"
# {source that needs a path: (the thing that is missing without one, the hint)}
_NEED_PATH = {
    "tokens": ("no file", "make one with hpc-gpt data, then set data.path"),
    "megatron": ("no prefix of .bin and .idx", 'set data.path, to "stdlib" to try it'),
    "stream": ("no text", 'set data.path to a folder of text, or to "stdlib" to try it'),
}
# A source's name is part of dotted keys, and of the tags of its losses.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def with_mix(data: Data) -> Data:
    """[data] with the source of a mixture if it has one, and no other source was requested."""
    return replace(data, source=MIX) if data.mix is not None and data.source == Data.source else data


def data_faults(experiment: Experiment, profile: ClusterProfile) -> Iterator[Fault]:
    """The contradictions in [data], without the bounds of its numbers."""
    data = with_mix(experiment.data)
    without = "give the sources as [data.mix.NAME] with path and weight, or leave it out"
    if data.mix is not None:
        yield from _mixture_faults(data, data.mix)
    elif data.source == MIX:
        yield Fault('data.source is "mix", but there is no [data.mix.NAME]', without)
    if data.mix is None and data.phases:
        yield Fault(f"data.phases is {_listed(data.phases)}, but there is no mixture", without)
    if data.source in _NEED_PATH and not data.path and data.mix is None:
        missing, hint = _NEED_PATH[data.source]
        yield Fault(f'data.source is "{data.source}", but data.path names {missing}', hint)
    if data.begin_token and data.source not in ("stream", "random"):
        yield Fault(
            f'data.begin_token is for text that is tokenised as it is read, but data.source is "{data.source}"',
            "make the file with hpc-gpt data --begin-token, and leave data.begin_token out",
        )
    if data.end_token is not None and not data.mask_documents:
        yield Fault(
            f"data.end_token is {data.end_token}, but data.mask_documents is false, and nothing else reads it",
            "set data.mask_documents = true, or leave data.end_token out",
        )
    kinds = {one.source for one in data.mix.values()} if data.mix else {data.source}
    if data.mask_documents and data.end_token is None and kinds & {"megatron", "random"}:
        what = "random tokens" if "random" in kinds else "Megatron's pairs"
        yield Fault(f"data.mask_documents is true, but {what} do not say which token ends a document", SET_END_TOKEN)


def _mixture_faults(data: Data, mix: Mapping[str, MixedSource]) -> Iterator[Fault]:
    """The contradictions in the keys of a mixture."""
    source, path, phases = data.source, data.path, data.phases
    if source != MIX:
        yield Fault(f'data.source is "{source}" beside the mixture [data.mix]', 'set data.source = "mix"')
    if path is not None:
        yield Fault(f"data.path is {path} beside the mixture [data.mix]", "give each source's path, data.mix.NAME.path")
    if not mix:
        yield Fault("[data.mix] has no source", "give some as [data.mix.NAME] with path and weight")
    rising = all(a < b for a, b in zip((0.0, *phases), phases, strict=False)) and all(map(math.isfinite, phases))
    if not rising:
        hint = "a phase begins after so many tokens, for example data.phases = [30e9, 40e9]"
        yield Fault(f"data.phases is {_listed(phases)}, but its numbers of tokens must be above 0 and rise", hint)
    elif phases and phases[-1] > MOST_TOKENS:
        yield Fault(
            f"data.phases is {_listed(phases)}, but a run has at most 2^63 - 1 tokens", "begin its phases earlier"
        )
    faults = [fault for name, one in mix.items() for fault in _source_faults(name, one, len(phases) + 1)]
    yield from faults
    if mix and not faults:
        weights = [one.weights(len(phases) + 1) for one in mix.values()]
        for phase in range(len(phases) + 1):
            if not any(weight[phase] for weight in weights):
                yield Fault(
                    f"every source's weight is 0 in phase {phase + 1}", "give one of them a weight above 0 there"
                )


def _source_faults(name: str, one: MixedSource, phases: int) -> Iterator[Fault]:
    key = f"data.mix.{name}"
    if not _NAME.fullmatch(name):
        yield Fault(
            f"a source of the mixture is called {name!r}",
            "use letters and digits, and after the first character also _ and -",
        )
    if not one.path:
        yield Fault(f"{key} names no file", f"make one with hpc-gpt data, then set {key}.path")
    weight = one.weight
    if weight is None:
        yield Fault(f"{key} has no weight", f"set {key}.weight, its share of the tokens relative to the others'")
    elif not isinstance(weight, tuple):
        if not (math.isfinite(weight) and weight > 0):
            yield Fault(
                f"{key}.weight is {weight:g}, but must be a number above 0", "leave the source out to read none of it"
            )
    elif len(weight) != phases:
        yield Fault(
            f"{key}.weight has {counted(len(weight), 'weight')}, but data.phases makes {counted(phases, 'phase')}",
            "give a weight for each phase: one more than data.phases has",
        )
    elif not all(math.isfinite(part) and part >= 0 for part in weight) or not any(weight):
        hint = "0 reads none of the source in that phase; leave it out to read none at all"
        yield Fault(f"{key}.weight is {_listed(weight)}, but must be numbers of at least 0, one of them above 0", hint)


def _listed(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"
