"""NeMo-RL: a banner per step, with its loss and times below. A step of GRPO also generates its samples.

The banner counts the steps of an epoch. The figures are read only below a banner, as other programs print such lists.
"""

from hpc_gpt.reader.pattern import END, NUMBER, START, Dialect, Pattern

DIALECT = Dialect(
    name="nemo_rl",
    engine="nemo-rl",
    patterns=(
        Pattern(
            "step",
            r"={20,30} Step (?P<step>\d{1,12})/(?P<steps_planned>\d{1,12}) ={20,30}" + END,
            literal="==== Step ",
        ),
        Pattern("more", START + rf"• Loss: (?P<loss>{NUMBER})" + END, own=True),
        Pattern(
            "more",
            START + rf"• Training FLOPS: {NUMBER} TFLOPS \((?P<tflops>{NUMBER}) TFLOPS per rank\)",
            own=True,
        ),
        Pattern(
            "more", START + rf"• Training Model Floating Point Utilization: (?P<mfu_percent>{NUMBER})%" + END, own=True
        ),
        Pattern("more", START + rf"• Total step time: (?P<step_s>{NUMBER})s" + END, own=True),
        Pattern("more", START + rf"- E2E \(Tokens/sec/gpu\): (?P<tokens_per_s_gpu>{NUMBER})" + END, own=True),
        Pattern("eval", START + rf"• Validation loss: (?P<loss_eval>{NUMBER})" + END, own=True),
        Pattern("save", START + r"Saving checkpoint for step (?P<step>\d{1,12})\.\.\.", own=True),
    ),
)
