"""torchvision's MetricLogger, and the programs with a copy of it: DETR, DeiT, MAE, DINO, V-JEPA, BLIP, LAVIS.

A figure is the median of the last 20 steps, with the mean so far in brackets, which LAVIS leaves out; the time is the mean
of these 20 steps. In `Epoch: [3]` and LAVIS' `data epoch: [3]` the count is in batches of an epoch, in `Training` in all
steps. Peak memory is allocated, in MiB.
"""

from hpc_gpt.reader.pattern import END, Dialect, Pattern, later, named

_FIELDS = (
    named(r"(?= (?:\(| ))", loss=" (?:total_)?loss: ", lr=" lr: ")
    + named(r"(?=(?: \(| ))", step_s=" time: ")
    + later(" max mem: ", "memory_allocated_mib", END)
)
_ETA = r"\](?= {1,4}eta: (?=[^\n]{0,3000} data: ))"

DIALECT = Dialect(
    name="metric_logger",
    patterns=(
        Pattern(
            "step",
            r"\b(?:E|data e)poch: \[(?P<epoch>\d{1,6})(?:/\d{1,6})?\] {1,4}\[ {0,12}(?P<step>\d{1,12})/(?P<epoch_steps>\d{1,12})"
            + _ETA
            + _FIELDS,
            literal="  eta: ",
        ),
        Pattern(
            "step",
            r"\bTraining {1,4}\[ {0,12}(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})" + _ETA + _FIELDS,
            literal="  eta: ",
        ),
    ),
)
