"""nanoGPT, and llama2.c and wordplay after it. Its MFU is relative to the A100's 312 TFLOP/s on any GPU, and its P leaves out the positions.

For the first logged steps it prints an MFU of -100 %. A line is one step, timed after a synchronisation that only logged
steps have; its loss is that of the last micro-batch. Some copies print losses in bits a character, `BPC`.
"""

from hpc_gpt.reader.lines.pattern import END, INT, NUMBER, START, STEP, Dialect, Pattern, figures, has, line, settings

_OVERRIDDEN = {
    "block_size": "seq", "batch_size": "micro_batch", "n_layer": "layers", "n_head": "heads", "n_embd": "hidden",
}  # fmt: skip

_EVALUATION = rf"\bstep {STEP}(?=:){has('[:,] train loss ')}"

DIALECT = Dialect(
    name="nanogpt",
    engine="nanogpt",
    flags=(
        "nanoGPT's printed MFU is relative to the A100's 312 TFLOP/s on any GPU",
        "nanoGPT's count of parameters leaves the positions out",
    ),
    patterns=(
        figures(
            rf"(?<!; )\biter {STEP}(?=:){has('[:,] loss ', rf'[:,] time {NUMBER}ms')}",
            "iter ",
            "loss_bits[BPC]=loss loss$ step_ms[ms]=time mfu_percent+[%]=mfu",
        ),
        figures(
            START + rf"{STEP}(?= \|)" + has(rf"\| {NUMBER}ms\b", r"\| mfu "),
            "| mfu ",
            "loss$ lr$ step_ms[ms]= mfu_percent+[%]=mfu",
        ),
        # wordplay's, with milliseconds and the job's millions of tokens per second.
        figures(rf"\bstep={STEP}(?= )", " mtps=", "loss step_ms=dt tokens_per_us=mtps mfu_percent+=mfu"),
        figures(_EVALUATION + has(" BPC"), "val loss ", "loss_eval_bits[BPC]=val_loss", kind="eval"),
        figures(_EVALUATION + r"(?![^\n]* BPC)", "val loss ", "loss_eval$=val_loss", kind="eval"),
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
