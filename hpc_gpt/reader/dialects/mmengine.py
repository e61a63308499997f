"""MMEngine: OpenMMLab's trainers and XTuner before its version 1. Peak memory is allocated, in MiB; the time is per iteration.

`Iter(train)` counts all iterations, `Epoch(train)` the iterations of an epoch. With accumulated gradients an iteration is not a step.
"""

from hpc_gpt.reader.pattern import STOP_OR_END, Dialect, Pattern, named

_FIELDS = (
    r"(?=[^\n]{0,400}? time: )"
    + named(lr=" lr: ", step_s=" time: ", grad_norm=" grad_norm: ", memory_allocated_mib=" memory: ")
    + named(STOP_OR_END, loss=" loss: ")
)

DIALECT = Dialect(
    name="mmengine",
    engine="mmengine",
    patterns=(
        Pattern(
            "step",
            r"\bIter\(train\) {1,4}\[ {0,12}(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})\]" + _FIELDS,
            literal="Iter(train) ",
        ),
        Pattern(
            "step",
            r"\bEpoch\(train\) {1,4}\[ {0,6}(?P<epoch>\d{1,6})\]\[ {0,12}(?P<step>\d{1,12})/(?P<epoch_steps>\d{1,12})\]"
            + _FIELDS,
            literal="Epoch(train) ",
        ),
    ),
)
