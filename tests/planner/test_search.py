"""The search: every candidate runs, what does not fit is not ranked, nothing better was missed; the largest model."""

import functools
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.engines import engine_named, engines
from hpc_gpt.core.errors import LayoutError, UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner import search as module
from hpc_gpt.planner.largest import family, largest
from hpc_gpt.planner.machine import Machine
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.nearest import by_micro_batch
from hpc_gpt.planner.question import NO_GAIN, Question, question_of
from hpc_gpt.planner.search import EQUAL, KEPT, TIGHT, Candidate, candidate_of, fastest_of, ranked, search
from hpc_gpt.planner.step_time import predict_step
from hpc_gpt.planner.training import PLANNED, engine_for, training_of
from tests.cli.command import in_process
from tests.planner.machines import machine_named

ENGINES = tuple(
    name
    for name, facts in engines().items()
    if (facts.trains_our_model or facts.is_program) and not facts.takes_command
)
PROFILE = ClusterProfile("test", device="a100-40g", gpus_per_node=4)


def machine(memory_gib=40.0, host_memory_gib=None):
    return Machine("a100-40g", memory_gib, {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}, 1555, 4, 300, 100, 25,
                   host_memory_gib)  # fmt: skip


def experiment(gpus=8, hidden=1024, layers=6, heads=8, batch=12, dtype="bf16", **engine):
    return Experiment(
        model=Model(hidden=hidden, layers=layers, heads=heads, vocab=50257, seq=1024), engine=Engine(**engine),
        layout=LayoutRequest(gpus=gpus, global_batch=batch), train=Train(dtype=dtype),
    )  # fmt: skip


def with_layout(asked, run):
    """The experiment that runs a candidate."""
    layout = replace(
        asked.layout, tp=run.tp, pp=run.pp, dp=run.dp, micro_batch=run.micro_batch, micro_batches=run.micro_batches,
        global_batch=run.global_batch, shard=run.shard,
    )  # fmt: skip
    return replace(asked, layout=layout, engine=engine_for(run, asked.engine))


BIG = Machine("a100-80g", 79.1, {"bf16": 312.0}, 2039, 8, 300, 100, 25)
GPT3 = Question(ModelShape(12288, 96, 96, 51200, 2048), 1024, 8, "bf16", 1536)
TRILLION = Question(ModelShape(25600, 128, 160, 51200, 2048), 16384, 8, "bf16", 16384)

CASES = [
    (experiment(), ENGINES, 40.0),
    (experiment(), ENGINES, 6.0),
    (experiment(gpus=4, dtype="fp32"), ENGINES, 10.0),
    (experiment(gpus=12, layers=7, batch=12, dtype="fp16"), ENGINES, 8.0),
    (experiment(gpus=2, hidden=768, heads=3, batch=5), ENGINES, 5.0),
    (experiment(gpus=8, partition="parameters", attention="math", tiles=2), ("deepspeed-3d", "deepspeed-zero"), 12.0),
]
NAMES = ["room", "tight", "fp32", "twelve", "odd", "switches"]
# Of which trying everything takes longest; "odd" is as tight.
LARGE = ("room", "tight", "fp32", "twelve")


@pytest.mark.parametrize(("asked", "engines", "gib"), [CASES[1], CASES[-1]], ids=["tight", "switches"])
def test_every_candidate_is_what_the_launcher_would_run(asked, engines, gib):
    found = search(question_of(asked, PROFILE, engines=engines), machine(gib), keep=10**6)
    assert found.candidates
    for candidate in found.candidates:
        resolved = resolve(with_layout(asked, candidate.training), PROFILE)  # which refuses what cannot run
        assert training_of(resolved) == candidate.training


def every_run(asked, engines):
    """All that the launcher accepts of the product of all sizes, each once; the slow way."""
    gpus, batch = asked.layout.gpus, asked.layout.global_batch
    runs = set()
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    flags = (False, True)
    for name, tp, pp in itertools.product(engines, sizes, sizes):
        if gpus % (tp * pp):
            continue
        dp = gpus // (tp * pp)
        kept = {key: getattr(asked.engine, key) for key in ("attention", "partition", "tiles")}
        kept = {key: value for key, value in kept.items() if key in engine_named(name).switches}
        if pp == 1:
            kept.pop("partition", None)
        for stage, way, offload, parallel, sharded in itertools.product(
            engine_named(name).zero_stages, ("none", "selective", "full"), ("none", "optimizer", "full"), flags, flags
        ):
            if stage != 3:
                kept = {key: value for key, value in kept.items() if key != "tiles"}
            elif "tiles" in engine_named(name).switches:
                kept["tiles"] = asked.engine.tiles
            if "compile" in engine_named(name).switches:
                kept["compile"] = "block"  # always faster
            engine = Engine(
                name=name, zero_stage=stage, recompute=way, offload=offload, sequence_parallel=parallel,
                sharded_optimizer=sharded, **kept,
            )  # fmt: skip
            micro_batches = (size for size in range(1, batch + 1) if batch % (size * dp) == 0)
            for micro_batch, shard in itertools.product(micro_batches, {None, PROFILE.gpus_per_node // tp}):
                layout = replace(asked.layout, tp=tp, pp=pp, dp=dp, micro_batch=micro_batch, shard=shard)
                try:
                    runs.add(training_of(resolve(replace(asked, engine=engine, layout=layout), PROFILE)))
                except UserError:
                    continue
    return runs


def first_by_the_rule(candidates):
    """As docs/plan.md says it."""
    by_rank = sorted(candidates, key=lambda each: each.rank)
    fastest = max((each for each in by_rank if each.risks == by_rank[0].risks), key=lambda each: each.tokens_per_s)
    equal = [
        each for each in by_rank if each.risks == fastest.risks and each.tokens_per_s * 1.03 >= fastest.tokens_per_s
    ]

    def drawbacks(each):
        run = each.training
        crowded = round(each.share, 2) if each.share > 0.75 else 0.75
        axes = sum(size > 1 for size in (run.tp, run.pp, run.cp, run.ep))
        moved = ("none", "optimizer", "full").index(run.offload) + run.activations_on_host
        return moved, crowded, round(each.exposed_share, 2), axes, engine_named(run.engine).plan_order

    return min(equal, key=drawbacks).training


@pytest.mark.parametrize(
    ("asked", "engines", "gib"),
    [pytest.param(*case, marks=[pytest.mark.long] * (name in LARGE)) for case, name in zip(CASES, NAMES, strict=True)],
    ids=NAMES,
)
def test_it_finds_what_trying_everything_finds(asked, engines, gib):
    card = machine(gib)
    question = question_of(asked, PROFILE, engines=engines)
    found = search(question, card, keep=10**6)
    # Chunks are no key of an experiment but Megatron's own words; the slow way does not try them.
    runs = {run for run in every_run(asked, engines) if candidate_of(run, card).fits}
    saved = [each for each in found.candidates if each.training.loss_chunks > 1 or each.training.activations_on_host]
    kept = {each.training for each in saved}
    assert {each.training for each in found.candidates if each.training.vp == 1} - kept == runs
    # Memory is saved only where a setting does not fit without.
    assert not {replace(run, loss_chunks=1, activations_on_host=False) for run in kept} & runs
    usual = search(question, card)
    timed = [Candidate(run, predict_memory(run, card), gib, predict_step(run, card)) for run in runs]
    chunked = [each for each in found.candidates if each.training.vp > 1]
    assert usual.best.training == first_by_the_rule([*timed, *chunked, *saved])
    by_layout = {each.layout: [] for each in found.candidates}
    for each in found.candidates:
        by_layout[each.layout].append(each)
    kept = [each for alike in by_layout.values() for each in (*ranked(alike)[:KEPT], fastest_of(ranked(alike)))]
    best = [each.training for each in found.candidates if each in kept]
    assert [each.training for each in usual.candidates] == best


def test_nothing_that_fits_was_left_out_unasked():
    """Every micro-batch of every series, the long way: a larger one never needs less."""
    question = GPT3
    found = search(question, BIG, keep=10**6)
    fitting = {each.training for each in found.candidates}
    series = {replace(run, micro_batch=1, micro_batches=1) for run in fitting}
    for run in series:
        for micro_batch, micro_batches in question.batches(run.dp):
            grown = replace(run, micro_batch=micro_batch, micro_batches=micro_batches)
            assert (grown in fitting) == candidate_of(grown, BIG).fits


@given(
    gpus=st.sampled_from([1, 2, 3, 4, 8, 12, 20]), layers=st.integers(1, 9), heads=st.sampled_from([1, 2, 3, 5, 6, 8]),
    batch=st.integers(1, 60), dtype=st.sampled_from(["fp32", "fp16", "bf16"]), gib=st.floats(1.5, 40),
)  # fmt: skip
@settings(max_examples=30)
def test_every_candidate_runs_whatever_the_model(gpus, layers, heads, batch, dtype, gib):
    asked = experiment(gpus=gpus, layers=layers, heads=heads, hidden=240 * heads, batch=batch, dtype=dtype)
    found = search(question_of(asked, PROFILE, engines=ENGINES), machine(gib))
    for candidate in found.candidates:
        assert training_of(resolve(with_layout(asked, candidate.training), PROFILE)) == candidate.training
        assert (candidate.training.gpus, candidate.training.global_batch) == (gpus, batch)
        assert math.isfinite(candidate.tokens_per_s)


def test_cp_is_tried_wherever_a_rank_keeps_1024_tokens():
    assert [replace(GPT3, shape=GPT3.shape).of(replace(GPT3.shape, seq=seq)).most_cp for seq in (1024, 2048, 8192)] == [
        1,
        2,
        8,
    ]
    shape = preset("llama3.1-405b")
    asked = Question(shape, 1024, 8, "bf16", 512, ("megatron-lm",), traits={"megatron-lm": {"flash": True}})
    h100 = machine_named("h100-80g", 8, "infiniband 8x400G")
    short, found = search(asked, h100), search(asked.of(shape), h100)
    assert short.best.training.recompute == "full"
    assert (found.best.training.recompute, found.best.layout.cp > 1) == ("none", True)
    assert found.best.step.step_s < 0.9 * short.best.step.step_s


@pytest.mark.parametrize("gpus", [32, pytest.param(256, marks=pytest.mark.long)])
def test_a_longer_cp_that_gains_nothing_is_not_searched(gpus, monkeypatch):
    """What is left out would not have been faster by more than a prediction's error."""
    shape = preset("llama3.1-8b")
    asked = Question(shape, gpus, 8, "bf16", 128, ("fsdp", "megatron-lm"), traits={"megatron-lm": {"flash": True}}).of(
        shape
    )
    h100 = machine_named("h100-80g", 8, "infiniband 8x400G")
    found = search(asked, h100)
    monkeypatch.setattr(module, "_gains_nothing", lambda *_: False)
    every = search(asked, h100)
    assert found.left_out[NO_GAIN] > 0
    assert every.memory_predictions > found.memory_predictions
    fastest = [max(each.tokens_per_s * (not each.is_tight) for each in one.candidates) for one in (found, every)]
    assert fastest[1] <= EQUAL * fastest[0]


def test_a_partition_by_hand_is_for_its_own_number_of_stages():
    asked = experiment(gpus=4, layers=6, partition=(1, 2, 2, 1))
    question = question_of(asked, PROFILE, {"engine.partition"})
    found = search(question, machine())
    assert {each.training.stage_layers for each in found.candidates} == {(1, 2, 2, 1)}
    assert {each.training.pp for each in found.candidates} == {4}
    wrong = question_of(replace(asked, engine=Engine(partition=(1, 2, 2, 2))), PROFILE, {"engine.partition"})
    assert not search(wrong, machine()).candidates


def test_tp_spans_nodes_only_where_that_is_asked():
    asked = experiment(gpus=8)
    assert max(each.layout.tp for each in search(question_of(asked, PROFILE), machine(), keep=10**6).candidates) == 4
    across = replace(asked, layout=replace(asked.layout, allow_tp_across_nodes=True))
    found = [each for each in search(question_of(across, PROFILE), machine()).candidates if each.layout.tp == 8]
    assert found
    for each in found:
        assert training_of(resolve(with_layout(across, each.training), PROFILE)) == each.training


def test_every_micro_batch_of_a_layout_has_its_best_settings():
    asked = replace(question_of(experiment(gpus=4, batch=32), PROFILE), fixed={"tp": 2, "pp": 1, "dp": 2})
    found = by_micro_batch(search(asked, machine(2.4)))
    assert [each.training.micro_batch for each in found] == [1, 2, 4, 8, 16]
    assert [each.step is not None for each in found] == [True, True, True, True, False]
    for each in found[:-1]:
        size = each.training.micro_batch
        alone = search(replace(asked, fixed={**asked.fixed, "micro_batch": size}), machine(2.4))
        assert (each.training, each.step) == (alone.candidates[0].training, alone.candidates[0].step)


def test_chunks_are_megatrons_alone_and_of_one_depth():
    asked = experiment(gpus=4, layers=12, batch=16)
    question = question_of(asked, PROFILE, engines=("megatron-lm", "deepspeed-3d"))
    found = [each.training for each in search(question, machine(), keep=10**6).candidates if each.training.vp > 1]
    assert {run.engine for run in found} == {"megatron-lm"}
    assert {(run.pp, run.vp) for run in found} == {(2, 2), (2, 3), (2, 6), (4, 3)}
    assert all(run.micro_batches % run.pp == 0 for run in found)


def test_memory_is_asked_first_and_little_is_kept(monkeypatch):
    question, most, timed = TRILLION, 1500, []
    monkeypatch.setattr(module, "predict_step", lambda *words: timed.append(words[0]) or predict_step(*words))
    found = search(question, BIG)
    assert found.candidates
    assert found.memory_predictions <= most
    assert len(timed) == found.fitting <= found.memory_predictions
    layouts = {each.layout for each in found.candidates}
    assert len(found.candidates) <= KEPT * len(layouts)
    assert len(found.too_large) + len(layouts) <= len(list(question.layouts()))


@pytest.mark.parametrize(("gib", "gpus"), [(40.0, 1), (12.0, 8)])
def test_the_first_is_by_one_rule_for_engines_and_layouts(gib, gpus):
    question = question_of(experiment(gpus), PROFILE, engines=ENGINES)
    found, few = search(question, machine(gib), keep=10**6), search(question, machine(gib))
    # However many are kept, and whoever ranks them anew, each layout has the same first.
    assert [each.training for each in found.best_of_layouts] == [each.training for each in few.best_of_layouts]
    anew = ranked(reversed(found.candidates))
    assert [each.training for each in anew] == [each.training for each in found.candidates]
    assert found.best.training == first_by_the_rule(found.candidates)
    for first in found.best_of_layouts:
        if not first.is_as_fast(found.fastest):
            alike = [each for each in found.candidates if each.layout == first.layout]
            assert first.training == first_by_the_rule(alike)
    if gpus == 1:
        assert found.best.training.engine == "ddp"


@pytest.mark.parametrize(
    ("line", "engine", "passed_over"),
    [
        ("--model mistral-7b --gpus 8 --device a100-80g", "fsdp", ""),
        ("--model llama3.1-8b --gpus 8 --device mi300x", "deepspeed-3d", "deepspeed-zero, 58.1 s, 166.2 GiB"),
        ("--model gpt2 --gpus 8 --seq 128k --device a100-80g", "ddp", ""),
    ],
)
def test_no_engine_takes_most_of_a_card_for_three_percent(line, engine, passed_over):
    found = json.loads(in_process("plan", *line.split(), "--json").stdout)
    best = found["candidates"][0]
    assert best["engine"] == engine
    assert best["memory_gib"] <= 0.75 * found["machine"]["memory_gib"]
    assert best["against_best"] == ("best" if not passed_over else f"best; fastest: {passed_over}")


def test_what_leaves_less_than_two_percent_is_last_however_fast():
    fast = search(question_of(experiment(), PROFILE, engines=ENGINES), machine()).candidates[0]
    card = machine(fast.need_gib / 0.985)
    found = search(question_of(experiment(), PROFILE, engines=ENGINES), card, keep=10**6).candidates
    found = [each for each in found if not each.needs_unknown_host]
    firsts = {each.layout: each for each in reversed(found)}.values()
    assert not found[0].is_filled
    assert {each.is_filled for each in found} == {False, True}
    room = {each.layout for each in found if not each.is_filled}
    assert not any(each.is_filled for each in firsts if each.layout in room)
    assert any(each.tokens_per_s > found[0].tokens_per_s for each in found if each.is_filled)


@functools.cache
def search_of_all():
    return search(question_of(experiment(), PROFILE, engines=ENGINES), machine(), keep=10**6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layout.tp", 2), ("layout.pp", 2), ("layout.dp", 4), ("layout.micro_batch", 3), ("layout.micro_batches", 2),
        ("engine.zero_stage", 2), ("engine.recompute", "full"), ("engine.offload", "optimizer"),
        ("engine.sequence_parallel", True), ("engine.sharded_optimizer", True), ("engine.name", "fsdp"),
    ],
)  # fmt: skip
def test_what_holds_is_not_searched(key, value):
    table, _, name = key.partition(".")
    asked = experiment()
    asked = replace(asked, **{table: replace(getattr(asked, table), **{name: value})})
    open_ = search_of_all()
    found = search(question_of(asked, PROFILE, {key}, ENGINES), machine(), keep=10**6)
    field = "engine" if name == "name" else name
    assert {getattr(each.training, field) for each in found.candidates} == {value}
    assert len({getattr(each.training, field) for each in open_.candidates}) > 1
    assert (
        found.memory_predictions < open_.memory_predictions or key == "layout.micro_batches"
    )  # the global batch is open then


def test_a_fixed_switch_leaves_engines_without_it_out():
    asked = experiment(tiles=2, zero_stage=3)
    question = question_of(asked, PROFILE, {"engine.tiles", "engine.zero_stage"}, ENGINES)
    assert question.engines == ("deepspeed-zero",)
    assert "tiles" not in PLANNED


def test_a_node_that_cannot_hold_what_is_offloaded_does_not_fit():
    question = question_of(experiment(), PROFILE, engines=("deepspeed-zero",))
    question = replace(question, fixed={"offload": "optimizer", "zero_stage": 2})
    assert search(question, machine()).candidates
    assert not search(question, machine(host_memory_gib=0.5)).candidates


SMALLEST = {"micro_batch": 1, "micro_batches": 1, "offload": "none"}


def question(gpus, engines=("deepspeed-3d",), **fixed):
    model = preset("gpt2")
    return Question(model, gpus, 4, "fp16", None, engines, {**SMALLEST, **fixed}), model


def v100(gib):
    return machine_named(f"v100-{gib}g", 4, "omni-path 4x100G")


def test_nothing_larger_of_the_family_has_room():
    asked, model = question(16)
    card = v100(32)
    found = largest(asked, model, card)
    with_room = replace(card, memory_gib=TIGHT * card.memory_gib)
    shapes = family(model)
    fitting = [
        shape
        for shape in shapes
        if shape.params > found.model.params / 2
        and shape.params < 2 * found.model.params
        and search(replace(asked, shape=shape), with_room, first=True).candidates
        and not all(each.is_tight for each in search(replace(asked, shape=shape), card).candidates)
    ]
    assert max(fitting, key=lambda shape: shape.params) == found.model
    assert found.searched.candidates
    assert found.tried <= 100
    assert found.next_larger is not None
    assert found.next_larger.params > found.model.params


def test_sharding_and_offload_hold_more_than_neither():
    plain = largest(*question(16, ("deepspeed-zero",), zero_stage=1), v100(32)).model.params
    sharded = largest(*question(16, ("deepspeed-zero",), zero_stage=3), v100(32)).model.params
    moved = largest(*question(16, ("deepspeed-zero",), zero_stage=3, offload="full"), v100(32)).model.params
    assert plain < sharded < moved


def test_no_model_at_all():
    tiny = Machine("none", 0.5, {"fp16": 1.0}, 1, 4, 1, 1, 1)
    with pytest.raises(LayoutError, match="no model of the family fits on 4 none"):
        largest(*question(4), tiny)


@pytest.mark.shared
def test_as_megatron_deepspeed_found_by_hand(shared):
    """`Max model size`, dp 1: sizes in 2^30, in steps of up to 1.8 x; one below is what its authors had tried."""
    text = next((shared / "seeds").glob("001_*.txt")).read_text(encoding="utf-8", errors="replace")
    part = text.partition("**Max model size**")[2].partition("**Performance**")[0]
    tables = [re.findall(r"\|\s+(\d+) \| (\S+)B\s+\|\s+1 \|", piece) for piece in part.split("32GB nodes:")]
    assert [len(rows) for rows in tables] == [4, 5]
    for gib, rows in zip((16, 32), tables, strict=True):
        for gpus, size in rows:
            found = largest(*question(int(gpus), ("megatron-lm",), recompute="full"), v100(gib)).model.params
            assert 1 / 1.5 < found / (float(size) * 2**30) < 1.9, (gib, gpus, size, found)
