"""Unknown programs: a line that names a step and a loss, recognised by its shape alone.

Here a name is a regex and not a row of a table: programs that nobody knows name a figure in many ways. A line is read
this way only if no other dialect matches it, and a log only if the step rises in two lines of one shape, or in five of
any; in the output of tests only in five. Many such loops print the loss last, where a cut number cannot be noticed.

It reads the step, the loss, the learning rate, the gradient norm, a time whose name or unit shows that it is per step,
and tokens or samples per second, which are taken as the job's unless their name shows that they are per GPU.
"""

import re

from hpc_gpt.reader.lines.fields import TESTS
from hpc_gpt.reader.lines.pattern import (
    AFTER,
    ANY_LOSS,
    ANY_NUMBER,
    END,
    INT,
    IS,
    LOSS,
    NUMBER,
    SHORT,
    START,
    VALIDATION,
    Dialect,
    Pattern,
    later,
    line,
)

DIFFUSION = "diffusion"  # a fact in the log of a model of images
_BITS = rf"{ANY_LOSS}(?P<loss_bits>{NUMBER}) ?(?:bpc|bits)\b"
# Matches the number of a step after that of its epoch: `Epoch [1/5], Step [100/600]`, `Epoch: [0][100/600]`. It starts
# with a character class, because re searches for that fast; the lookbehinds then check the word.
_FIRST, _WORD = r"[EeGgSsIiBb](?<![\w./-].)", r"(?<![\w./-])"
_EPOCH = r"(?<=e)poch:? {0,4}[\[(]? {0,4}(?P<epoch>\d{1,6})(?: ?/ ?\d{1,6})?[\])]?"
_NAME = r"(?:(?<=g)lobal_?(?:step|iter(?:ation)?)|(?<=s)tep|(?<=i)ter(?:ation)?|(?<=b)atch"
_BATCHES = r"(?=[^\n/]{1,24}/)"  # a batch with a total
_OF = rf"{_NAME}{_BATCHES})(?:{IS}|(?=\[))"
_COUNT = rf"[\[(]? {{0,8}}(?P<step>{INT})(?![.,]?\d)(?: ?/ {{0,8}}{INT})?(?=[\s,;:|)\]}}])"
# After an epoch a batch needs no total, and the number may touch its word.
_OF_EPOCH = rf"{_NAME}(?(epoch)|{_BATCHES}))(?:{IS}|(?=\[)|(?(epoch)(?=\d)|(?!)))"
_STEP = rf"(?:{_EPOCH}[^\n]{{0,24}}?{_WORD}[gsib])?{_OF_EPOCH}"
_COUNT_OF_EPOCH = _COUNT.replace(f"{{0,8}}{INT})?", f"{{0,8}}(?(epoch)(?P<epoch_steps>{INT})|{INT}))?")


# What precedes a name: a character of its own, as one is there after the number of the step. A lookbehind at each place
# would take twice as long.
_BEFORE = r"[^\n\w./-]"


def _later(names: str, group: str) -> str:
    return later(rf"{_BEFORE}(?:{names}){IS}", group, AFTER, ANY_NUMBER, r"[^\n]{0,300}?")


def _rate(names: str, group: str) -> str:
    """A lookahead for a figure after its name, or before it at the begin of a column: `tok/s 1000`, `| 1000 tok/s`."""
    before, after = (
        rf"{_BEFORE}(?:{names}){IS}",
        rf"[|,;(\[] {{0,8}}(?={ANY_NUMBER} ?(?:{names})(?!{IS}{NUMBER}){AFTER})",
    )
    return later(rf"(?:{before}(?={ANY_NUMBER}{AFTER})|{after})", group, "", ANY_NUMBER, r"[^\n]{0,300}?")


_STEPS = "(?:steps?|iter(?:ation)?s?|it)"
_SECOND = "(?:s|secs?|seconds?)"
_PER = "(?:[_ ]?/[_ ]?|[_ ]per[_ ])"
_GPU = rf"{_PER}(?:gpu|device|rank)"
_TIME = (
    "(?:per[_ ])?(?:step|iter|iteration)[_ ]time|(?:avg_)?batch_cost|time(?:[_/ ]per[_ ]|/)(?:step|iter|iteration)|dt"
)
_TIME_MS = "(?:step|iter|iteration)[_ ]time[_ ]ms|(?:step|iter)[_ ]ms"
# The unit is in the name, or after the figure.
_MILLISECONDS = later(
    rf"{_BEFORE}(?:(?:{_TIME_MS}){IS}|(?:{_TIME}|(?<![a-z][ _-])time){IS}(?={ANY_NUMBER} ?ms))",
    "step_ms",
    rf"(?: ?ms)?{AFTER}",
    ANY_NUMBER,
    r"[^\n]{0,300}?",
)


def _fields(seconds: str) -> str:
    """The fields of a line of steps after the step, in any order. `seconds`: the regex before the time of a step.

    A line that names an evaluation belongs to one, unless it names the loss of training.
    """
    return (
        rf"(?:(?=[^\n]{{0,200}}?train(?:ing)?[_ /-]?loss)|(?![^\n]{{0,200}}\b(?:{VALIDATION})\b))"
        rf"(?=[^\n]{{0,300}}?{LOSS})"
        + _later("lr|learning[_ ]rate", "lr")
        + _later(
            "(?:consumed[_ ])?tokens[_ /](?:seen|consumed|total|processed)|(?:total|consumed)[_ ]tokens",
            "consumed_tokens",
        )
        + _later("(?:consumed|processed|total)[_ ]samples|samples[_ ](?:seen|consumed|processed)", "consumed_samples")
        + _later("(?:global|total|effective)[_ ]batch(?:[_ ]?size)?", "batch")
        + _later("grad(?:ient)?[_ ]?norm|gnorm", "grad_norm")
        + _later(f"(?:{VALIDATION})[_ /-]loss", "loss_eval")
        + later(rf"{_BEFORE}(?:{seconds})", "step_s", "", ANY_NUMBER, r"[^\n]{0,300}?")
        + _MILLISECONDS
        + _rate(rf"{_SECOND}{_PER}{_STEPS}", "seconds_per_step")
        + _rate(rf"(?:ms|milliseconds?){_PER}{_STEPS}", "ms_per_step")
        + _rate(rf"(?:steps?|iterations?){_PER}{_SECOND}", "steps_per_s")
        + _rate(rf"tok(?:en)?s?(?:{_PER}|-){_SECOND}", "tokens_per_s")
        + _rate(rf"tok(?:en)?s?(?:{_PER}{_SECOND}{_GPU}|{_GPU}{_PER}{_SECOND})", "tokens_per_s_gpu")
        + _rate(rf"(?:samples?|sequences?|examples?){_PER}{_SECOND}", "samples_per_s")
    )


# A text between two trainings, and not about a part of one.
_OF_ONE = "epoch|eval|valid|test|sav(?:e|ing)|checkpoint|sampl|generat|metric|result|summary"
_BANNER = rf"(?i:(?![^\n]{{0,200}}(?:{_OF_ONE}))[^\n]{{0,40}}[a-z])"

DIALECT = Dialect(
    name="generic",
    last_resort=True,
    flags=("the program is not known: its lines were recognised by shape alone",),
    patterns=(
        Pattern(
            "step",
            rf"{_FIRST}(?i:{_STEP}{_COUNT_OF_EPOCH}"
            + _fields(rf"(?:{_TIME}){IS}(?={ANY_NUMBER} ?{_SECOND}{AFTER})")
            + ")",
            literal="oss",
            head=rf"{_FIRST}(?i:{_STEP})",
        ),
        # A line of an evaluation alone.
        Pattern(
            "eval",
            rf"{_FIRST}(?i:{_STEP}{_COUNT}(?![^\n]{{0,300}}train)(?=[^\n]{{0,300}}?{_BEFORE}(?:{VALIDATION})[_ /-]loss"
            rf"{IS}(?P<loss_eval>{ANY_NUMBER}){AFTER}))",
            literal="oss",
            own=True,
        ),
        Pattern(
            "eval",
            rf"^(?i:(?![^\n]{{0,300}}\b(?:step|epoch|iter|train|best|min|lowest))[^\n]{{0,80}}?(?<![\w./-])(?:{VALIDATION})"
            rf"(?: ?[_/:|-] ?| )loss{IS}(?P<loss_eval>{ANY_NUMBER}){AFTER})",
            literal="oss",
            own=True,
        ),
        # The batch of an epoch in brackets, as torch's examples print it: a meter prints seconds, and their mean in brackets.
        Pattern(
            "step",
            rf"[Ee](?<![\w./-].)(?i:{_EPOCH}[ ,:]{{0,4}}(?=[\[(]){_COUNT_OF_EPOCH}"
            + _fields(rf"(?<!data )(?<!load )time {{1,8}}(?={ANY_NUMBER} {{1,4}}\()")
            + ")",
            literal="poch",
            head=rf"[Ee](?<![\w./-].)(?i:{_EPOCH})",
        ),
        # The batch of an epoch in columns, as torch's examples of language models print it.
        Pattern(
            "step",
            rf"(?i:\bepoch {{1,8}}(?P<epoch>\d{{1,6}}) \| {{1,12}}(?P<step>\d{{1,12}})/ {{0,12}}(?P<epoch_steps>\d{{1,12}})"
            rf" batches \|(?=[^\n]{{0,100}}? ms/batch {{1,8}}(?P<step_ms>{NUMBER}) )(?=[^\n]{{0,200}}?{LOSS}))",
            literal=" ms/batch ",
        ),
        line("eval", "| valid loss {loss_eval} | valid ppl {}", own=True),
        # In bits a character.
        Pattern(
            "step",
            rf"{_FIRST}(?i:{_OF}{_COUNT}[^\n]{{0,100}}?{_BITS}"
            rf"(?:, {{1,4}}time:? (?P<step_ms>{NUMBER}) ?ms\b)?)",
            literal="oss",
        ),
        Pattern(
            "step",
            rf"(?i)\bbatch {{1,4}}(?P<step>\d{{1,12}}),? {{1,4}}loss: {{0,4}}(?P<loss>{NUMBER}),? {{0,4}}speed: {{0,4}}"
            rf"(?P<samples_per_s>{NUMBER}) samples/s(?:ec)?\b",
            literal="amples/s",
        ),
        Pattern("step", rf"(?i){LOSS}[^\n]{{0,100}}?{_WORD}[gsi]{_OF}(?P<step>{INT}){AFTER}", literal="oss"),
        # Models of images, whose steps have no tokens: their samples are not sequences of a language model.
        *(
            Pattern("fact", rf"\b\w{{0,40}}{name}\w{{0,40}}\b", literal=name, facts={DIFFUSION: 1}, weak=True)
            for name in (
                "UNet2D",
                "UNet3D",
                "Transformer2DModel",
                "Transformer3DModel",
                "DDPMScheduler",
                "FlowMatchEulerDiscreteScheduler",
            )
        ),
        # The data type of a program's matrix products, by its name for the setting.
        *(
            Pattern(
                "fact",
                START + r"(?i:compute[ _]dtype) {0,2}[:=] {0,4}['\"]?(?:torch\.|jnp\.)?(?P<dtype>[a-z]\w{2,11})\b",
                literal=literal,
                weak=True,
            )
            for literal in ("COMPUTE_DTYPE", "compute_dtype", "ompute dtype")
        ),
        Pattern("fact", START + rf"Model [pP]aram(?:eter)?s: (?P<params>{SHORT})" + END, literal="Model ", weak=True),
        # No word may come before it: `Trainable parameters:` counts others.
        Pattern(
            "fact",
            rf"{START}(?<![A-Za-z] )(?:[Tt]otal |[Nn]umber of )?[Pp]arameters: (?P<params>\d{{1,3}}(?:,\d{{3}}){{2,4}}){END}",
            literal="arameters: ",
            weak=True,
        ),
        # A banner between trainings, framed as scripts print them: `==== run 2: lr=1e-3 ====`.
        *(
            Pattern(
                "start",
                rf"^ {{0,8}}{re.escape(mark)}[{mark[-1]}]{{0,200}} {{0,8}}(?={_BANNER})",
                literal=mark,
                weak=True,
            )
            for mark in ("===", "***", "###", "---", "## ")
        ),
        *(
            Pattern("fact", START + regex, literal=literal, facts={TESTS: 1}, weak=True)
            for literal, regex in (
                (" test session starts ", r"=+ test session starts =+"),
                (" tests in ", r"Ran \d{1,7} tests in \d"),
                ("=== RUN ", r"=== RUN "),
            )
        ),
    ),
)
