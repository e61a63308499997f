"""`plan --why`: each line's figures, of a layout of round ones that a reader can add up; the reasons in init's file."""

import tomllib
from dataclasses import replace

import pytest

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner.explanation import explain_plan, planned_text
from hpc_gpt.planner.figures import Figures, figures_in, memory_text, plan_figures, summary
from hpc_gpt.planner.machine import Machine
from hpc_gpt.planner.memory import Memory, StageMemory
from hpc_gpt.planner.search import Candidate
from hpc_gpt.planner.step_time import StepTime
from hpc_gpt.planner.table import PlanRow, engine_text, heading
from tests.report.plan_searches import searched_for

MACHINE = Machine("a100-80g", 80, {"bf16": 312.0}, 2000, 4, 300, 100, 25)
FIGURES = Figures(
    step_s=100.0, step_s_low=85.0, step_s_high=115.0, tokens_per_s=1310.72, tokens_per_s_per_gpu=81.92,
    tflops_seed=31.5, tflops_hardware=93.6, tflops_model=62.4, mfu=0.2, hfu=0.3, mfu_as_done=0.19, units="bf16",
    peak_tflops=312.0, gpu_hours_per_step=16 / 36, budget_tokens=2e9, days=17.7, gpu_hours=6781.6,
)  # fmt: skip
RUN = Training(
    ModelShape(1024, 10, 8, vocab=51200, seq=2048), tp=2, pp=4, dp=2, micro_batch=2, micro_batches=16, zero_stage=1,
    recompute="full", flash=True, engine="deepspeed-3d",
)  # fmt: skip
STEP = StepTime(50, 20, 10, 8, 2, 4, 3, 2, 0.15, cp_s=1)


def candidate(step: StepTime | None = STEP, host_gib: float = 0.0, room: float | None = None, **changes) -> Candidate:
    run = replace(RUN, **changes)
    stages = [StageMemory(1, 2, 3, 4, 0.5, 0.25, 11 + number, 12 + number) for number in range(run.pp)]
    return Candidate(run, Memory(stages), 80.0, step, host_gib, room)


def explained(*how, others=(), figures: Figures | None = FIGURES, **changes) -> str:
    text, _, rest = explain_plan(candidate(*how, **changes), MACHINE, figures, others).partition("\nconstants, from ")
    return text + "".join(rest.partition("\nevery micro-batch")[1:])


WHOLE = """\
tp2-pp4-dp2 on 16 a100-80g, engine deepspeed-3d, ZeRO-1, recompute full

GPUs         tp 2 x pp 4 x dp 2 = 16
batch        micro-batch 2 x 16 micro-batches x dp 2 = 64 samples of 2048 tokens = 131,072 tokens a step
layers       10 over 4 stages: 2 to 3 a stage; embedding on the first, head on the last
tensors      over tp 2: hidden 1024 / 2 = 512, MLP 4096 / 2 = 2048, heads 8 / 2 = 4, vocabulary 51200 / 2 = 25600
parameters   stage 3: 2 layers x 6.30e6 + 26.2e6 outside them = 38.8e6 on one GPU
states       bf16-optimizer-immediate: weights 2 + gradients 4 + optimizer 6 = 12 bytes a parameter
activations  stage 3: min(16, pp 4 - 3) = 1 micro-batches in flight x 2 layers x 8.0 MiB = 0.02 GiB

memory of one GPU, GiB; nvidia_smi must be below the card's 80
                   stage 0        stage 2       stage 3*
parameters            1.00           1.00           1.00
gradients             2.00           2.00           2.00
optimizer             3.00           3.00           3.00
activations           4.00           4.00           4.00
logits                0.50           0.50           0.50
buffers               0.25           0.25           0.25
allocated            10.75          10.75          10.75
reserved             11.00          13.00          14.00
nvidia_smi           12.00          14.00          15.00
peak in      backward pass  backward pass  backward pass
needs 15.0 of 80.0 GiB on stage 3

time of a step
             s      %
compute     50   50.0  16 micro-batches, forward and backward
recompute   20   20.0  the forward pass again
tp          10   10.0  all-reduce of 2048 x 2 x 1024 twice a layer and pass, tp 2
cp           1    1.0  exchange of keys, values or heads within cp that attention does not hide
bubble       8    8.0  (pp 4 - 1) / 16 micro-batches = 18.8 % of the busy time, and uneven stages
p2p          2    2.0  activations sent from stage to stage
dp           4    4.0  gradients over 2 replicas, the part that backward does not hide
optimizer    3    3.0  the update
offload      2    2.0  transfers between host and GPU
step       100  100.0  give or take 15%

tokens/s          1,311 tokens/s  (131,072 tokens / 100 s)
tokens/s per GPU  81.9 tokens/s per GPU  (tokens/s / 16 GPUs)
tflops_model      62.4 TFLOP/s  (6 N + 12 L h s a token, PaLM)
tflops_hardware   93.6 TFLOP/s  (Narayanan et al. 2021, eq. 3)
tflops_seed       31.5 TFLOP/s  (6 P s B, 8 with full recomputation)
mfu               20.0%  (tflops_model over the device's dense peak)
hfu               30.0%  (tflops_hardware over the device's dense peak)
peak              312 TFLOP/s of bf16
2e9 tokens in     17.7 days on 16 GPUs  (2e9 tokens / 1,311 tokens/s)
GPU-hours         6,782 GPU-hours  (17.7 days x 24 x 16 GPUs)
"""


def test_a_layout_is_explained_line_by_line() -> None:
    assert explained() == WHOLE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 1}, "tensors      hidden 1024, MLP 4096, 8 heads, whole on every GPU\n"),
        ({"pp": 2}, "layers       10 over 2 stages: 5 a stage; embedding on the first, head on the last\n"),
        ({"pp": 1}, "layers       all 10 on every GPU\n"),
        ({"pp": 1}, "parameters   stage 0: 10 layers x 6.30e6 + 28.3e6 outside them = 91.3e6 on one GPU\n"),
        ({"pp": 1}, "activations  stage 0: 1 = 1 micro-batches in flight x 10 layers x 8.0 MiB = 0.08 GiB\n"),
        ({"pp": 2, "vp": 5}, "layers       10 over 2 stages: 5 a stage, in 5 chunks; embedding on the first"),
        (
            {"pp": 2, "vp": 5},
            "stage 1: min(16, pp 2 - 1) plus the chunks' = 1.8 micro-batches in flight x 5 layers",
        ),
        (
            {"pp": 2, "vp": 5},
            "(pp 2 - 1) / (16 micro-batches x 5 chunks) = 1.2 % of the busy time, and",
        ),
        ({"cp": 2}, "GPUs         tp 2 x pp 4 x cp 2 x dp 2 = 32\n"),
        ({"cp": 2}, "gradients over 4 ranks, cp x dp, the part that backward does not hide\n"),
        ({"recompute": "selective"}, "recompute   20   20.0  attention's scores again\n"),
        ({"recompute": "1/4"}, "recompute   20   20.0  the forward pass of 1/4 of the layers again\n"),
        ({"recompute": "layernorm,mlp"}, "recompute   20   20.0  layernorm, mlp again\n"),
        ({"sequence_parallel": True}, "  gather and scatter of 2048 x 2 x 1024 twice a layer and pass, tp 2\n"),
        ({"zero_stage": 3, "engine": "fsdp"}, "does not hide; parameters gathered for each pass\n"),
        (
            {"shape": replace(RUN.shape, window=512)},
            "windows      10 layers attend to 512 tokens, 0 to all\n",
        ),
        (
            {"shape": replace(RUN.shape, window=512, window_layers="SSSSSSSSLL")},
            "2 to all: stage 3, which has 2 of these, is slower than one with 0\n",
        ),
        (
            {"shape": replace(RUN.shape, window=512, window_layers="SSL")},
            "parameters   stage 3: 2 layers x 6.30e6 + 26.2e6 outside",
        ),
        ({"activations_on_host": True}, "in flight x 2 layers x 8.0 MiB = 0.02 GiB, on the host\n"),
    ],
)
def test_a_setting_is_explained_on_its_line(changes: dict, words: str) -> None:
    assert words in explained(**changes)


@pytest.mark.parametrize(("engine", "rows"), [("megatron-lm", 4096), ("fsdp", 8192)])
def test_the_rows_that_are_sent_are_those_of_the_engine(engine: str, rows: int) -> None:
    step, shape = replace(STEP, ep_s=1), preset("qwen3-30b-a3b")
    assert f"4 exchanges a layer and micro-batch of 8 x {rows} rows" in explained(
        step, shape=shape, engine=engine, pp=1, ep=2, zero_stage=0, recompute="none"
    )


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ((STEP, 90.0), "needs 15.0 of 80.0 GiB on stage 3, 90.0 GiB of host memory (its size is unknown)"),
        ((STEP, 90.0, 1200.0), "needs 15.0 of 80.0 GiB on stage 3, 90.0 of 1,200 GiB of host memory"),
        ((None,), "does not fit: 15.0 of 80.0 GiB on stage 3"),
        ((None, 90.0, 60.0), "does not fit: 90.0 of 60 GiB of host memory"),
        (
            (STEP, 90.0, 95.0),
            "needs 15.0 of 80.0 GiB on stage 3, 90.0 of 95 GiB of host memory: tight, because less is left "
            "than the prediction may err by",
        ),
    ],
)
def test_what_is_held_is_compared_with_what_there_is(how: tuple, line: str) -> None:
    text = explained(*how).splitlines()
    assert line in text
    assert ("time of a step" in text) == (how[0] is not None)


def test_without_figures_no_time_is_explained() -> None:
    assert explained(figures=None).endswith("needs 15.0 of 80.0 GiB on stage 3\n")


def test_micro_batches_are_compared_if_there_are_two() -> None:
    others = [candidate(), candidate(micro_batch=1, micro_batches=32), candidate(None, micro_batch=4, micro_batches=8)]
    assert explained(others=others[:1]) == WHOLE
    assert (
        explained(others=others).removeprefix(WHOLE)
        == """
every micro-batch, each with its best settings
size  number   GiB  step s
  2*      16  15.0     100  deepspeed-3d, ZeRO-1, recompute full
   1      32  15.0     100  deepspeed-3d, ZeRO-1, recompute full
   4       8  15.0       -  deepspeed-3d, ZeRO-1, recompute full: does not fit: 15.0 of 80.0 GiB on stage 3
"""
    )


def test_a_utilisation_that_counts_masked_work_says_so() -> None:
    line = "mfu as done       15.0% (the formulas count all of attention; a causal mask saves half of it)"
    assert line in explained(figures=replace(FIGURES, mfu_as_done=0.15)).splitlines()


def test_a_planned_file_has_its_reasons_as_comments() -> None:
    searched, shape = searched_for()
    figures, best, second = figures_in(searched, searched.candidates[0], 300e9), *searched.best_of_layouts[:2]
    assert figures is not None
    tables = {
        "model": {"preset": "48b"},
        "engine": {"name": "a"},
        "layout": {"tp": 4},
        "job": {"nodes": 2},
        "train": {"steps": 3, "init": "w"},
    }
    text = planned_text("mine", tables, searched, figures, ("48b", shape), "data sheets")
    comments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    assert tomllib.loads(text) == {"name": "mine", **tables}
    assert comments[:4] == [
        heading(searched, "48b", 51_966_918_656),
        "51,966,918,656 parameters.",
        f"{engine_text(best.training)}: the fastest settings that fit.",
        "To hide communication, add to megatron_args, if the checkout has them:",
    ]
    assert comments[4:9] == [
        '"--tp-comm-overlap"',
        f"{best.layout}: {memory_text(best)}; {summary(plan_figures(best, figures))[0]}.",
        "Predicted from data sheets; the percentage is the prediction's expected error.",
        f"A step has {best.training.micro_batch} x {best.training.micro_batches} micro-batches x dp 1 = 1024 samples.",
        "The next layouts, compared with the best:",
    ]
    row = PlanRow(second, best).texts
    assert comments[9] == f"  {second.layout} on {row['engine']}, {row['step']} s, {row['memory']} GiB: {row['why']}"
    assert comments[13].startswith("Layouts left out: 9 as tp would span nodes; 1 as tp does not divide the heads;")
    assert comments[14:] == [
        "Length and learning rate; save_every or save_minutes say when it saves.",
        "lr 2e-05 is usual for trained weights, 0.0003 for random ones.",
        "hpc-gpt help keys train explains every key.",
    ]
