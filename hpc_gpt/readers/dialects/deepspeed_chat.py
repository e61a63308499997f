"""DeepSpeed-Chat's third stage: a line with the step, counted from 0, and one with its times, generation included."""

from __future__ import annotations

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="deepspeed_chat",
    engine="deepspeed-chat",
    flags=("a step of DeepSpeed-Chat's third stage also generates its samples",),
    patterns=(
        Pattern("step", "|ppo_ep: ", r"\bepoch: \d{1,6}\|step: (?P<step>\d{1,12})\|ppo_ep: "),
        Pattern(
            "more",
            "|E2E latency=",
            rf"\|E2E latency=(?P<step_s>{NUMBER})s \|(?=(?:[^\n]{{0,400}}?\|CurSamplesPerSec=(?P<samples_per_s>{NUMBER}) \|)?)",
        ),
    ),
    specimen="""\
epoch: 0|step: 475|ppo_ep: 1|act_loss: 0.0068817138671875|cri_loss: 0.006778717041015625|unsuper_loss: 0.0
|E2E latency=3.85s |Gather latency=0.00s (0.00%) |Generate time=2.58s (67.11%) |Training time=1.04s (27.01%) |Others=0.23 (5.88%)|CurSamplesPerSec=16.62 |AvgSamplesPerSec=16.79
""",
    seen="microsoft/DeepSpeedExamples applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/training_log_output",
)
