"""What the logs of a run state of each field: the value, who states it, and where. Nothing after this module looks into
a part for a value that is a fact.

The program's own lines decide, then its arguments, then a library's dump of its configuration, which has the batch of
one moment only, and then what its lines of steps count. A batch that grew is the exception: the last steps decide.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.devices import device_named
from hpc_gpt.reader.lines.arguments import dtype_named
from hpc_gpt.reader.lines.dialects import dialects_by_name
from hpc_gpt.reader.lines.fields import MARKS, TEXT_FIELDS
from hpc_gpt.reader.lines.growing_parts import MAX_VALUES
from hpc_gpt.reader.lines.part import Fact, Part
from hpc_gpt.reader.lines.pattern import Dialect
from hpc_gpt.reader.lines.steps import StepColumn
from hpc_gpt.reader.programs.generic import DIFFUSION
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.log_steps import LogSteps

# Who states a value; the highest decides. GROWN: what the last steps consume, above every stated batch. USUAL: what
# most steps consume, below it.
USUAL, GROWN, SAID, ASKED, LIBRARY, MEASURED = 5, 4, 3, 2, 1, 0
LIBRARIES = frozenset(("deepspeed_config",))
_WORDS = {SAID: "the log says", ASKED: "the arguments ask for", LIBRARY: "DeepSpeed's configuration says"}
# {field whose different values a flag reports: its name in the flag}.
_COMPARED = {
    "gpus": "GPUs",
    "nodes": "nodes",
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "cp": "cp",
    "micro_batch": "the micro-batch",
    "micro_batches": "micro_batches",
    "global_batch": "the global batch",
    "seq": "the sequence length",
    "hidden": "the hidden size",
    "layers": "layers",
    "heads": "heads",
    "zero_stage": "the ZeRO stage",
    "dtype": "the dtype",
}
# What belongs to the text encoder in the log of a diffusion model.
OF_TEXT = ("seq", "hidden", "layers", "heads", "vocab", "global_batch_tokens", "tokens_per_s", "tokens_per_s_gpu")
_LARGEST = 10**18  # no size or count of a training is larger
_MOST_GPUS = 64  # a larger world size may count something else
_LEAST_ALIKE = 3  # lines that are needed to show a batch that nothing states


@dataclass(frozen=True, slots=True)
class Stated:
    """A value, who states it (SAID, ASKED, LIBRARY, MEASURED, GROWN), and where (`file:line`)."""

    value: Any
    who: int
    where: str


@dataclass
class Facts:
    """`of`: the statements of each field, those of the last attempt first. `rank_params`: parameters by the rank's name
    in the log."""

    of: dict[str, list[Stated]] = field(default_factory=dict)
    rank_params: dict[str, Stated] = field(default_factory=dict)

    def add(self, name: str, value: Any, who: int, where: str) -> None:
        """Adds a statement, unless the same speaker has stated the same value before."""
        statements = self.of.setdefault(name, [])
        if all(other.value != value or other.who != who for other in statements):
            statements.append(Stated(value, who, where))

    def best(self, name: str) -> Stated | None:
        """The statement that decides, with its value in the type of the field; None without a possible one."""
        usable = _usable_of(name, self.of.get(name, ()))
        best = max(usable, key=lambda statement: statement.who, default=None)
        is_batch = best is not None and name == "global_batch" and best.who <= SAID
        return (_end_of_ramp(usable) if is_batch else None) or best

    def whole(self, name: str) -> int | None:
        """The size or count that is stated, at least 1; None without one."""
        best = self.best(name) if name in self.of else None
        return best.value if best is not None and isinstance(best.value, int) and best.value > 0 else None

    def figures(self, name: str) -> list[Stated]:
        """The statements of a field that are numbers."""
        return [each for each in self.of.get(name, ()) if isinstance(each.value, int | float)]

    def draft(self, *apart: str) -> Draft:
        """The draft with what decides for each field except those of `apart`, and a flag for each impossible value and
        each pair of values that differ."""
        draft = Draft()
        for name, statements in self.of.items():
            for each in statements:
                is_unset = each.value == -1 and name not in _COMPARED  # as programs say it
                if _usable(name, each.value) is None and not is_unset:
                    message = f"{_COMPARED.get(name, name)} cannot be {str(each.value)[:40]} ({each.where}): left out"
                    draft.flag(message, "value")
            if (best := self.best(name)) is None:
                continue
            if name in _COMPARED:
                _compare(draft, name, best, _usable_of(name, statements))
            if name not in apart:
                draft.set(name, best.value, best.where)
        if DIFFUSION in self.of:
            draft.flag("the log trains a diffusion model: its steps have no text tokens")
        return draft


def facts_of(parts: Sequence[Part]) -> Facts:
    """What the parts of a run state, the last attempt first."""
    facts = Facts()
    for part in parts:
        for name, of_name in _facts_of(part):
            for fact in of_name:
                facts.add(name, fact.value, LIBRARY if fact.dialect in LIBRARIES else SAID, str(fact.place))
    for part in parts:
        for name, asked in asked_at(part).items():
            facts.add(name, asked.value, asked.who, asked.where)
        for rank, (value, place) in part.rank_params.items():
            facts.rank_params.setdefault(rank, Stated(value, SAID, str(place)))
    _add_gpus(facts, parts)
    if "fp8_products" in facts.of:
        facts.of["dtype"] = [Stated("fp8", SAID, facts.of["fp8_products"][0].where)]
    for name in OF_TEXT if DIFFUSION in facts.of else ():
        facts.of.pop(name, None)
    return facts


def dialects_of(part: Part) -> list[Dialect]:
    """The dialects with lines in a part, most lines first."""
    names = sorted(part.dialects, key=lambda name: -part.dialects[name])
    return [dialects_by_name()[name] for name in names if name in dialects_by_name()]


def _asked(part: Part) -> dict[str, Any]:
    """The fields that follow from a part's dump of arguments; of two dialects the one with most lines decides."""
    texts = {key: text for key, (text, _) in part.arguments.items()}
    asked: dict[str, Any] = {}
    for dialect in dialects_of(part) if texts else ():
        fields = dialect.interpret(texts) if dialect.interpret is not None else {}
        asked |= {name: value for name, value in fields.items() if name not in asked}
    return asked


def asked_at(part: Part) -> dict[str, Stated]:
    """The fields that follow from a part's dump of arguments, each with the first line of the dump."""
    line = min((place.line for _, place in part.arguments.values()), default=0)
    return {name: Stated(value, ASKED, f"{part.file}:{line} (arguments)") for name, value in _asked(part).items()}


# Facts of lines that say that a batch changed: {fact: (the field that changed, a field that follows from it)}. The
# other sizes of the batch stay unless they are stated again.
CHANGES = {
    "device_batch_now": ("micro_batch", "global_batch"),
    "micro_batch_now": ("micro_batch", "micro_batches"),
    "global_batch_now": ("global_batch", "micro_batches"),
}
_OF_A_START = ("micro_batch", "micro_batches", "global_batch", "global_batch_tokens", "steps_planned")


def _facts_of(part: Part) -> Iterator[tuple[str, Sequence[Fact]]]:
    """Yields (name, facts) of a part. If a line says that the batch changed, only later facts of the batch are used.

    A program that states another micro-batch than before has begun again, like a Trainer that ran out of memory.
    """
    changes = [(fact.place.line, *CHANGES[name], fact) for name in CHANGES for fact in part.facts.get(name, ())]
    begun: dict[str, Fact] = {}
    for fact in part.facts.get("micro_batch", ()):
        if begun.setdefault(fact.dialect, fact).value != fact.value:
            changes.append((fact.place.line - 1, *CHANGES["device_batch_now"], fact))
    if not changes:
        yield from part.facts.items()
        return
    line, changed, follows, change = max(changes, key=lambda entry: entry[0])
    for name in dict.fromkeys([*part.facts, changed]):
        facts = part.facts.get(name, [])
        facts_after = [fact for fact in facts if fact.place.line > line] if name in _OF_A_START else facts
        facts_before = [] if name == follows else facts
        if name not in CHANGES and (used := facts_after or ([change] if name == changed else facts_before)):
            yield name, used


def _usable_of(name: str, statements: Sequence[Stated]) -> list[Stated]:
    """The statements with a possible value, in the type of the field."""
    typed = [(each, _usable(name, each.value)) for each in statements]
    return [each if value is each.value else replace(each, value=value) for each, value in typed if value is not None]


def _usable(name: str, value: Any) -> Any:
    """The value in the type of its field; None for an impossible size."""
    if name in TEXT_FIELDS or isinstance(value, str):
        text = hide_secrets(" ".join(str(value).split()))[:200]
        return _NAMES[name](text) if name in _NAMES and text else text or None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, bool) else None
    if not abs(value) <= _LARGEST:
        return None
    if value < 0 and not name.startswith("loss"):
        return None
    if name in _COMPARED and (value != int(value) or (value == 0 and name != "zero_stage")):
        return None
    return int(value) if value == int(value) else value


# {field: the record's name for a value as programs write it}
_NAMES: dict[str, Callable[[str], str]] = {
    "dtype": lambda text: dtype_named(text) or text.lower().replace("torch.", "").strip(),
    "device": lambda text: device_named(text) or text,
}


def _end_of_ramp(usable: Sequence[Stated]) -> Stated | None:
    """The largest batch of the last attempt, whose values come first, if its batch grew (`--rampup-batch-size`)."""
    said = [each for each in usable if each.who == SAID]
    until = next((index for index, (one, two) in enumerate(pairwise(said), 1) if two.value < one.value), len(said))
    if until < 2:
        return None
    return replace(said[until - 1], where=f"{said[until - 1].where}, the largest of {len(said)}")


def _compare(draft: Draft, name: str, best: Stated, usable: Sequence[Stated]) -> None:
    """Flags a batch that grew, or the first other value of a field that a speaker states."""
    stated = [each for each in usable if each.who in _WORDS]
    if name == "global_batch" and (end := _end_of_ramp(stated)) is not None:
        least, where = min(each.value for each in stated if each.who == SAID), end.where.split(", ")[0]
        draft.flag(f"the global batch grew during the run, from {least} to {end.value} ({where})")
        first: Stated | None = end
    else:
        first = max(stated, key=lambda each: each.who, default=None)
        other = next((each for each in stated if first is not None and each.value != first.value), None)
        if first is not None and other is not None:
            joint = "and" if other.who == first.who else f"but {_WORDS[other.who]}"
            what = f"{_WORDS[first.who]} {_COMPARED[name]} {first.value} ({first.where})"
            draft.flag(f"{what}, {joint} {other.value} ({other.where})")
    if best.who in (GROWN, USUAL) and first is not None:
        steps = "the last steps consume" if best.who == GROWN else "most steps consume"
        stretch = f" ({best.where.removeprefix('inferred: ')})" if best.who == USUAL else ""
        draft.flag(f"the batch was {first.value} ({first.where}), but {steps} {best.value}{stretch}")


def add_measured(facts: Facts, steps: LogSteps) -> None:
    """Adds what the lines of steps count: tokens a sample, and samples and tokens a step, where all lines agree.

    The samples of the last steps are GROWN if they are more than the stated batch, such as the first one of a ramp.
    """
    ratio = _consumed(steps, "consumed_tokens", "consumed_samples")
    if _is_one_size(ratio) and DIFFUSION not in facts.of:
        source = f"inferred: consumed_tokens / consumed_samples, the same over {len(ratio)} lines"
        facts.add("seq", int(ratio[0]), MEASURED, source)
    if not steps.numbered:
        return
    tokens, samples = (_consumed(steps, name, "step") for name in ("consumed_tokens", "consumed_samples"))
    if len(tokens) >= _LEAST_ALIKE and _is_one_size(tokens) and DIFFUSION not in facts.of:
        source = f"inferred: consumed_tokens / steps, the same over {len(tokens)} lines"
        facts.add("global_batch_tokens", int(tokens[0]), MEASURED, source)
    if stated := facts.whole("global_batch"):
        last = samples[-max(_LEAST_ALIKE, len(samples) // 3) :]
        if len(last) >= _LEAST_ALIKE and last[0] > stated and _is_one_size(last):
            source = f"inferred: consumed_samples / steps, over the last {len(last)} lines"
            facts.add("global_batch", int(last[0]), GROWN, source)
        _add_usual_batch(facts, steps, stated)
    elif _is_one_size(samples):
        source = f"inferred: consumed_samples / steps, the same over {len(samples)} lines"
        facts.add("global_batch", int(samples[0]), MEASURED, source)
    elif len(samples):
        _add_usual_batch(facts, steps, int(samples.max()))


def _add_usual_batch(facts: Facts, steps: LogSteps, stated: int) -> None:
    """Adds the batch of most lines if it is below the stated one, such as the first one of an adaptive batch."""
    samples = _consumed(steps, "consumed_samples", "step")
    sizes, counts = np.unique(samples, return_counts=True)
    if not len(sizes) or _end_of_ramp(_usable_of("global_batch", facts.of.get("global_batch", ()))) is not None:
        return
    usual, count = float(sizes[counts.argmax()]), int(counts.max())
    if count > len(samples) / 2 and count >= _LEAST_ALIKE and 1 <= usual < stated and usual.is_integer():
        places = 1 + np.flatnonzero(samples == usual)
        stretch = f"{count:,} of {len(samples):,} lines, from {steps.place(int(places[0]))} to {steps.line[places[-1]]}"
        facts.add("global_batch", int(usual), USUAL, f"inferred: consumed_samples / steps, in {stretch}")


def _consumed(steps: LogSteps, name: str, over: str) -> StepColumn:
    """What is consumed between two lines, divided by the difference in `over`; empty if a line lacks one of them."""
    if name not in steps or over not in steps:
        return np.zeros(0)
    consumed, apart = np.diff(steps[name]), np.diff(steps[over])
    with np.errstate(all="ignore"):
        ratio = (consumed / apart)[apart > 0]
    return ratio if np.isfinite(ratio).all() else ratio[:0]


def _is_one_size(sizes: StepColumn) -> bool:
    return bool(len(sizes) and sizes[0] >= 1 and sizes[0] % 1 == 0 and (sizes == sizes[0]).all())


def _add_gpus(facts: Facts, parts: Sequence[Part]) -> None:
    """Adds the number of GPUs that ranks show: those that print their start, else what printed world sizes, the labels
    of ranks and the table of an only node's GPUs agree on."""
    # Ranks are counted first, as a platform does not fix the GPUs of a node: a GB200 node has 4 or 8.
    begun = {part.starts.get("mlperf", 0) for part in parts} - {0}
    if len(begun) == 1 and (count := max(begun)) > 1:
        facts.add("gpus", count, MEASURED, f"inferred: {count} ranks print init_start")
        return
    nodes = facts.whole("nodes")
    if nodes and facts.whole("gpus_per_node"):
        return
    world_sizes = [fact for fact in facts.figures("gpus_said") if "gpus_unused" not in facts.of]
    counts = [
        (int(fact.value), f"{fact.where}, the world size") for fact in world_sizes if 0 < fact.value <= _MOST_GPUS
    ]
    said = {int(fact.value) for fact in facts.figures("rank_said")}
    # Of many ranks eight are stored, the last one among them.
    if len(said) > 1 and (said == {*range(len(said))} or (len(said) >= MAX_VALUES and 0 in said)):
        counts.append((max(said) + 1, f"ranks 0 to {max(said)} print that they train together"))
    ranks: dict[int, bool] = {}
    for part in parts:
        ranks |= part.other_ranks
        if part.other_ranks and part.step_rank is not None:
            ranks.setdefault(part.step_rank, True)
    if len(ranks) > 1 and len(ranks) == max(ranks) + 1 and all(ranks.values()):
        counts.append((len(ranks), f"ranks 0 to {max(ranks)} print lines of steps"))
    listed = {fact.value for fact in facts.of.get("gpu_index", ())}
    if nodes == 1 and listed == set(range(len(listed))) != set() and "gpu_index_above_7" not in facts.of:
        counts.append((len(listed), "the only node's table of GPUs"))
    # Only if all counts agree.
    if len({count for count, _ in counts}) == 1:
        facts.add("gpus", counts[0][0], MEASURED, f"inferred: {counts[0][1]}")


Marks = Mapping[str, frozenset[Any]]


def marks(part: Part) -> Marks:
    """The marks that tell runs apart: layout, shape and batch, as far as the part states them."""
    arguments = _asked(part)
    values_of = {name: {fact.value for fact in part.facts.get(name, ())} for name in MARKS}
    for name in values_of.keys() & arguments.keys():
        values_of[name].add(arguments[name])
    return _shared(tuple((name, frozenset(values)) for name, values in values_of.items() if values))


@lru_cache(4096)
def _shared(marks: tuple[tuple[str, frozenset[Any]], ...]) -> Marks:
    """The marks as one shared object for equal ones: many runs of a folder have the same."""
    return dict(marks)


def contradict(one: Marks, other: Marks) -> bool:
    """Whether the marks of two parts show that they belong to different runs."""
    return any(not one[name] & other[name] for name in one.keys() & other.keys())


def united(one: Marks, other: Marks) -> Marks:
    """The marks of two parts that do not contradict each other."""
    return {**other, **{name: values & other.get(name, values) for name, values in one.items()}}
