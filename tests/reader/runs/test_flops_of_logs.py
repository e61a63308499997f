"""TFLOPs, MFU and rates of another program's log: by the shape that was read, or absent."""

from dataclasses import replace

import pytest

from hpc_gpt.core.formulas import tflops_hardware, tflops_model
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.figures import add_figures
from hpc_gpt.report.tables import all_columns, as_block, records_text
from tests.reader.made_logs import dump, iterations, run_of

FLOPS = ("tflops_seed", "tflops_hardware", "tflops_model")
# A grouped-query model with a gate, heads wider than hidden / heads, and an embedding of its own for the output.
GATED = {
    "world_size": 8, "data_parallel_size": 8, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "hidden_size": 1024, "num_layers": 12, "num_attention_heads": 16, "num_query_groups": 4, "kv_channels": 96,
    "group_query_attention": True, "ffn_hidden_size": 3584, "swiglu": True, "padded_vocab_size": 32000,
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "seq_length": 2048,
    "max_position_embeddings": 2048, "normalization": "RMSNorm", "disable_bias_linear": True,
    "micro_batch_size": 2, "bf16": True, "params_dtype": "torch.bfloat16",
}  # fmt: skip
LAYER = 1024 * 96 * (16 + 4 + 4 + 16)  # weights of attention
MLP = 3 * 1024 * 3584
NORMS = 12 * 2 * 1024 + 1024
TABLES = 2 * 32000 * 1024
IDLE = NORMS + 32000 * 1024  # what multiplies no token
SIZES = {"seq": 2048, "global_batch": 16, "gpus": 8, "step_s": 0.1, "layers": 12}


def log_of(*more, ms=100.0, **changed):
    """A run with the gated model's dump, some arguments changed, and twelve steps of 0.1 s."""
    lines = [line for line in dump(**{**GATED, **changed}) if "float16 for" not in line]
    return run_of(lines, *more, iterations(1, 12, ms))


@pytest.mark.parametrize(("granularity", "recompute"), [("full", "full"), ("None", "none"), ("selective", "selective")])
def test_every_formula_is_of_the_shape_that_was_read(granularity, recompute):
    record = log_of(recompute_granularity=granularity).record
    params = 12 * (LAYER + MLP) + NORMS + TABLES
    assert record.params == params
    expected = tflops_hardware(
        **SIZES, hidden=1024, vocab=32000, recompute=recompute, layer_weights=LAYER + MLP, attention_width=16 * 96
    )
    assert record.tflops_hardware == pytest.approx(expected)
    assert record.tflops_model == pytest.approx(tflops_model(**SIZES, hidden=16 * 96, params=params - IDLE))
    # Of both formulas only what multiplies a token counts: the input embedding does not.
    assert (record.tflops_hardware > record.tflops_model) is (recompute != "none")
    assert not record.flags


@pytest.mark.parametrize(
    ("stated", "recompute"),
    [
        ({"recompute_modules": "['layernorm', 'moe_act']"}, "layernorm,moe_act"),
        ({"recompute_modules": "['mlp']"}, "mlp"),
        ({"recompute_modules": "['core_attn']"}, "selective"),
        ({"recompute_modules": "['of_another_model']"}, "selective"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4}, "full"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, "1/4"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 12}, "full"),
    ],
)
def test_a_log_states_what_modules_or_share_is_recomputed(stated, recompute):
    record = log_of(**{"recompute_granularity": "selective", **stated}).record
    none = log_of(recompute_granularity="None").record
    assert record.recompute == recompute
    # The weights of the MLP alone are not in the record of another program.
    assert (record.tflops_hardware is None) is (recompute == "mlp")
    assert record.tflops_seed == pytest.approx(none.tflops_seed * {"1/4": 6.5, "full": 8}.get(recompute, 6) / 6)


NONE = [
    {"window_size": "(4095, 0)"},
    {"window_size": "(-1, -1)"},
    {"window_size": "None", "loss_scale_window": "1000"},
    {'"model_type"': "mistral", '"sliding_window"': "null"},
    {'"sliding_window"': "4096", '"use_sliding_window"': "false"},
    {"attention_config": "[[['global'], 12]]", "sliding_window_width": "None"},
    {'"window_pattern"': '"L"'},
    {"attention_type:": "global", "sliding_window_size:": "0"},
    {"sparse_attention": "None", "attention_backend": "flash"},
]
WINDOWS = [
    ({"window_size": "(127, 0)"}, "window_size is (127, 0)"),
    ({'"sliding_window"': "1024"}, "sliding_window is 1024"),
    ({'"sliding_window"': "1024", '"use_sliding_window"': "true"}, "sliding_window is 1024"),
    ({'"attention_chunk_size"': "1024"}, "attention_chunk_size is 1024"),
    ({"attention_config": "[[['local', 'global'], 6]]"}, "attention_config is [[['local', 'global'], 6]]"),
    ({'"window_pattern"': '"SSSL"'}, 'window_pattern is "sssl"'),
    ({"attention_type:": "local_sliding", "sliding_window_size:": "0"}, "attention_type is local_sliding"),
    ({"sliding_window_size": "128"}, "sliding_window_size is 128"),
    ({"sparse_attention": "{'mode': 'fixed'}"}, "sparse_attention is {'mode': 'fixed'}"),
]


@pytest.mark.parametrize(("arguments", "limit"), [*((none, "") for none in NONE), *WINDOWS])
def test_attention_over_a_logs_window_gives_no_figures(arguments, limit):
    whole, record = add_figures(ROW), add_figures(replace(ROW, settings={"arguments": arguments}))
    if not limit:
        assert (record.tflops_model, record.flags) == (whole.tflops_model, [])
        return
    assert [record.tflops_hardware, record.tflops_model, record.mfu, record.hfu] == [None] * 4
    assert record.tflops_seed is not None, "it counts no attention"
    why = f"attention over a window ({limit})"
    assert record.sources["tflops_model"] == record.sources["tflops_hardware"] == f"null: {why}"
    assert f"{why}: TFLOPs are left out" in record.flags


def test_a_run_of_ours_counts_the_window_of_its_model():
    shape = {"window": 128, "window_layers": "SL"}
    record = add_figures(replace(ROW, settings={"model": shape}))
    spared = 12 * 12 * 1024 * 0.5 * (2048 - 128) * 2048 * 16 / 8e11
    assert add_figures(replace(ROW, settings={"model": {}})).tflops_model - record.tflops_model == pytest.approx(spared)
    words = {"model": {}, "engine": {"megatron_args": ["--window-size", "127,0"]}}
    assert add_figures(replace(ROW, settings=words)).tflops_model is None


EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "recompute_granularity": "None"}


@pytest.mark.parametrize(
    ("more", "layers", "ffn", "shared"),
    [
        ({}, 12, 3584, 0),
        ({"moe_ffn_hidden_size": 896, "moe_shared_expert_intermediate_size": 1792}, 12, 896, 1792),
        ({"moe_layer_freq": "2"}, 6, 3584, 0),
        ({"moe_layer_freq": "[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"}, 11, 3584, 0),
    ],
)
def test_of_a_mixture_a_token_uses_the_active_parameters(more, layers, ffn, shared):
    record = log_of(**{**EXPERTS, **more}).record
    expert, dense = 3 * 1024 * ffn, (12 - layers) * MLP
    apart = 12 * LAYER + NORMS + TABLES + dense + layers * (3 * 1024 * shared + 8 * 1024)
    assert record.params == apart + layers * 8 * expert
    active = apart + layers * 2 * expert
    assert record.settings["active"]["params"] == active
    assert record.tflops_model == pytest.approx(tflops_model(**SIZES, hidden=16 * 96, params=active - IDLE))
    assert f"{active:,} parameters that a token uses" in record.sources["tflops_seed"]
    assert record.tflops_seed == pytest.approx(6 * active * 2048 * 16 / (0.1 * 8e12))
    assert record.tflops_hardware == pytest.approx(record.tflops_model)


@pytest.mark.parametrize(
    "lacking",
    [
        {"moe_router_topk": None},
        {"num_experts": "[16]", "mlp_type": "residual", "topk": 1},
        {"multi_latent_attention": True},
        {"hybrid_override_pattern": "M-M*-"},
    ],
)
def test_without_what_a_token_uses_the_figures_are_absent(lacking):
    count = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1214562304"
    record = log_of(count, **{**EXPERTS, **lacking}).record
    assert record.params == 1214562304
    assert [getattr(record, name) for name in FLOPS] == [None] * 3
    assert record.sources["tflops_hardware"].startswith("null: ")


def test_a_rate_of_one_gpu_gives_flops_without_the_gpus():
    said = "[rank0]:2026-01-01 10:00:00,000 - root - INFO - "
    record = run_of(
        f"{said}Building llama3 1B with TransformerModelArgs(dim=1024, n_layers=12, n_heads=16, n_kv_heads=None, "
        "vocab_size=32000)",
        f"{said}Model llama3 1B size: 217,000,000 total parameters",
        f"{said}Trainer is initialized with local batch size 2, global batch size 16, sequence length 2048, "
        "total steps 20 (warmup 2)",
        *(
            f"{said}step: {step:2d}  loss:  4.1000  memory: 20.10GiB(30.00%)  tps: 40,000  mfu: 6.05%"
            for step in range(1, 13)
        ),
    ).record
    assert (record.gpus, record.tokens_per_s, record.tokens_per_s_gpu) == (None, None, 40_000)
    assert record.tflops_model == pytest.approx((6 * (217e6 - 32000 * 1024) + 12 * 12 * 1024 * 2048) * 40_000 / 1e12)
    table = records_text([record], columns=all_columns([record]))
    assert "Tokens/s per GPU" in table
    assert "40,000" in table
    assert "MFU printed" in table
    assert record.mfu_printed == pytest.approx(0.0605)
    assert "tokens/s per GPU  40,000" in as_block(record)
    # With the GPUs tokens/s say as much.
    assert "Tokens/s per GPU" not in records_text([log_of().record])


ROW = Record(
    gpus=8, global_batch=16, seq=2048, hidden=1024, layers=12, heads=16, vocab=32000, params=186_000_000,
    recompute="none", dtype="bf16", device="h100-80g", step_s=0.1,
)  # fmt: skip


COUNTED = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {}"


def test_an_exact_count_goes_before_a_shape_it_contradicts():
    record = log_of(COUNTED.format(412_345_678), recompute_granularity="full").record
    assert record.params == 412_345_678
    weights = (412_345_678 - TABLES) / 12
    sizes = {**SIZES, "hidden": 1024, "vocab": 32000, "attention_width": 16 * 96}
    assert record.tflops_hardware == pytest.approx(tflops_hardware(**sizes, recompute="full", layer_weights=weights))
    used = 412_345_678 - 32000 * 1024
    assert record.tflops_model == pytest.approx(tflops_model(**SIZES, hidden=16 * 96, params=used))


CONFIG = """\
Model config LlamaConfig {
  "hidden_size": 2048,
  "intermediate_size": 5632,
  "model_type": "%s",
  "num_attention_heads": 32,
  "num_hidden_layers": 22,
  "num_key_value_heads": 4,
  "tie_word_embeddings": false,
  "vocab_size": 32000
}""".splitlines()
WHOLE = 22 * (2048 * 64 * (32 + 4 + 4 + 32) + 3 * 2048 * 5632 + 2 * 2048) + 2048 + 2 * 32000 * 2048


def trainer_of(kind, trained, *more):
    lines = [line % kind if "%s" in line else line for line in CONFIG]
    return run_of(
        lines,
        "***** Running training *****",
        "  Num examples = 4,096",
        "  Instantaneous batch size per device = 4",
        "  Total train batch size (w. parallel, distributed & accumulation) = 32",
        "  Gradient Accumulation steps = 1",
        "  Total optimization steps = 128",
        f"  Number of trainable parameters = {trained:,}",
        *more,
        *(f"{{'loss': {5 - step / 100}, 'learning_rate': 1e-05, 'epoch': {step / 128:.4f}}}" for step in range(1, 9)),
    ).record


@pytest.mark.parametrize("trained", [WHOLE, WHOLE // 8, 4_505_600])
def test_a_known_architectures_configuration_has_the_parameters(trained):
    """1,100,048,384, whether all of them are counted, the share of one of 8 ranks, or an adapter's."""
    assert trainer_of("llama", trained).params == WHOLE == 1_100_048_384


def test_a_printed_mfu_above_the_peak_is_left_out():
    lines = [f"iter {step}: loss 4.{20 - step}, time 571.27ms, mfu 347.80%" for step in range(1, 9)]
    record = run_of(lines).record
    assert record.mfu_printed is None
    assert "mfu_printed would be 3.478, above 1: left out" in record.flags


def test_shapes_of_other_programs_configurations():
    """MaxText's, NanoTron's and NeMo's Llama of 22 layers, as each prints it."""
    sizes = {"hidden": 2048, "layers": 22, "heads": 32, "kv": 4, "ffn": 5632, "vocab": 32000}
    maxtext = [
        f"Config param {name}: {value}"
        for name, value in {
            "decoder_block": "llama2", "base_emb_dim": 2048, "base_num_decoder_layers": 22, "base_num_query_heads": 32,
            "base_num_kv_heads": 4, "base_mlp_dim": 5632, "vocab_size": 32000, "logits_via_embedding": False,
            "max_target_length": 2048, "global_batch_size_to_train_on": 64, "remat_policy": "full",
        }.items()
    ]  # fmt: skip
    maxtext += ["Num_devices: 8, shape (1, 1, 8, 1)", "number parameters: 1.100 billion"]
    maxtext += [
        f"completed step: {step}, seconds: 0.800, TFLOP/s/device: 130.1, Tokens/s/device: 20480.0, "
        f"total_weights: 131072, loss: 9.{20 - step}00"
        for step in range(9)
    ]
    tag = "06/02 10:45:51 [INFO|DP=0|PP=0|TP=0]:         "
    nanotron = [tag + "model_config=LlamaConfig(bos_token_id=1,"]
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )  # fmt: skip
    nanotron += [f"{tag} {name}={value}," for name, value in zip(names, sizes.values(), strict=True)]
    nanotron += [f"{tag} tie_word_embeddings=False,"]
    yaml = ("hidden_size", "num_layers", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
    nemo = [f"{name}: {value}" for name, value in zip(yaml, sizes.values(), strict=False)]
    nemo += ["activation: fast-swiglu", "position_embedding_type: rope", "share_embeddings_and_output_weights: false"]
    nemo += ["[NeMo I] Padded vocab_size: 32000, original vocab_size: 32000, dummy tokens: 0."]
    bar = "Epoch 0: 1%|1 | {}/900 [00:10<10:00, reduced_train_loss=3.{}, train_step_timing in s=1.200, lr=1e-5]"
    iteration = (
        "06/02 10:46:51 [INFO|DP=0|PP=0|TP=0]: iteration: {} / 500 | consumed_tokens: 12.6M | "
        "elapsed_time_per_iteration_ms: 985 | tokens_per_sec: 1.38M | tokens_per_sec_per_gpu: 133K | "
        "global_batch_size: 64 | lm_loss: 9.{} | lr: 0.0003 | model_tflops_per_gpu: 410 | grad_norm: 1.9"
    )
    assert run_of(maxtext).record.params == WHOLE
    assert run_of(nanotron, *(iteration.format(step, 20 - step) for step in range(1, 9))).record.params == WHOLE
    found = run_of(nemo, *(bar.format(step, 20 - step) for step in range(1, 9))).record
    assert found.params == pytest.approx(WHOLE, rel=1e-3), "biases and norms are not read"
    record = run_of(maxtext).record
    expected = {"hidden": 2048, "layers": 22, "seq": 2048, "global_batch": 64, "gpus": 8, "step_s": 0.8}
    weights = (WHOLE - 2 * 32000 * 2048 - 2048) / 22 - 2 * 2048
    flops = tflops_hardware(**expected, vocab=32000, recompute="full", layer_weights=weights, attention_width=2048)
    assert record.tflops_hardware == pytest.approx(flops)


MIXTURE = {
    "num_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 512, "moe_shared_expert_intermediate_size": 1024,
    "moe_layer_freq": f"[0, {', '.join('1' * 11)}]", "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1,
    "recompute_granularity": "None",
}  # fmt: skip


def mixture_of(printed: str = "", **changed):
    """A run of the gated model with experts in all but its first layer; `printed` ends its lines."""
    lines = [line for line in dump(**{**GATED, **MIXTURE, **changed}) if "float16 for" not in line]
    return run_of(lines, [line + printed for line in iterations(1, 12, 100.0)]).record


def test_a_mixture_is_counted_by_what_a_token_uses():
    record = mixture_of()
    expert, router, shared = 3 * 1024 * 512, 32 * 1024, 3 * 1024 * 1024
    assert record.params == 12 * LAYER + MLP + 11 * (32 * expert + router + shared) + NORMS + TABLES
    used = record.settings["active"]["params"]
    assert used == record.params - 11 * 28 * expert
    assert (record.params_active, record.ep, record.settings["etp"]) == (used, 4, 1)
    assert record.tflops_model == pytest.approx(tflops_model(**SIZES, hidden=16 * 96, params=used - IDLE))
    assert record.tflops_hardware == pytest.approx(record.tflops_model)
    assert record.tflops_seed == pytest.approx(6 * used * SIZES["seq"] * 16 / (0.1 * 8 * 1e12))
    assert not record.flags
