"""XTuner: a line per step from each rank. The loss is `reduced_llm_loss`, the mean over the ranks; `tgs` is per GPU.

`local_loss` and, in versions of 2025, `total_loss` are one rank's, or include the losses of the router. `text_tokens`
are one rank's, the consumed tokens those of all ranks. `time` is the step without the wait for data.
"""

from hpc_gpt.reader.pattern import Dialect, Pattern, named

DIALECT = Dialect(
    name="xtuner",
    engine="xtuner",
    patterns=(
        Pattern(
            "step",
            r"\bStep (?P<step>\d{1,12})/(?P<steps_planned>\d{1,12}) (?=data_time: [^\n]{1,1000}? reduced_llm_loss: )"
            + named(loss=" reduced_llm_loss: ", lr=" lr: ", step_s=" time: ", grad_norm=" grad_norm: ")
            + named(balance_loss=" reduced_balancing_loss: ", z_loss=" reduced_z_loss: ")
            + named(tokens_per_s_gpu=" tgs: ", consumed_tokens=" (?:reduced|total)_consumed_tokens: ")
            + named(memory_allocated_gib=" max_memory: ", memory_reserved_gib=" reserved_memory: "),
            literal=" reduced_llm_loss: ",
        ),
    ),
)
