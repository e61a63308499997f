"""Dumps of arguments: which lines are some, and what they mean in each version."""

from __future__ import annotations

import pytest

from hpc_gpt.readers.dialects.gpt_neox import interpret as interpret_neox
from hpc_gpt.readers.dialects.megatron_arguments import interpret
from hpc_gpt.readers.pattern import Arguments, quotient
from hpc_gpt.readers.runs.draft import asked_at
from tests.readers.dialects.reading import facts_of, read_text


def arguments(text: str) -> dict[str, str]:
    return {key: value for key, (value, _) in read_text(text).arguments.items()}


LOGGERS = (
    "2024-03-05 10:11:12,123 | INFO | a.very.long.logger.name.of.a.module:run:1234 | host-12.example.org | pid=1234 | ",
    "[2024-03-05 10:11:12,123][megatron.training.arguments][INFO][rank0][node r7i6n2.cluster.example.org] - ",
    "2024-03-05 10:11:12 ",
)


@pytest.mark.parametrize("before", ["", "0: ", "[default0]:", "[rank0]:", "[2026-01-01 00:00:00] ", *LOGGERS])
def test_lines_with_dots_without_and_with_one(before: str) -> None:
    dump = (
        "  hidden_size ..................................... 9216",
        "  apply_residual_connection_post_layernorm  False",
        "  deepspeed_activation_checkpointing  True",
        "  use_tokenizer_model_from_checkpoint_args_of_them . True",
        "  data_path ....................................... ['/a b/c', 'x ... y']",
    )
    assert arguments("\n".join(before + line for line in dump)) == {
        "hidden_size": "9216",
        "apply_residual_connection_post_layernorm": "False",
        "deepspeed_activation_checkpointing": "True",
        "use_tokenizer_model_from_checkpoint_args_of_them": "True",
        "data_path": "['/a b/c', 'x ... y']",
    }


@pytest.mark.parametrize(
    "line",
    [
        "> building GPT2BPETokenizer tokenizer ...",
        "> setting random seeds to 1234 ...",
        "    reading sizes...",
        "------------------------ arguments ------------------------",
        "cpu_adam ............... [NO] ....... [OKAY]",
        "[2021-05-25 22:30:04,196] [INFO] [config.py:752:print]   world_size ................... 16",
        "[2021-05-25 22:30:04,196] [INFO] [config.py:752:print]   train_micro_batch_size_per_gpu  48",
    ],
)
def test_lines_that_are_none(line: str) -> None:
    assert arguments(line) == {}


def test_neox_tells_what_is_updated() -> None:
    text = (
        "  hidden_size ..................... 6144........................updated\n"
        "  optimizer ....................... {'type': 'Adam', 'params': {'lr': 9.7e-05, 'betas': [0.9, 0.95]}}updated\n"
        "  log_interval .................... 100.........................default\n"
        "  train_micro_batch_size_per_gpu_of_all  4..................................default"
    )
    assert arguments(text) == {
        "hidden_size": "6144",
        "optimizer": "{'type': 'Adam', 'params': {'lr': 9.7e-05, 'betas': [0.9, 0.95]}}",
        "log_interval": "100",
        "train_micro_batch_size_per_gpu_of_all": "4",
    }
    assert list(read_text(text).dialects) == ["gpt_neox"]


def test_2021() -> None:
    found = interpret(
        {
            "world_size": "64",
            "tensor_model_parallel_size": "4",
            "pipeline_model_parallel_size": "16",
            "data_parallel_size": "1",
            "micro_batch_size": "4",
            "global_batch_size": "1024",
            "hidden_size": "8192",
            "num_layers": "64",
            "num_attention_heads": "32",
            "seq_length": "1024",
            "ffn_hidden_size": "32768",
            "checkpoint_activations": "True",
            "fp16": "True",
            "bf16": "False",
            "params_dtype": "torch.float16",
            "loss_scale": "None",
            "train_iters": "1000",
            "train_samples": "None",
            "log_interval": "1",
            "virtual_pipeline_model_parallel_size": "None",
        }
    )
    assert found == {
        "engine": "megatron-lm",
        "gpus": 64,
        "tp": 4,
        "pp": 16,
        "dp": 1,
        "micro_batch": 4,
        "global_batch": 1024,
        "hidden": 8192,
        "layers": 64,
        "heads": 32,
        "seq": 1024,
        "ffn": 32768,
        "recompute": "full",
        "dtype": "fp16",
        "steps_planned": 1000,
        "log_interval": 1,
    }


def test_v115_calls_the_micro_batch_batch_size() -> None:
    given = {"world_size": "64", "model_parallel_size": "4", "batch_size": "48", "deepspeed": "True", "zero_stage": "3"}
    found = interpret(given)
    assert found == {
        "engine": "deepspeed-zero",
        "gpus": 64,
        "tp": 4,
        "pp": 1,
        "dp": 16,
        "micro_batch": 48,
        "micro_batches": 1,
        "global_batch": 768,
        "zero_stage": 3,
    }
    piped = interpret({**given, "pipe_parallel_size": "16", "batch_size": "4", "gas": "256", "zero_stage": "1.0"})
    layout = ("engine", "pp", "dp", "micro_batch", "micro_batches", "global_batch", "zero_stage")
    assert [piped[name] for name in layout] == ["deepspeed-3d", 16, 1, 4, 256, 1024, 1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"checkpoint_activations": "False"}, "none"),
        ({"recompute_granularity": "selective"}, "selective"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "full"),
        ({"recompute_granularity": "None"}, "none"),
        ({"activations_checkpoint_method": "block"}, "full"),
        ({"activations_checkpoint_method": "None"}, "none"),
        ({"checkpoint_activations": "True", "recompute_granularity": "None"}, "full"),
        ({}, None),
    ],
)
def test_recomputation_over_the_years(given: dict[str, str], expected: str | None) -> None:
    assert interpret(given).get("recompute") == expected


def test_a_model_of_today() -> None:
    found = interpret(
        {
            "world_size": "16",
            "tensor_model_parallel_size": "2",
            "pipeline_model_parallel_size": "2",
            "context_parallel_size": "2",
            "expert_model_parallel_size": "1",
            "group_query_attention": "True",
            "num_query_groups": "8",
            "swiglu": "True",
            "untie_embeddings_and_output_weights": "True",
            "position_embedding_type": "PositionEmbeddingType.rope",
            "bf16": "True",
            "params_dtype": "torch.bfloat16",
            "use_distributed_optimizer": "True",
            "optimizer_cpu_offload": "False",
            "sequence_parallel": "True",
            "attention_backend": "AttnBackend.flash",
            "deepspeed": "False",
        }
    )
    assert found == {
        "gpus": 16,
        "tp": 2,
        "pp": 2,
        "cp": 2,
        "dp": 2,
        "ep": 1,
        "kv_heads": 8,
        "swiglu": True,
        "untied_embeddings": True,
        "position_embedding": "rope",
        "dtype": "bf16",
        "distributed_optimizer": True,
        "optimizer_offload": False,
        "sequence_parallel": True,
        "flash_attention": True,
    }


def test_neox() -> None:
    found = interpret_neox(
        {
            "world_size": "96",
            "model_parallel_size": "2",
            "pipe_parallel_size": "4",
            "train_batch_size": "1536",
            "train_micro_batch_size_per_gpu": "4",
            "gradient_accumulation_steps": "32",
            "zero_optimization": "{'stage': 1, 'allgather_partitions': True}",
            "precision": "fp16",
            "checkpoint_activations": "True",
            "hidden_size": "6144",
            "pos_emb": "rotary",
            "no_weight_tying": "True",
        }
    )
    assert found == {
        "engine": "deepspeed-3d",
        "gpus": 96,
        "tp": 2,
        "pp": 4,
        "dp": 12,
        "global_batch": 1536,
        "micro_batch": 4,
        "micro_batches": 32,
        "zero_stage": 1,
        "dtype": "fp16",
        "recompute": "full",
        "hidden": 6144,
        "position_embedding": "rope",
        "untied_embeddings": True,
    }
    assert interpret_neox({"pipe_parallel_size": "0"}) == {"engine": "deepspeed-zero", "pp": 1}


def test_neox_says_the_world_of_its_launcher_first() -> None:
    part = read_text(
        "NeoXArgs.configure_distributed_args() using world size: 1 and model-parallel size: 1 \n"
        "NeoXArgs.configure_distributed_args() using world size: 96 and model-parallel size: 2 "
    )
    assert facts_of(part) == {"gpus": [96], "tp": [2]}


def test_a_field_names_the_argument_it_hangs_on_where_two_say_the_same() -> None:
    part = read_text(
        "  encoder_seq_length .............................. 1024\n"
        "  fp16 ............................................ True\n"
        "  global_batch_size ............................... 1024\n"
        "  params_dtype .................................... torch.float16\n"
        "  seq_length ...................................... 1024"
    )
    sources = {name: each.source for name, each in asked_at(part).items()}
    assert sources == {
        "dtype": "log:4 (argument params_dtype)",
        "global_batch": "log:3 (argument global_batch_size)",
        "seq": "log:5 (argument seq_length)",
    }


@pytest.mark.parametrize("text", ["", "None", "many", "1.5", "1e400", "nan", "9" * 5000, "inf"])
def test_what_is_no_whole_number_is_none(text: str) -> None:
    assert Arguments({"n": text}).whole("n") is None


def test_the_first_name_that_is_there_counts() -> None:
    given = Arguments({"a": "None", "b": " 2.0 ", "c": "True", "d": "False"})
    assert (given.whole("a", "b"), given.text("a"), given.text("b")) == (2, None, "2.0")
    assert (given.true("c", "d"), given.true("d"), given.true("e")) == (True, False, None)


def test_a_quotient_that_does_not_divide_is_none() -> None:
    assert (quotient(64, 4, 16), quotient(64, 5), quotient(64, None), quotient(None, 2), quotient(64, 0)) == (
        1,
        None,
        None,
        None,
        None,
    )
