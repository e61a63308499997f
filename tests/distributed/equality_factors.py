"""The factors of the equality table and their values; the cases that hold every pair, and every engine in every layout.

Nothing here says what goes together: `resolve` does, as it does for a user. What it accepts must train.

python -m tests.distributed.equality_factors      writes pairwise.json, after a change of the factors or of the rules
"""

import json
import random
from dataclasses import fields
from functools import cache
from pathlib import Path

from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from tests.distributed.all_pairs import Combination, Pair, Space, cover, judge_pairs
from tests.distributed.equality_cases import CLIP, CONTEXT, LAYERS, NAMED, Case

ENGINES = tuple(name for name, facts in engines().items() if not facts.is_program)

# The plainest value first.
FACTORS = {
    "engine": ENGINES,
    "tp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2, 4),
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
    "loss_chunks": (1, 2),
    "one_pass_loss": (False, True),
    "fused_bias_gradients": (False, True),
    "prefetch": (True, False),
    "reshard": (True, False),
    "optimizer": ("adamw", "sgd"),
    "optimizer_mode": (None, "fused", "foreach", "for-loop"),
    "micro_batches": (2, 1, 8),
    "clip": (0.0, CLIP),
    "tied": (True, False),
    "model": ("gpt2", "llama", "qwen3"),
    "pad": (False, True),
}
# Those whose whole product is tried: every engine in every layout. The others are drawn in it.
_LEADING = ("engine", "tp", "pp", "dp", "zero_stage")
_SWITCHES = [entry.name for entry in fields(Engine) if entry.name in FACTORS]
SEED = 1


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
    return {name: found[name] for name in FACTORS} | {"engine": case.engine.name}


def refusal(combination: Combination) -> str | None:
    """What a user is told of the combination, who asks for it."""
    try:
        _ = case_of(combination).resolved
    except (ConfigError, LayoutError) as fault:
        return str(fault)
    return None


def cost(combination: Combination) -> float:
    """Seconds of a case, about, where ranks share two cores, and as many again that keep the cases few."""
    ranks = combination["tp"] * combination["pp"] * combination["cp"] * combination["dp"]
    return 13.0 + (0.3 + 0.2 * ranks if combination["compile"] == "none" else 2.0 + 2.0 * ranks)


SPACE = Space(FACTORS, _LEADING, refusal, cost)
# What is not plainest in each case: to find them takes seconds, which every process that collects the tests would pay.
_FILE = Path(__file__).with_name("pairwise.json")


def _read_pairwise() -> list[Case]:
    kept = json.loads(_FILE.read_text(encoding="utf-8"))
    values = [{name: tuple(value) if isinstance(value, list) else value for name, value in one.items()} for one in kept]
    return [case_of(SPACE.plainest | one) for one in values]


PAIRWISE = _read_pairwise()


def with_each_value(able: list[Case]) -> list[Case]:
    """Few of the cases, which have each value of each factor that any of them has."""
    values = {case: set(map(str, combination_of(case).items())) for case in able}
    wanted: set[str] = set().union(*values.values())
    found = []
    while wanted:
        best = max(able, key=lambda case: (len(values[case] & wanted), -case.layout.gpus))
        wanted -= values[best]
        found.append(best)
    return found


@cache
def judged() -> tuple[dict[Pair, Combination], dict[Pair, str]]:
    """Every pair of values that can run, with a combination, and every other, with the reason."""
    return judge_pairs(SPACE)


def draw_pairwise() -> list[Combination]:
    """The combinations of PAIRWISE, as they are drawn."""
    return cover(SPACE, judged()[0], map(combination_of, NAMED + CONTEXT), SEED)


def product() -> list[Case]:
    """Every combination of engine and layout that runs; the other factors' values are drawn, the same each time.

    Compiled edges are left to the pairwise cases: the rest of such a model is compiled as `block` has it.
    """
    draw = random.Random(SEED)
    others = [name for name in FACTORS if name not in (*_LEADING, "cp", "cp_exchange")]
    cases = []
    for combination in SPACE.product(_LEADING, SPACE.plainest):
        for name in draw.sample(others, len(others)):
            moved = combination | {name: draw.choice(SPACE.factors[name])}
            combination = combination if SPACE.refused(moved) else moved
        if combination["compile"] != "edges":
            cases.append(case_of(combination))
    return cases


if __name__ == "__main__":
    plainest = SPACE.plainest
    drawn = [{name: one[name] for name in one if one[name] != plainest[name]} for one in draw_pairwise()]
    _FILE.write_text("[\n" + ",\n".join(f"  {json.dumps(one)}" for one in drawn) + "\n]\n", encoding="utf-8")
