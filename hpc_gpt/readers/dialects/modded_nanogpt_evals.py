"""modded-nanogpt's evaluations: the loss, and the time of training, which does not include them.

Some of its logs have no other lines of steps.
"""

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="modded_nanogpt_evals",
    engine="modded-nanogpt",
    patterns=(
        Pattern(
            "step",
            "val_loss:",
            rf"\bstep:(?P<step>\d{{1,12}})/(?P<steps_planned>\d{{1,12}}) val_loss:{NUMBER} "
            rf"train_time:(?:(?P<elapsed_ms>{NUMBER})ms|(?P<elapsed_s>{NUMBER})s) step_avg:{NUMBER}ms",
        ),
        Pattern(
            "eval",
            "val_loss:",
            rf"\bstep:(?P<step>\d{{1,12}})/\d{{1,12}} val_loss:(?P<loss_eval>{NUMBER}) (?:\w{{1,40}}:\S{{1,40}} ){{0,8}}"
            + r"train_time:",
        ),
    ),
)
