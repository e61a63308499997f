"""torchtitan. Its `tps` (before August 2024 `wps`) and its TFLOPs are per GPU; it prints no step time.

`memory` is the peak that the allocator reserved since the line before. In 2025 a header line gives local and global batch
in sequences; later versions give tokens per rank and per step. Validation has its own lines.
"""

from hpc_gpt.reader.lines.pattern import INT, NUMBER, STEP, Dialect, Pattern, figures

_MESHES = ("dp", "dp tp", "pp dp", "pp dp tp", "dp cp", "dp cp tp", "pp dp cp tp", "tp", "pp", "pp tp")
_MESH = r"(?=[^\n]{{0,300}}\b{name}=(?P<{group}>\d{{1,6}})(?=,|\s*$))"
_MODEL = r"\bBuilding \S{1,64} \S{1,64} with \w{0,40}ModelArgs\("
_ARGUMENTS = (
    "hidden=dim layers=n_layers heads=n_heads kv_heads=n_kv_heads head_dim experts=num_experts experts_per_token=top_k"
    " vocab=vocab_size"
)

DIALECT = Dialect(
    name="torchtitan",
    dtype="bf16",
    engine="torchtitan",
    patterns=(
        # The last step has a second line, of the final step. A loss below 0: the rank has none. torchtitan has no losses
        # of a mixture: its forks print them.
        figures(
            rf"(?<!validate )\bstep: {{1,8}}{STEP}(?= {{2}}[^\n]{{0,400}} {{2}}(?:tps|wps): )",
            "  loss: ",
            "loss+ grad_norm lr tflops tokens_per_s_gpu=tps|wps mfu_percent[%]=mfu memory_reserved_gib[GiB(]=memory"
            " balance_loss=aux_loss|load_balance_loss|load_balancing_loss z_loss",
        ),
        Pattern("start", r"\b[\w.]{1,80} - INFO - Starting job: "),
        figures(
            rf"\bvalidate step: {{1,8}}{STEP} {{2}}(?=loss: {{1,8}}[^ \n]{{1,40}} {{2}}memory: )",
            "validate step: ",
            "loss_eval+=loss",
            kind="eval",
        ),
        Pattern("fact", rf"\bModel (?P<name>\S{{1,64}} \S{{1,64}}) size: (?P<params>{INT}) total parameters\b"),
        Pattern(
            "fact",
            rf"\bTotal parameter count: dense (?P<params_dense>{INT}), sparse (?P<params_sparse>{INT}), "
            rf"(?:vision {INT}, )?active (?P<params_active>{INT})\s*$",
        ),
        Pattern("fact", r"\bModel flux \S", facts={"diffusion": 1}),
        Pattern("fact", r"\bSwapped to Float8Linear layers\b", facts={"fp8_products": 1}),
        Pattern("fact", r"\bmixed_precision_param\W{1,6}(?P<dtype>float32|bfloat16|float16)\b"),
        Pattern(
            "fact", rf"\b(?:CUDA|XPU|HPU|GPU) capacity: (?P<device>[^\n]{{1,80}}?)(?: \(\d+\))? with {NUMBER}GiB memory"
        ),
        Pattern(
            "fact",
            rf"\blocal batch size:? (?P<micro_batch>{INT}), global batch size (?P<global_batch>{INT}), "
            rf"(?:gradient accumulation steps (?P<micro_batches>{INT}), )?sequence length (?P<seq>{INT}),"
            rf"(?: total steps (?P<steps_planned>{INT}) )?",
        ),
        figures(_MODEL, "ModelArgs(", _ARGUMENTS, kind="fact"),
        Pattern(
            "argument", _MODEL + r"[^\n]{0,3000}?\b(?P<key>sliding_window(?:_size)?)=(?P<value>\d{1,9}|None)(?=[,)])"
        ),
        Pattern("fact", _MODEL + r"(?![^\n]{0,3000}\b\w{0,20}weight_tying=True)", facts={"untied_embeddings": 1}),
        Pattern(
            "fact",
            rf"\b(?P<global_batch_tokens>{INT}) tokens per train step, "
            rf"(?:gradient accumulation steps (?P<micro_batches>{INT}), )?maximum context length (?P<seq>{INT}), "
            rf"total steps (?P<steps_planned>{INT}) ",
        ),
        Pattern(
            "fact",
            r"\bBuilding device mesh with parallelism: "
            + "".join(_MESH.format(name=name, group=name) for name in ("pp", "cp", "tp"))
            # Replicas x shards ranks split the batch: dp is dp_shard only if dp_replicate is 1.
            + r"(?:(?=[^\n]{0,300}\bdp_replicate=1, dp_shard=(?P<dp>\d{1,6}),))?"
            + r"[^\n]{0,200}\bep=(?P<ep>\d{1,6})(?:, etp=(?P<etp>\d{1,6}))?",
        ),
        # The axes of a mesh are in the order of their sizes. Each set of axes has its own pattern; an axis of size 1 is
        # left out.
        *(
            Pattern(
                "fact",
                r"-D device mesh with \["
                + ", ?".join("'dp(?:_shard|_replicate)?'" if axis == "dp" else f"'{axis}'" for axis in axes)
                + r"\], \["
                + ", ?".join(rf"(?P<{axis}>\d{{1,6}})" for axis in axes)
                + r"\]",
                facts={axis: 1 for axis in ("tp", "pp", "dp", "cp") if axis not in axes},
            )
            for axes in map(str.split, _MESHES)
        ),
        Pattern(
            "fact", r"\bApplied (?:full|FullAC) activation checkpointing to the model", facts={"recompute": "full"}
        ),
        Pattern(
            "fact",
            r"\bApplied (?:selective|SelectiveAC) activation checkpointing to the model",
            facts={"recompute": "selective"},
        ),
    ),
)
