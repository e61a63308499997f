"""nanoGPT, and llama2.c and wordplay after it. Its MFU is relative to the A100's 312 TFLOP/s on any GPU, and its P leaves out the positions.

For the first logged steps it prints an MFU of -100 %. A line is one step, timed after a synchronisation that only logged
steps have; its loss is that of the last micro-batch. Some copies print losses in bits a character, `BPC`.
"""

from hpc_gpt.reader.lines.pattern import END, INT, NUMBER, START, Dialect, Pattern, has, later, line, named, settings

_OVERRIDDEN = {
    "block_size": "seq", "batch_size": "micro_batch", "n_layer": "layers", "n_head": "heads", "n_embd": "hidden",
}  # fmt: skip

_MFU = rf"(?!-){NUMBER}"


def _loss(name: str, group: str) -> str:
    """A lookahead for a loss, which some copies print in bits."""
    plain = later(name, group, r"(?=,|\s*$)")
    return later(name, f"{group}_bits", "(?= BPC)") + rf"(?:(?![^\n]* BPC){plain})?"


DIALECT = Dialect(
    name="nanogpt",
    engine="nanogpt",
    flags=(
        "nanoGPT's printed MFU is relative to the A100's 312 TFLOP/s on any GPU",
        "nanoGPT's count of parameters leaves the positions out",
    ),
    patterns=(
        Pattern(
            "step",
            rf"(?<!; )\biter (?P<step>\d{{1,12}})(?=:){has('[:,] loss ', rf'[:,] time {NUMBER}ms')}"
            + _loss("[:,] loss ", "loss")
            + later("[:,] time ", "step_ms", "(?=ms)")
            + later("[:,] mfu ", "mfu_percent", "(?=%)", _MFU),
        ),
        Pattern(
            "step",
            START
            + r"(?P<step>\d{1,12})(?= \|)"
            + has(rf"\| {NUMBER}ms\b", r"\| mfu ")
            + named(r"(?= \||\s*$)", loss=r"\| loss ", lr=r"\| lr ")
            + later(r"\| ", "step_ms", "(?=ms)")
            + later(r"\| mfu ", "mfu_percent", "(?=%)", _MFU),
            literal="| mfu ",
            head=START + r"\d{1,12} \|",
        ),
        # wordplay's, with milliseconds and the job's millions of tokens per second.
        Pattern(
            "step",
            rf"\bstep=(?P<step>\d{{1,12}})(?= ){has(rf' dt={NUMBER} ')}"
            + named(r"(?= )", loss=" loss=", step_ms=" dt=", tokens_per_us=" mtps=")
            + later(" mfu=", "mfu_percent", r"(?=\s)", _MFU),
            literal=" mtps=",
        ),
        Pattern(
            "eval",
            rf"\bstep (?P<step>\d{{1,12}})(?=:){has('[:,] train loss ')}" + _loss("[:,] val loss ", "loss_eval"),
            literal="val loss ",
        ),
        Pattern("fact", START + rf"number of parameters: (?P<params_millions>{NUMBER})M\s*$", weak=True),
        # The optimizer's parameters in two groups: all parameters, exactly.
        *(
            Pattern(
                "fact",
                START + rf"num {name}decayed parameter tensors: {INT}, with (?P<{group}>{INT}) parameters" + END,
                weak=True,
            )
            for name, group in (("", "params_decayed"), ("non-", "params_not_decayed"))
        ),
        line("fact", "tokens per iteration will be: {global_batch_tokens}"),
        # The example configurations are echoed as `block_size = 1024`, followed by what the command line overrides.
        *settings("Overriding: NAME = FIELD", _OVERRIDDEN, START),
        Pattern("save", START + r"saving checkpoint to \S"),
    ),
)
