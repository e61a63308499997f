"""DeepSpeed-Chat: a line with step and loss, counted from 0 in each epoch, and one with figures of its time.

In the first two stages a step is a micro-batch, and so is its latency: no step time is taken from it. A step of the third
stage also generates its samples.
"""

from hpc_gpt.reader.pattern import END, NUMBER, Dialect, Pattern, line, named

DIALECT = Dialect(
    name="deepspeed_chat",
    engine="deepspeed-chat",
    flags=("a step of DeepSpeed-Chat is a micro-batch, or includes the generation of its samples",),
    patterns=(
        # Each rank prints its own loss.
        line("step", "Epoch: {epoch}, Step: {step}, Rank: 0, loss = {loss}"),
        # After each step of rank 0.
        Pattern(
            "fact",
            rf"\bModel Parameters: (?P<params_billions>{NUMBER}) B, Latency: [\d.]{{1,12}}s, TFLOPs: (?P<tflops>{NUMBER}), "
            r"[^\n]{0,200}? Batch Size: (?P<micro_batch>\d{1,7}), Sequence Length: (?P<seq>\d{1,9})(?=\s*$)",
        ),
        Pattern(
            "step",
            r"\bEpoch: (?P<epoch>\d{1,6}) \| Step: (?P<step>\d{1,12})(?= \| PPO Epoch: )" + named(loss=" Actor Loss: "),
            literal="PPO Epoch: ",
        ),
        Pattern(
            "step",
            r"\bepoch: (?P<epoch>\d{1,6})\|step: (?P<step>\d{1,12})(?=\|ppo_ep: )" + named(loss=r"\|act_loss: "),
            literal="|ppo_ep: ",
        ),
        Pattern("more", r"\|E2E latency=" + f"(?P<step_s>{NUMBER})s" + named(samples_per_s="CurSamplesPerSec=")),
        Pattern(
            "more",
            rf"\bEnd-to-End => Latency: (?P<step_s>{NUMBER})s,"
            + named("(?=,)", tflops=" TFLOPs: ", samples_per_s=" Samples/sec: "),
        ),
        Pattern("fact", r"\bBeginning of Epoch \d{1,6}/(?P<epochs>\d{1,6}), Total Micro Batches \d"),
        Pattern("eval", rf"^ppl: {NUMBER}, loss: (?P<loss_eval>{NUMBER})" + END, own=True),
    ),
)
