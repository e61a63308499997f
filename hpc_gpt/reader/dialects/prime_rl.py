"""prime-rl: a line per step of the trainer, from step 0. Tokens/s are the job's, peak memory is reserved, in GiB.

A step of reinforcement learning also waits for its samples, and its loss is the policy's. The orchestrator's lines have
the same form without a loss, and are not read.
"""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern, later, named

DIALECT = Dialect(
    name="prime_rl",
    engine="prime-rl",
    patterns=(
        Pattern(
            "step",
            rf"\bStep (?P<step>\d{{1,12}}) \| Time: (?P<step_s>{NUMBER})s (?=[^\n]{{0,200}}? Loss: )"
            + named(loss=r" Loss: ", grad_norm=r"\| Grad\. Norm: ", lr=r"\| LR: ")
            + later(r"\| Throughput: ", "tokens_per_s", " tokens/s")
            + later(r"\| MFU: ", "mfu_percent", "%")
            + later(r"\| Peak Mem\.: ", "memory_reserved_gib", "(?:/| GiB)"),
            literal=" | Time: ",
        ),
        Pattern(
            "start",
            r"\bStarting (?:SFT|RL) trainer in World\(world_size=(?P<gpus>\d{1,7}), [^\n]{0,200}?\bnum_nodes=(?P<nodes>\d{1,6})\)",
        ),
        Pattern("fact", r"\bStarting training loop \(max_steps=(?P<steps_planned>\d{1,12})\)"),
    ),
)
