"""modded-nanogpt's evaluations: the loss, and the time of training, which does not include them.

Some of its logs have no other lines of steps.
"""

from hpc_gpt.reader.dialects.modded_nanogpt import STEP
from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern, has, later

DIALECT = Dialect(
    name="modded_nanogpt_evals",
    engine="modded-nanogpt",
    patterns=(
        Pattern("step", STEP + has(rf" val_loss:{NUMBER}(?=\s|$)"), literal="val_loss:"),
        Pattern(
            "eval",
            r"\bstep:(?P<step>\d{1,12})/\d{1,12}(?= )"
            + has(" train_time:")
            + later(" val_loss:", "loss_eval", r"(?=\s|$)"),
            literal="val_loss:",
        ),
    ),
)
