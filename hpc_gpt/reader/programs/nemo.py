"""NVIDIA NeMo: 1.x on Lightning's bar, 2.x on lines of its own.

The bar's count is one more than `global_step`, which has only three digits (9e+3): the count is read. A NaN is printed
as `nan.0`. The configuration is printed as YAML, one setting per line. `train_step_timing in s` is the time of the last
step, after a synchronisation.
"""

from hpc_gpt.reader.lines.pattern import CLOCK, INT, LINE_START, NUMBER, STEP, Dialect, Pattern, figures, line, settings

_NUMBER = rf"(?:{NUMBER}(?:\.\d)?)"
_MODEL = {
    "seq_length": "seq", "num_attention_heads": "heads", "hidden_size": "hidden", "ffn_hidden_size": "ffn",
    "num_query_groups": "kv_heads", "kv_channels": "head_dim", "num_moe_experts": "experts",
    "moe_router_topk": "experts_per_token", "moe_ffn_hidden_size": "expert_ffn",
    "moe_shared_expert_intermediate_size": "shared_ffn", "q_lora_rank": "q_lora", "kv_lora_rank": "kv_lora",
    "qk_head_dim": "qk_nope", "qk_pos_emb_head_dim": "qk_rope", "v_head_dim": "v_head", "mtp_num_layers": "mtp_layers",
}  # fmt: skip
_LAYOUT = {
    "micro_batch_size": "micro_batch", "global_batch_size": "global_batch", "num_layers": "layers",
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp", "encoder_seq_length": "seq", "num_nodes": "nodes", "devices": "gpus_per_node",
}  # fmt: skip


# Without a `]` the bar is cut: a figure with a comma after it is whole.
_BAR = r"\bEpoch 0[^|%\n]{0,20}(?:\d{1,3}%)?\|[^|\n]{0,400}\| *" + STEP
_REST = r"(?=[^\]\n]{0,3000}(?:\]|$))"
_IN_BAR = "loss=reduced_train_loss step_s=train_step_timing_in_s grad_norm lr loss_eval=val_loss"
# The step time and the validation loss can end the line, where a cut is not noticed.
_COLUMNS = """
    lr global_batch=global_batch_size consumed_samples step=global_step loss=reduced_train_loss
    step_s$=train_step_timing_in_s grad_norm loss_eval$=val_loss tokens_per_s_gpu=tokens_per_sec_per_gpu
    balance_loss=load_balancing_loss|seq_load_balancing_loss|global_load_balancing_loss z_loss tflops=TFLOPS_per_GPU
    memory_allocated_bytes=max_memory_allocated memory_reserved_bytes=max_memory_reserved
"""


DIALECT = Dialect(
    name="nemo",
    engine="nemo",
    patterns=(
        figures(
            rf"{_BAR}/(?P<steps_planned>\d{{1,12}}) \[{CLOCK}<{_REST}",
            "reduced_train_loss",
            _IN_BAR + " balance_loss=load_balancing_loss z_loss",
            until="]",
        ),
        Pattern("progress", rf"{_BAR}/\d{{1,12}} \[(?P<elapsed_s>{CLOCK})<{_REST}", literal="reduced_train_loss"),
        figures(
            r"\bTraining epoch \d{1,9}, iteration (?P<before>\d{1,12})/\d{1,12}(?= \|)"
            # TFLOPs after the samples end the line.
            rf"(?=(?:[^\n]{{0,3000}}?\| consumed_samples: \d{{1,15}} \| TFLOPS_per_GPU: (?P<tflops>{_NUMBER})\s*$)?)",
            "Training epoch ",
            _COLUMNS,
        ),
        # The configuration as YAML.
        *(
            Pattern("fact", LINE_START + rf"{name}: {value}(?=\s*$)", facts=facts, weak=True)
            for name, value, facts in (
                ("precision", r"'?(?P<dtype>(?:bf)?16(?:-mixed)?|32)'?", {}),
                ("activations_checkpoint_granularity", "(?P<recompute>selective|full)", {}),
                ("activations_checkpoint_granularity", "null", {"recompute": "none"}),
                ("activation", "'?(?:fast-)?swiglu'?", {"swiglu": True}),
                ("gated_linear_unit", "true", {"swiglu": True}),
                ("position_embedding_type", r"'?(?P<position_embedding>\w{1,24})'?", {}),
                ("share_embeddings_and_output_weights", "[Ff]alse", {"untied_embeddings": True}),
                ("bf16", "true", {"dtype": "bf16"}),
                # fp8 is for the matrix products; everything else has `precision`.
                ("fp8", "true", {"fp8_products": 1}),
            )
        ),
        # Which of a list of layers have experts is not read.
        Pattern(
            "fact",
            LINE_START + r"moe_layer_freq:(?: \[[^\n]{1,4000})?(?=\s*$)",
            literal="moe_layer_freq:",
            facts={"layers_listed": 1},
            weak=True,
        ),
        *settings("NAME: FIELD", _MODEL | _LAYOUT, LINE_START, weak=True),
        # NeMo 2 prints its configuration as Python: a name, `=`, a value and a comma on each line.
        *(
            Pattern(
                "fact",
                rf"^(?:[^=(]{{0,80}}?[\]:m])? {{4,60}}{name}=(?P<{fact}>{INT}),\s*$",
                weak=True,
            )
            for name, fact in _MODEL.items()
        ),
        line("fact", "Padded vocab_size: {vocab}, original vocab_size: {},"),
    ),
)
