"""Parameters from the shape, against counts that are known, and why a program's own count differs."""

import json
from pathlib import Path

import pytest

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.shape_split import params_of_stages
from hpc_gpt.reader.lines.part import Fact, Part, Place
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.facts import facts_of
from hpc_gpt.reader.runs.params import add_params
from hpc_gpt.reader.runs.rules import Known


def draft(engine="megatron-lm", **sizes):
    found = Draft()
    given = {"hidden": 8192, "layers": 64, "heads": 32, "vocab": 50688, "seq": 1024, "engine": engine, **sizes}
    for name, value in given.items():
        found.set(name, value, "a.log:1")
    return found


def settled(found, arguments=None, printed=(), ranks=None):
    part = Part("a.log")
    part.facts["params"] = [Fact(value, Place("a.log", 9), "megatron") for value in printed]
    part.rank_params = {rank: (value, Place("a.log", 7)) for rank, value in (ranks or {}).items()}
    add_params(Known(found, arguments or {}, facts_of([part])))
    return found


TRUE = 51_970_064_384


def said_params(given):
    """The parameters and how they are known, what a token uses, why that is not known, and what is flagged."""
    counted, ranks, arguments = (given.get(name) for name in ("printed", "ranks", "arguments"))
    sizes = {name: value for name, value in given.items() if name not in ("printed", "ranks", "arguments")}
    counts = {f"0, {number}": count for number, count in enumerate(ranks or ())}
    found = settled(draft(**sizes), arguments, () if counted is None else [counted], counts)
    how = found.sources.get("params", "").replace("inferred: from the shape ", "")
    active = ", ".join(f"{name} {value:.0f}" for name, value in (found.get("active") or {}).items())
    return "; ".join(map(str, (found.get("params"), how, active, found.sources.get("active"), *found.flags)))


def test_counts_and_shapes_of_a_model():
    """Of 64 layers of width 8192 unless a line says otherwise."""
    lines = Path(__file__).with_name("param_counts.txt").read_text().splitlines()
    given = [line.partition(" -> ")[0] for line in lines]
    assert [f"{each} -> {said_params(json.loads(each))}" for each in given] == lines


def test_ranks_hold_the_embedding_twice_and_norms_tp_times():
    shape = ModelShape(8192, 64, 32, 50688, 1024, vocab_multiple=1)
    stages = params_of_stages(shape, [4] * 16)
    # A rank's own: a quarter of what is split, all of what is not.
    norms = [
        4 * 6 * 8192 + (1024 * 8192 if stage == 0 else 0) + (2 * 8192 if stage == 15 else 0) for stage in range(16)
    ]
    each = {f"{tp}, {pp}": (stages[pp] - norms[pp]) / 4 + norms[pp] for tp in range(4) for pp in range(16)}
    # log-formats.md and the real log: 805,560,320 in the middle.
    assert each["2, 1"] == 805_560_320
    found = settled(draft(tp=4, pp=16), ranks=each)
    assert (found.get("params"), found.flags) == (TRUE, [])
    assert found.get("params_printed") == sum(each.values())


def test_an_exact_count_of_the_whole_model_goes_before_the_shape():
    """Qwen2.5-0.5B in Megatron: QKV biases that the arguments do not tell of. 8 GPUs, tp = pp = 1."""
    found = settled(draft(hidden=896, layers=24, heads=14, vocab=151936, tp=1, pp=1), ranks={"0, 0": 494_032_768})
    assert found.get("params") == 494_032_768
    assert "the program's own count; the shape gives" in found.sources["params"]
    # Several ranks of a pipeline have each a part, and a rounded count is no better than the shape.
    assert settled(draft(tp=2, pp=1), ranks={"0, 0": 494_032_768}).get("params") == TRUE
    assert settled(draft(), printed=[52.3e9]).get("params") == TRUE


def test_a_count_below_the_embedding_is_of_one_shard():
    """transformers under FSDP counts the 8,030,261,248 parameters of Llama 3 8B on each of 8 ranks as an eighth."""
    sizes = {"hidden": 4096, "vocab": 128256, "layers": None}
    assert settled(draft("hf", **sizes), printed=[501_891_328]).get("params") is None
    assert settled(draft("hf", **sizes), printed=[8_030_261_248]).get("params") == 8_030_261_248


@pytest.mark.parametrize(
    ("sizes", "params"), [({"tp": 1, "pp": 1}, 69_000_000_000), ({"tp": 2}, None), ({"pp": 4}, None)]
)
def test_a_count_of_a_ranks_share_is_not_the_models(sizes, params):
    """Lightning's summary under Megatron's strategies: training_results_v5.1, llama2_70b_lora with tp 2 and 1."""
    found = Draft()
    for name, value in sizes.items():
        found.set(name, value, "a.log:1")
    part = Part("a.log")
    part.facts["params_of_rank"] = [Fact(69e9, Place("a.log", 9), "lightning")]
    add_params(Known(found, {}, facts_of([part])))
    assert found.get("params") == params
