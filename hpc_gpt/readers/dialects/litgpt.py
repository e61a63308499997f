"""litgpt and lit-gpt. An `iter` is one micro-batch, and so is its time: no step time is taken from it.

Its training time includes evaluations and saves, so the steps are not timed by it either.

Of the lines of a step the first is read: its loss is that of the first micro-batch.
"""

from hpc_gpt.readers.pattern import INT, NUMBER, START, Dialect, Pattern, line

DIALECT = Dialect(
    name="litgpt",
    engine="litgpt",
    flags=("litgpt times micro-batches, not steps; its loss is of a step's first micro-batch",),
    patterns=(
        Pattern(
            "step",
            " iter time: ",
            rf"\biter \d{{1,12}} step (?P<step>\d{{1,12}}) \| loss train: (?P<loss>{NUMBER}), val: "
            rf"(?:(?P<loss_eval>{NUMBER})|n/a|None) \| iter time: {NUMBER} ms",
        ),
        Pattern(
            "step",
            ": loss ",
            rf"\biter \d{{1,12}}(?: \|)? step (?P<step>\d{{1,12}}): loss (?P<loss>{NUMBER}), (?:iter|train) time: {NUMBER} ?ms",
        ),
        # lit-llama counts micro-batches only.
        Pattern(
            "step", " time: ", rf"\biter \d{{1,12}}: loss (?P<loss>{NUMBER}), time: {NUMBER} ?ms(?:, speed: |\s*$)"
        ),
        line("eval", "iter {}: val loss {loss_eval}, val time: ", weak=True),
        line("eval", "step {}: val loss {loss_eval}, val time: ", weak=True),
        line("eval", "Final evaluation | val loss: {loss_eval} | val ppl: "),
        Pattern(
            "fact", "Loading model ", START + r"Loading model (?:'[^'\n]{1,400}' )?with \{'", facts={"engine": "litgpt"}
        ),
        Pattern("fact", "FLOPs not found for ", START + r"FLOPs not found for '(?P<device>[^'\n]{2,60})'"),
        *(
            Pattern(
                "fact",
                f"'{key}': ",
                rf"^(?=[^\n]{{0,6000}}'{mark}': )[^\n]{{0,6000}}?[{{ ]'{key}': (?P<{group}>\d{{1,9}})(?=[,}}])",
            )
            for mark, keys in (
                (
                    "padded_vocab_size",
                    {
                        "block_size": "seq",
                        "padded_vocab_size": "vocab",
                        "n_layer": "layers",
                        "n_head": "heads",
                        "n_query_groups": "kv_heads",
                        "n_embd": "hidden",
                    },
                ),
                (
                    "eval_iters",
                    {
                        "micro_batch_size": "micro_batch",
                        "gradient_accumulation_steps": "micro_batches",
                        "gradient_accumulation_iters": "micro_batches",
                        "devices": "gpus_said",
                    },
                ),
            )
            for key, group in keys.items()
        ),
        Pattern("fact", "Total parameters", START + rf"Total parameters:? (?P<params>{INT})(?=\s*$)", weak=True),
        Pattern("total", "| - Training Time", rf"\| - Training Time : (?P<whole_s>{NUMBER}) s(?=\s*$)"),
        Pattern("total", "Training time: ", START + rf"Training time: (?P<whole_s>{NUMBER})s(?=\s*$)", weak=True),
        Pattern(
            "memory", "Memory ", rf"\bMemory (?:used|Used {{1,6}}): (?P<memory_allocated_gb>{NUMBER}) GB", weak=True
        ),
    ),
)
