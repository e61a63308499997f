"""Texts by which programs say that they have ended: a table by program, then a general rule.

They count only after the last line of steps: many programs print such lines, some about an epoch or an evaluation.
"""

from hpc_gpt.reader.pattern import Dialect, Pattern

_TIME = (
    r"(?:\d{1,9}:\d\d:\d\d|\d{1,4}h ?\d{1,2}m"
    r"|\d[\d.,]{0,12} ?(?:ms|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?)\b(?!/))"
)
_STEP = r"(?:\b(?:step|iter(?:ation)?|update)s?[ =:]{1,3}\d|\b\d[\d,]{0,14} (?:\w{1,20} )?(?:steps|iter(?:ation)?s|updates)\b)"
# (text at the begin of a line or of a word, regex after it, how the program ended), and the program.
_TABLE = (
    ("done training in ", r"[\d.,]{1,12} seconds", "done"),  # fairseq
    ("Total training time", rf": {_TIME}\s*$", "done"),  # nanochat
    ("Training time ", r"(?:\d{1,4} days?, )?\d{1,3}:\d\d:\d\d\s*$", "done"),  # DeiT and its kin
    ("total average iteration time: ", r"[\d.]{1,12} ms", "done"),  # llm.c
    ("final ", r"\d{1,9} iters avg: [\d.]{1,12}ms", "done"),  # llm.c's train_gpt2.py
    ("peak memory allocated: ", r"\d{1,9} MiB reserved: \d{1,9} MiB\s*$", "done"),  # modded-nanogpt
    ("stopping_early: wallclock_cap", r"\b", "walltime"),  # parameter-golf
    ("End time of running main: ", r"\d", "done"),  # ms-swift
    ("Final validation metrics: ", r"\{", "done"),  # verl
    (
        "Training ",
        r"(?:is )?(?:completed?|finished|done)(?:[.!]{0,3}\s*$|! Saving )",
        "done",
    ),  # torchtitan, OLMo, axolotl
)
_DONE = r"\b(?:done|completed?|finished|ended)\b"
_TRAINING = r"\b(?:(?:pre-?|fine-?)?train(?:ing)?|run|job|fit(?:ting)?|optimi[sz]ation)\b"
# Other subjects of such a line: a part of a training, a forecast, a share.
_NOT = (
    r"(?![^\n]{0,300}(?:\b(?:epoch|eval|valid|test|sav|checkpoint|load|compil|token|download|estimat|expected|remain|will"
    r"|in about|eta|left|sampl|batch)|\d ?%|\d ?/ ?\d|training (?:step|stage|phase|loop|data|set)\b))"
)
_SAID = rf"(?:{_TRAINING}.{{0,40}}?{_DONE}|{_DONE} (?:the )?{_TRAINING}).{{0,80}}?(?:{_TIME}|{_STEP})"
_EARLY = rf"\bearly[ -]stopp(?:ing|ed)\b.{{0,60}}?\b(?:at|after) {_STEP}"

DIALECT = Dialect(
    name="program_ends",
    patterns=(
        # torchrun's and Ray's, about any program that they started
        Pattern("end", r"\] worker group successfully finished", ended="done"),
        Pattern("end", r"\bJob '\w{1,80}' succeeded\s*$", ended="done"),
        *(
            Pattern("end", rf"(?<!\w){text}{after}", literal=text, ended=ended, weak=True)
            for text, after, ended in _TABLE
        ),
        *(
            Pattern("end", rf"(?i)^{_NOT}.{{0,200}}?{sentence}", literal=literal, ended=ended, weak=True)
            for literal, sentence, ended in (
                *((literal, _SAID, "done") for literal in ("raining", "RAINING", "inished", "omplete")),
                ("arly", _EARLY, "stopped"),
            )
        ),
    ),
)
