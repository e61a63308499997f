"""A made search as it is shown, whole: the table and its lines in shown.txt, a row of the JSON, charts of the page."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.planner import plan_page
from hpc_gpt.planner.figures import plan_figures, summary
from hpc_gpt.planner.memory import Memory, StageMemory
from hpc_gpt.planner.question import DIVIDES_NO_BATCH, Question
from hpc_gpt.planner.search import Candidate, Searched
from hpc_gpt.planner.search_tables import search_tables
from hpc_gpt.planner.table import heading, left_out_text, legend, search_table, unchecked
from tests.planner.test_explanation import FIGURES, MACHINE, RUN, STEP

TEXT = Path(__file__).with_name("shown.txt").read_text(encoding="utf-8")
HOST = replace(MACHINE, host_memory_gib=1200.0)


def sized(step, need_gib, **changes):
    run = replace(RUN, **changes)
    parts = [1.0, 2.0, 3.0, 4.0, 0.5, 0.25, need_gib - 1]
    return Candidate(run, Memory([StageMemory(*parts, need_gib - 2 * at) for at in range(run.pp)]), 80.0, step)


BEST = sized(STEP, 60.0, pp=2, dp=4, micro_batches=8)
TIGHT = sized(replace(STEP, compute_s=40), 79.0, tp=4, pp=1, dp=4, micro_batches=8)
EQUAL = sized(replace(STEP, compute_s=51), 70.0, tp=4, pp=2, micro_batches=16)
MOVED = replace(
    sized(replace(STEP, bubble_s=40, offload_s=0), 40.0, offload="optimizer"), host_gib=90.0, host_memory_gib=1200.0
)
LARGE = sized(None, 300.0, tp=1, pp=1, dp=16, micro_batches=2)
ASKED = Question(RUN.shape, 16, 4, "bf16", 64, ("deepspeed-3d",))
LEFT_OUT = Counter({"tp would span nodes": 2, DIVIDES_NO_BATCH: 1})
SEARCHED = Searched(ASKED, HOST, [BEST, TIGHT, EQUAL, MOVED], [LARGE], LEFT_OUT, 31, 1400)
UNKNOWN = Searched(replace(ASKED, matmul="fp8-tensor"), MACHINE, [replace(MOVED, host_memory_gib=None)])


def test_a_table_and_its_lines_are_as_written():
    overlap = replace(BEST, step=replace(STEP, dp_s=1)), ("--overlap",)
    by_passes = replace(UNKNOWN, question=replace(UNKNOWN.question, global_batch=None, fixed={"micro_batches": 16}))
    lines = [each for one in (SEARCHED, by_passes) for each in (
        heading(one, "mine", 130_000_000), legend(one), left_out_text(one), unchecked(one))]  # fmt: skip
    parts = (search_table(SEARCHED, None, blocks=False, overlap=overlap), search_table(SEARCHED, 90, blocks=True))
    figures = plan_figures(BEST, replace(FIGURES, mfu_as_done=0.1, days=0.5))
    assert "\n".join([*parts, *lines, *summary(figures)]) + "\n" == TEXT


def test_a_candidate_in_the_json_is_whole():
    page = search_tables(SEARCHED, 2e9, {"name": "mine"}, "hpc-gpt submit", {"source": "data sheets"})
    found = page["candidates"][3]
    run = {"tp": 2, "pp": 4, "dp": 2, "cp": 1, "micro_batch": 2, "micro_batches": 16, "global_batch": 64, "chunks": 1}
    switches = {"sequence_parallel", "sharded_optimizer", "compiled", "compiled_head", "one_pass_loss",
                "keep_residuals", "fused_bias_gradients", "activation_offload"}  # fmt: skip
    stage = {"parameters": 1.0, "gradients": 2.0, "optimizer": 3.0, "activations": 4.0, "logits": 0.5, "buffers": 0.25,
             "reserved": 39.0, "host": 0.0, "evaluation": 0.0, "allocated": 10.75}  # fmt: skip
    assert found["figures"]["step_s"] == 130.0
    assert {key: value for key, value in found.items() if key != "figures"} == {
        "layout": "tp2-pp4-dp2", "engine": "deepspeed-3d", **run, **dict.fromkeys(switches, False), "loss_chunks": 1,
        "zero_stage": 1, "recompute": "full", "offload": "optimizer", "cp_exchange": "heads", "matmul": "none",
        "shard": None,
        "fits": True, "tight": False, "memory_gib": 40.0, "host_memory_gib": 90.0, "deciding_stage": 0, "band": 0.15,
        "stages": [{**{f"{name}_gib": each for name, each in stage.items()}, "nvidia_smi_gib": need,
                    "peak_in": "backward pass"} for need in (40.0, 38.0, 36.0, 34.0)],
        "time": {"compute_s": 50, "recompute_s": 20, "tp_s": 10, "cp_s": 1, "bubble_s": 40, "p2p_s": 2, "dp_s": 4,
                 "optimizer_s": 3, "offload_s": 0, "ep_s": 0},
        "ep": 1, "etp": 2, "against_best": "bubble 31 % against 8 %",
    }  # fmt: skip
    assert {key: page[key] for key in page.keys() - {"candidates", "too_large", "machine"}} == {
        "schema": 1, "model": {"name": "mine"}, "constants": {"source": "data sheets"}, "gpus": 16, "dtype": "bf16",
        "global_batch": 64, "engines": ["deepspeed-3d"], "settled": {}, "left_out": dict(LEFT_OUT),
        "kept_per_layout": 3, "settings_fitting": 31, "settings_not_fitting": 1400, "next": "hpc-gpt submit",
    }  # fmt: skip
    assert page["too_large"][0]["against_best"] == "does not fit: 300.0 of 80.0 GiB"


def bars(svg):
    """(x, y, width) of each part of a drawing's bars, by the part's hatch."""
    return re.findall(r'share-(\d)" x="([\d.]+)%" y="(\d+)" width="([\d.]+)%" height="14"', svg.markup)


def test_the_time_of_a_step_is_drawn_to_scale():
    found = plan_page.time_section([BEST, MOVED, LARGE])
    (chart,) = found["charts"]
    assert chart["caption"] == "Time of a step by layout, seconds"
    assert chart["headings"] == ["Layout", "compute", "recompute", "tp", "cp", "bubble", "p2p", "dp", "optimizer",
                                 "offload", "step"]  # fmt: skip
    assert chart["rows"] == [
        ["tp2-pp2-dp4", "50", "20", "10", "1", "8", "2", "4", "3", "2", "100"],
        ["tp2-pp4-dp2", "50", "20", "10", "1", "40", "2", "4", "3", "0", "130"],
    ]
    assert (
        "Seconds of one step of 131,072 tokens, by part. The parts: compute, forward and backward passes; rec"
        in found["words"]
    )
    drawn, each_s = bars(chart["drawing"]), 99 / 130
    places = [(place, top) for place, _, top, _ in drawn]
    assert places == [(str(at), "20") for at in range(9)] + [(str(at), "58") for at in range(8)]
    assert [float(wide) for *_, wide in drawn[:5]] == pytest.approx(
        [each_s * size for size in (50, 20, 10, 1, 8)], abs=0.01
    )
    assert [float(left) for _, left, *_ in drawn[9:13]] == pytest.approx(
        [each_s * at for at in (0, 50, 70, 80)], abs=0.01
    )
    text = chart["drawing"].markup
    assert "tp2-pp4-dp2 130 s: compute 50, recompute 20, tp 10, cp 1, bubble 40, p2p 2, dp 4, optimizer 3<" in text
    assert ">tp2-pp2-dp4: 100 s</text>" in text
    assert "over" not in text
    assert plan_page.time_section([LARGE]) is None


def test_the_memory_of_each_stage_is_drawn_against_the_card():
    (chart,) = plan_page.memory_section([BEST])["charts"]
    assert chart["caption"] == "Memory of tp2-pp2-dp4, GiB"
    sizes = ["1.00", "2.00", "3.00", "4.00", "0.50", "0.25", "10.75", "59.00"]
    assert chart["rows"] == [["0", *sizes, "60.00", "backward pass"], ["1", *sizes, "58.00", "backward pass"]]
    text = chart["drawing"].markup
    assert (
        "The card has 80 GiB. stage 0 (decides) 60 GiB: parameters 1, gradients 2, optimizer 3, activations 4, logits"
        in text
    )
    assert "not allocated: reserved, context 47.2<" in text
    assert '<line x1="99.00%" x2="99.00%" y1="0" y2="80" class="card"/>' in text
    (chart,) = plan_page.memory_section([LARGE])["charts"]
    text = chart["drawing"].markup
    assert '<rect x="26.40%" y="20" width="72.60%" height="14" class="over"/>' in text
    assert '<line x1="26.40%" x2="26.40%" y1="0" y2="42" class="card"/>' in text
    many = plan_page.memory_section([sized(STEP, 60.0, pp=30, shape=replace(RUN.shape, layers=30))])["charts"][0]
    assert many["caption"] == "Memory of tp2-pp30-dp2, 24 of 30 stages, GiB"
    numbers = [int(row[0]) for row in many["rows"]]
    assert (len(numbers), numbers[0], numbers[-1]) == (24, 0, 29)
    assert plan_page._shown(30, 2) == sorted({*numbers, 2})


@pytest.mark.parametrize(("searched", "title"), [(SEARCHED, "Best"), (UNKNOWN, "Fastest")])
def test_the_page_begins_with_the_first_layout_in_words(searched, title):
    text = plan_page.build_plan_page(searched, 2e9, "mine", 130_000_000, "hpc-gpt submit --gpus 16")
    first = searched.candidates[0]
    begin = text[: text.index("<table")]
    assert f">{title}: {first.layout}</h2>" in begin
    assert f"; {first.need_gib:.1f} of 80.0 GiB on stage 0." in begin
    assert f"<li>step {first.step.step_s:.0f} s, give or take 15%, " in begin
    assert '<code class="command"><span>hpc-gpt</span>' in begin
