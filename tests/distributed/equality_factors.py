"""The factors of the equality table; for each engine, few cases that hold each pair of their values that can run.

Nothing here says what goes together: `resolve` does, as it does for a user. What it accepts must train.

python -m tests.distributed.equality_factors      writes pairwise.json, after a change of the factors or of the rules
"""

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from tests.distributed.equality_cases import CLIP, LAYERS, Case

Combination = dict[str, Any]  # a value of each factor, and the engine
Value = tuple[str, Any]
Pair = frozenset[Value]

ENGINES = tuple(name for name, facts in engines().items() if not facts.is_program)
# The plainest value first.
FACTORS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2),
    "cp": (1, 2),
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer", "full"),
    "recompute": ("none", "selective", "full"),
    "compile": ("none", "block", "edges", "whole"),
    "sharded_optimizer": (False, True),
    "sequence_parallel": (False, True),
    "cp_exchange": ("heads", "keys"),
    "partition": ("layers", "parameters", (1, LAYERS - 1)),
    "attention": ("auto", "math"),
    "tiles": (1, 2),
    "activation_offload": (False, True),
    "loss_chunks": (1, 3),  # of unequal length
    "one_pass_loss": (False, True),
    "prefetch": (True, False),
    "reshard": (True, False),
    "gather_blocks": (None, 2),
    "optimizer": ("adamw", "sgd"),
    "optimizer_mode": (None, "fused", "foreach", "for-loop"),
    "micro_batches": (2, 1, 8),
    "clip": (0.0, CLIP),
    "tied": (True, False),
    "model": ("gpt2", "llama", "qwen3", "uneven"),
    "documents": (False, True),
    "pad": (False, True),
}
PLAINEST = {name: values[0] for name, values in FACTORS.items()}
VALUES = [(name, value) for name, values in FACTORS.items() for value in values]
# Those on which most refusals hang: their whole product is tried in search of a combination that holds a pair.
_LEADING = ("tp", "pp", "dp", "cp", "zero_stage")
_SWITCHES = [entry.name for entry in fields(Engine) if entry.name in FACTORS]
_SEED, _TRIES = 1, 40
_FILE = Path(__file__).with_name("pairwise.json")


def case_of(combination: Combination) -> Case:
    """The case; compiled graphs run through torch's own kernels, which need no compiler."""
    given = dict(combination)
    switches = {name: given.pop(name) for name in _SWITCHES}
    if switches["compile"] != "none":
        switches["compile_backend"] = "aot_eager"
    engine = Engine(name=given.pop("engine"), **switches)
    return Case(Layout(*(given.pop(axis) for axis in ("tp", "pp", "dp", "cp"))), engine, **given)


def combination_of(case: Case) -> Combination:
    """The combination whose case this is."""
    tables = (case, case.layout, case.resolved.engine)
    found = {name: getattr(table, name) for table in tables for name in FACTORS if hasattr(table, name)}
    return {"engine": case.engine.name} | {name: found[name] for name in FACTORS}


@cache
def _refusal(engine: str, values: tuple[Any, ...]) -> str | None:
    try:
        _ = case_of({"engine": engine, **dict(zip(FACTORS, values, strict=True))}).resolved
    except (ConfigError, LayoutError) as fault:
        return str(fault)
    return None


def refused(combination: Combination) -> str | None:
    """The refusal that a user gets who asks for the combination; None if it runs."""
    return _refusal(combination["engine"], tuple(combination[name] for name in FACTORS))


def pairs_of(combination: Combination) -> set[Pair]:
    """Every pair of values of the combination."""
    values = [(name, combination[name]) for name in FACTORS]
    return {frozenset(pair) for pair in itertools.combinations(values, 2)}


def _starts(engine: str) -> list[Combination]:
    """Every layout and stage of an engine, otherwise plain, the cheapest first."""
    product = itertools.product(*(FACTORS[name] for name in _LEADING))
    every = ({"engine": engine} | PLAINEST | dict(zip(_LEADING, values, strict=True)) for values in product)
    return sorted((one for one in every if refused(one) is None), key=_cost)


@cache
def judged(engine: str) -> tuple[dict[Pair, Combination], dict[Pair, str]]:
    """(pairs of values that the engine can run, each with a combination that holds it; the others, each with a reason).

    Looks among the combinations that are plain but for the leading factors, the pair, and at most one value more.
    """
    starts = _starts(engine)
    alone = {value: _find(starts, value) for value in VALUES}
    legal: dict[Pair, Combination] = {}
    illegal: dict[Pair, str] = {}
    for one, other in itertools.combinations(VALUES, 2):
        pair = frozenset((one, other))
        if one[0] == other[0] or pair in legal:
            continue
        first, second = alone[one], alone[other]
        found = None if first is None or second is None else _find(starts, one, other)
        if found is not None:
            legal |= {held: found for held in pairs_of(found) if held not in legal}
            continue
        # What is said where one of the two runs and the other is added; the fewer words, the nearer the reason.
        plain = {"engine": engine} | PLAINEST
        near = ((first or plain) | dict([other]), (second or plain) | dict([one]))
        illegal[pair] = min(filter(None, map(refused, near)), key=len, default="no combination holds it")
    return legal, illegal


def _find(starts: list[Combination], *values: Value) -> Combination | None:
    """A combination that holds the values and is not refused, the plainest and cheapest first."""
    fixed = dict(values)
    laid = [start | fixed for start in starts if all(start[name] == fixed.get(name, start[name]) for name in _LEADING)]
    further = [(name, value) for name, value in VALUES if name not in fixed and name not in _LEADING]
    moved = (start | {name: value} for start in laid for name, value in further)
    return next((one for one in itertools.chain(laid, moved) if refused(one) is None), None)


def cover(engine: str) -> list[Combination]:
    """Combinations that hold every pair of values that the engine can run; the same each time."""
    draw, missing = random.Random(_SEED), dict.fromkeys(judged(engine)[0])
    found: list[Combination] = []
    while missing:
        starts = [judged(engine)[0][pair] for pair in draw.sample(list(missing), min(_TRIES, len(missing)))]
        best = max((_grow(start, missing, draw) for start in starts), key=lambda one: _worth(one, missing))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        found.append(best)
    return found


def _grow(start: Combination, missing: Mapping[Pair, None], draw: random.Random) -> Combination:
    """The combination that changes of one value at a time lead to, each for more worth."""
    names = list(FACTORS)
    best, worth = start, _worth(start, missing)
    for _ in range(2):
        draw.shuffle(names)
        for name in names:
            for value in FACTORS[name]:
                other = best | {name: value}
                more = _worth(other, missing)
                if more > worth and refused(other) is None:
                    best, worth = other, more
    return best


def _worth(combination: Combination, missing: Mapping[Pair, None]) -> float:
    """The pairs that no other case holds yet, over the cost."""
    return sum(pair in missing for pair in pairs_of(combination)) / _cost(combination)


def _cost(combination: Combination) -> float:
    """CPU seconds of a case, about, and as many again that keep the cases few."""
    ranks = combination["tp"] * combination["pp"] * combination["cp"] * combination["dp"]
    return 6.0 + ranks * (2.5 if combination["compile"] == "none" else 6.0)


def _read() -> list[Case]:
    kept = json.loads(_FILE.read_text(encoding="utf-8"))
    values = [{name: tuple(value) if isinstance(value, list) else value for name, value in one.items()} for one in kept]
    return [case_of(PLAINEST | one) for one in values]


# What is not plainest in each case is kept: to find them takes a minute.
COVER = _read()


def with_each_value(able: list[Case]) -> list[Case]:
    """Few of the cases, which have each value of each factor that any of them has with its engine."""
    values = {case: {(case.engine.name, *map(str, value)) for value in combination_of(case).items()} for case in able}
    wanted: set[tuple[str, ...]] = set().union(*values.values())
    found = []
    while wanted:
        best = max(able, key=lambda case: len(values[case] & wanted) / (1 + case.layout.gpus))
        wanted -= values[best]
        found.append(best)
    return found


if __name__ == "__main__":
    drawn = [
        {name: value for name, value in one.items() if name == "engine" or value != PLAINEST[name]}
        for engine in ENGINES
        for one in cover(engine)
    ]
    _FILE.write_text("[\n" + ",\n".join(f"  {json.dumps(one)}" for one in drawn) + "\n]\n", encoding="utf-8")
