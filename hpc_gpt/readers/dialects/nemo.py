"""NVIDIA NeMo: 1.x on Lightning's bar, 2.x on lines of its own.

The bar's count is one more than `global_step`, which has only three digits (9e+3): the count is read. A NaN is printed
as `nan.0`. The configuration is printed as YAML, one setting per line. `train_step_timing in s` is the time of the last
step, after a synchronisation.
"""

from hpc_gpt.readers.pattern import CLOCK, INT, LINE_START, NUMBER, Dialect, Pattern, later

_NUMBER = rf"(?:{NUMBER}(?:\.0)?)"


def _entry(key: str, group: str) -> str:
    return later(f"[ ,]{key}=", group, r"(?=[,\]])", _NUMBER, r"[^\]\n]{0,3000}?")


def _column(key: str, group: str) -> str:
    """A column. The step time and the validation loss can end the line, where a cut cannot be noticed."""
    end = r"(?= \||\s*$)" if group in ("step_s", "loss_eval") else r"(?= \|)"
    return later(rf"\| {key}: ", group, end, _NUMBER, r"[^\n]{0,3000}?")


DIALECT = Dialect(
    name="nemo",
    engine="nemo",
    patterns=(
        Pattern(
            "step",
            "reduced_train_loss",
            r"\bEpoch 0[^|%\n]{0,20}(?:\d{1,3}%)?\|[^|\n]{0,400}\| *"
            rf"(?P<step>\d{{1,12}})/(?P<steps_planned>\d{{1,12}}) \[{CLOCK}<"
            + _entry("reduced_train_loss", "loss")
            + _entry("train_step_timing in s", "step_s")
            + _entry("grad_norm", "grad_norm")
            + _entry("lr", "lr")
            + _entry("val_loss", "loss_eval")
            # Without a `]` the bar is cut: what a comma follows is whole.
            + r"[^\]\n]{0,3000}(?:\]|$)",
        ),
        Pattern(
            "progress",
            "reduced_train_loss",
            r"\bEpoch 0[^|%\n]{0,20}(?:\d{1,3}%)?\|[^|\n]{0,400}\| *"
            rf"(?P<step>\d{{1,12}})/\d{{1,12}} \[(?P<elapsed_s>{CLOCK})<[^\]\n]{{0,3000}}(?:\]|$)",
        ),
        Pattern(
            "step",
            "Training epoch ",
            r"\bTraining epoch \d{1,9}, iteration (?P<before>\d{1,12})/\d{1,12}(?= \|)"
            + _column("lr", "lr")
            + _column("global_batch_size", "global_batch")
            + _column("consumed_samples", "consumed_samples")
            + _column("global_step", "step")
            + _column("reduced_train_loss", "loss")
            + _column("train_step_timing in s", "step_s")
            + _column("grad_norm", "grad_norm")
            # After the samples they end the line.
            + rf"(?=(?:[^\n]{{0,3000}}?\| (?P<of>consumed_samples: \d{{1,15}} \| )?TFLOPS_per_GPU: (?P<tflops>{_NUMBER})"
            + r"(?(of)(?= \||\s*$)|(?= \|)))?)"
            + _column("tokens_per_sec_per_gpu", "tokens_per_s_gpu")
            + _column("max_memory_allocated", "memory_allocated_bytes")
            + _column("max_memory_reserved", "memory_reserved_bytes")
            + _column("val_loss", "loss_eval"),
        ),
        # The configuration as YAML.
        *(
            Pattern("fact", f"{name}: ", LINE_START + rf"{name}: {value}(?=\s*$)", facts=facts, weak=True)
            for name, value, facts in (
                ("precision", r"'?(?P<dtype>(?:bf)?16(?:-mixed)?|32)'?", {}),
                ("activations_checkpoint_granularity", "(?P<recompute>selective|full)", {}),
                ("activations_checkpoint_granularity", "null", {"recompute": "none"}),
                ("activation", "'?(?:fast-)?swiglu'?", {"swiglu": True}),
                ("position_embedding_type", r"'?(?P<position_embedding>\w{1,24})'?", {}),
                ("share_embeddings_and_output_weights", "[Ff]alse", {"untied_embeddings": True}),
                ("bf16", "true", {"dtype": "bf16"}),
                # Of the matrix products; `precision` is that of the rest.
                ("fp8", "true", {"fp8_products": 1}),
            )
        ),
        *(
            Pattern("fact", f"{name}: ", LINE_START + rf"{name}: (?P<{fact}>{INT})(?=\s*$)", weak=True)
            for name, fact in (
                ("micro_batch_size", "micro_batch"),
                ("global_batch_size", "global_batch"),
                ("tensor_model_parallel_size", "tp"),
                ("pipeline_model_parallel_size", "pp"),
                ("context_parallel_size", "cp"),
                ("encoder_seq_length", "seq"),
                ("seq_length", "seq"),
                ("num_layers", "layers"),
                ("num_attention_heads", "heads"),
                ("hidden_size", "hidden"),
                ("ffn_hidden_size", "ffn"),
                ("num_query_groups", "kv_heads"),
                ("kv_channels", "head_dim"),
                ("num_moe_experts", "experts"),
                ("moe_router_topk", "experts_per_token"),
                ("num_nodes", "nodes"),
                ("devices", "gpus_per_node"),
            )
        ),
        # NeMo 2 prints its configuration as Python: a name, `=`, a value and a comma on each line.
        *(
            Pattern(
                "fact", f" {name}=", rf"^(?:[^=(]{{0,80}}?[\]:m])? {{4,60}}{name}=(?P<{fact}>{INT}),\s*$", weak=True
            )
            for name, fact in (
                ("num_attention_heads", "heads"),
                ("hidden_size", "hidden"),
                ("ffn_hidden_size", "ffn"),
                ("num_query_groups", "kv_heads"),
                ("kv_channels", "head_dim"),
                ("num_moe_experts", "experts"),
                ("moe_router_topk", "experts_per_token"),
                ("seq_length", "seq"),
            )
        ),
        Pattern("fact", "Padded vocab_size: ", rf"\bPadded vocab_size: (?P<vocab>{INT}), original vocab_size: {INT},"),
    ),
    specimen="""\
Epoch 0:   1%|          | 795/77225 [9:41:49<878:35:39, 41.68s/it, loss=3.1, v_num=, reduced_train_loss=3.707, global_step=702.5, consumed_samples=1.17e+6]
Epoch 0: :   3%|▎         | 9000/301500 [1:16:33<55:11:37, v_num=0-56, reduced_train_loss=nan.0, global_step=9e+3, consumed_samples=6.7e+5, train_step_timing in s=0.977, val_loss=7.184]
Training epoch 0, iteration 120/149 | lr: 3e-05 | consumed_samples: 121 | global_batch_size: 1 | global_step: 120 | reduced_train_loss: 1.399 | train_step_timing in s: 0.03146 | val_loss: 4.257
Training epoch 0, iteration 74/99 | lr: 1.668e-05 | global_batch_size: 128 | global_step: 74 | max_memory_reserved: 64832859021 | max_memory_allocated: 62130635558 | reduced_train_loss: 11.94 | train_step_timing in s: 8.541 | TFLOPS_per_GPU: 817.8 | consumed_samples: 9600
 0:                 hidden_size=6144,
 0: [NeMo I 2024-10-10 11:14:05 nemo_logging:393] Padded vocab_size: 32635, original vocab_size: 32635, dummy tokens: 0.
  seq_length: 4096
  bf16: true
  fp8: true
  micro_batch_size: 2
  precision: bf16-mixed
  activations_checkpoint_granularity: selective
""",
    seen="NVIDIA/NeMo-Framework-Launcher/issues/55; NVIDIA-NeMo/Speech/issues/7957; NVIDIA-BioNeMo/bionemo-recipes/pull/740",
)
