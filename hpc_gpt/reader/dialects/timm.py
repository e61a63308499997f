"""timm: the updates of an epoch, counted from 0, with the time of the last one and the job's images per second."""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern, later, line

DIALECT = Dialect(
    name="timm",
    engine="timm",
    patterns=(
        Pattern(
            "step",
            r"\bTrain: (?P<epoch>\d{1,6}) \[ {0,8}(?P<step>\d{1,12})/(?P<epoch_steps>\d{1,12}) \( {0,2}\d{1,3}%\)\]"
            r"(?=[^\n]{0,200}? Loss: )"
            + later(" Loss: {1,8}", "loss", r"(?= \()")
            + later(" Time: {1,8}", "step_s", "s,")
            + later(rf" Time: {{1,8}}{NUMBER}s, {{0,8}}", "samples_per_s", "/s")
            + later(" LR: {1,8}", "lr"),
            literal="Train: ",
        ),
        line("fact", " created, param count:{params}"),
    ),
)
