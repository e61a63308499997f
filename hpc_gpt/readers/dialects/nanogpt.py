"""nanoGPT, and llama2.c after it. Its MFU is relative to the A100's 312 TFLOP/s on any GPU, and its P leaves out the positions.

For the first logged steps it prints an MFU of -100 %. A line is one step, timed after a synchronisation that only logged
steps have; its loss is that of the last micro-batch. Some copies print losses in bits a character, `BPC`.
"""

from hpc_gpt.readers.pattern import NUMBER, START, Dialect, Pattern, line, settings

_OVERRIDDEN = {
    "block_size": "seq", "batch_size": "micro_batch", "n_layer": "layers", "n_head": "heads", "n_embd": "hidden",
}  # fmt: skip

DIALECT = Dialect(
    name="nanogpt",
    engine="nanogpt",
    flags=(
        "nanoGPT's printed MFU is of the A100's 312 TFLOP/s whatever the GPU",
        "nanoGPT's count of parameters leaves the positions out",
    ),
    patterns=(
        Pattern(
            "step",
            ": loss ",
            rf"(?<!; )\biter (?P<step>\d{{1,12}}): loss (?:(?P<loss_bits>{NUMBER}) BPC|(?P<loss>{NUMBER})), time (?P<step_ms>{NUMBER})ms"
            rf"(?:, mfu (?:-100\.00|(?P<mfu_percent>{NUMBER}))%)?",
        ),
        Pattern(
            "step",
            "ms | mfu ",
            START
            + rf"(?P<step>\d{{1,12}}) \| loss (?P<loss>{NUMBER}) \| lr (?P<lr>{NUMBER}) \| (?P<step_ms>{NUMBER})ms \| mfu "
            rf"(?:-100\.00|(?P<mfu_percent>{NUMBER}))%",
        ),
        Pattern(
            "eval",
            ", val loss ",
            rf"\bstep (?P<step>\d{{1,12}}): train loss {NUMBER}(?P<of> BPC)?, val loss "
            rf"(?(of)(?P<loss_eval_bits>{NUMBER}) BPC|(?P<loss_eval>{NUMBER}))(?=\s*$)",
        ),
        Pattern(
            "fact",
            "number of parameters: ",
            START + rf"number of parameters: (?P<params_millions>{NUMBER})M\s*$",
            weak=True,
        ),
        line("fact", "tokens per iteration will be: {global_batch_tokens}"),
        # The example configurations are echoed as `block_size = 1024`, followed by what the command line overrides.
        *settings("Overriding: NAME = FIELD", _OVERRIDDEN, START),
        Pattern("save", "saving checkpoint to ", START + r"saving checkpoint to \S"),
    ),
)
