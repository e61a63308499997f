"""A made search as it is shown, whole: the table and its lines in shown.txt, and a row of the JSON."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

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
                "keep_residuals", "activation_offload"}  # fmt: skip
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
