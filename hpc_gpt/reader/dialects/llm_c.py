"""llm.c and its PyTorch reference. The first step includes set-up. The MFU is -100 % on a GPU that its table lacks."""

from hpc_gpt.reader.pattern import LINE_START, NUMBER, START, Dialect, Pattern, later, line, settings

_STEP = r"\bstep {1,8}(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12})"
_HEADER = {"vocab_size": "vocab", "num_heads": "heads", "channels": "hidden", "num_parameters": "params"}
_Z = r"(?: ?\((?:z )?[+-]?(?:\d{1,9}\.\d\d|nan|inf)z?\))?"


def _row(name: str, group: str, number: str = r"\d{1,20}") -> Pattern:
    """A row of the parameter table that llm.c prints first."""
    return Pattern("fact", START + rf"\| {name} {{1,24}}\| (?P<{group}>{number}) {{0,60}}\|", literal=f"| {name}")


DIALECT = Dialect(
    name="llm_c",
    engine="llm.c",
    patterns=(
        Pattern(
            "step",
            rf"{_STEP} \|(?=[^\n]{{0,400}}\d tok/s)"
            + later(r" loss {1,12}", "loss", rf"(?={_Z} ?\|)")
            + later(r"\| norm {1,12}", "grad_norm", rf"(?={_Z} ?\|)")
            + later(r"\| lr ", "lr")
            + later(r"\| \(? {0,8}", "step_ms", r"(?= ms \|)")
            + later(r"\| {1,8}", "mfu_percent", r"(?=% [\w ]{1,20} MFU \|)", r"\d{1,3}\.\d")
            + later(r"\| {1,8}", "tokens_per_s", "(?= tok/s)"),
            literal=" tok/s",
        ),
        Pattern(
            "step",
            rf"{_STEP}: train loss (?P<loss>{NUMBER})(?: \(acc {NUMBER}\))?(?: norm (?P<grad_norm>{NUMBER}))?"
            rf"(?: lr (?P<lr>{NUMBER}))? \((?P<step_ms>{NUMBER}) ms, (?P<tokens_per_s>{NUMBER}) tok/s\)",
        ),
        line("step", "step {step}: train loss {loss} (took {step_ms} ms)", START),
        Pattern("step", START + rf"s:(?P<step>\d{{1,12}}) trl:(?P<loss>{NUMBER})(?= lr:|\s*$)"),
        line("eval", "val loss {loss_eval}", LINE_START, weak=True),
        line("eval", "s:{step} tel:{loss_eval}", START),
        _row("micro batch size B", "micro_batch"),
        _row("sequence length T", "seq"),
        _row("total batch size", "global_batch_tokens"),
        _row("vocab_size V", "vocab_unpadded"),
        _row("padded_vocab_size Vp", "vocab"),
        _row("num_layers L", "layers"),
        _row("num_heads NH", "heads"),
        _row("channels C", "hidden"),
        _row("num_parameters", "params"),
        _row("num_processes", "gpus"),
        _row("zero_stage", "zero_stage"),
        # The header of the CPU's and the first CUDA version.
        *settings("NAME: FIELD", _HEADER, LINE_START, weak=True),
        _row("device", "device", r"[^|\n]{1,50}?"),
        Pattern("fact", START + r"\| precision {1,24}\| BF16 {0,60}\|", facts={"dtype": "bf16"}),
        line("fact", "=> setting grad_accum_steps={micro_batches}", START),
        line("memory", "peak memory consumption: {memory_allocated_mib} MiB", START, weak=True),
    ),
)
