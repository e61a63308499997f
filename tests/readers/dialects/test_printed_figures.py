"""What the readers take from lines as programs print them: every figure, in this project's units, and no other."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpc_gpt.readers.logs import Part
from tests.readers.reading import read_lines

GB = 1e9 / 2**30
TITAN = "[rank0]:[titan] 2025-07-21 15:57:43,242 - root - INFO - "
MLLOG = ':::MLLOG {"namespace": "", "time_ms": 1696466380017, "event_type": "POINT_IN_TIME", '

# (dialect, line or lines, figures of each step)
STEPS: list[tuple[str, str, list[dict[str, float]]]] = [
    (
        "tinygrad",
        "   13 4159.77 ms run,   77.95 ms python,   0.43 ms fetch data, 4081.28 ms AMD * 8,  0.69 loss, 0.000570 LR, "
        "1038.57 GB used, 327963.02 GFLOPS",
        [{"step": 13, "step_s": 4.15977, "loss": 0.69, "lr": 0.00057}],
    ),
    (
        "llm_c",
        "step    9/30 | loss     nan (+nanz)| norm    nan (+nanz)| lr 3.00e-04 |    nan ms | nan% bf16 MFU | "
        "463590 tok/s",
        [{"step": 9, "loss": math.nan, "lr": 3e-4, "tokens_per_s": 463590}],
    ),
    (
        "generic",
        '{"step": 20, "loss": 4.1234, "step_time_ms": 251.2}',
        [{"step": 20, "loss": 4.1234, "step_s": 0.2512}],
    ),
    ("generic", "step=20 loss=4.1234 dt=251.20ms", [{"step": 20, "loss": 4.1234, "step_s": 0.2512}]),
    ("generic", "step=20 loss=4.1234 dt=0.2512 lr=0.1", [{"step": 20, "loss": 4.1234, "lr": 0.1}]),
    ("generic", "[step=12/9000] loss=4.1234 lr=1.0e-4", [{"step": 12, "loss": 4.1234, "lr": 1e-4}]),
    (
        "generic",
        "step    10 | loss: 9.412031 | lr 9.2308e-06 | norm: 2.3121 | dt: 338.51ms | tok/sec: 1548809.31",
        [{"step": 10, "loss": 9.412031, "lr": 9.2308e-6, "step_s": 0.33851}],
    ),
    ("generic", "iter_dt 12.34ms; iter 100: train loss 4.10214", [{"step": 100, "loss": 4.10214}]),
    (
        "generic",
        "| epoch   2 step    17000 |   5530 batches | lr 0.000246 | ms/batch 621.27 | loss  7.33 | ppl  1521.180",
        [{"step": 17000, "loss": 7.33}],
    ),
    (
        "fms_fsdp",
        "step: 100\nloss: 8.25\nLR: 0.00015\ntokens seen: 838860800\ngradient norm: 0.75\ncurrent step time: 2.5\n"
        "overall step time: 9.9\ncurrent token per gpu per sec: 3393",
        [
            {
                "step": 100,
                "loss": 8.25,
                "lr": 0.00015,
                "consumed_tokens": 838860800,
                "grad_norm": 0.75,
                "step_s": 2.5,
                "tokens_per_s_gpu": 3393,
            }
        ],
    ),
    (
        "levanter",
        "Progress on:train 1.23kit/10.0kit rate:1.2it/s remaining:2:01:10 elapsed:17:10 postfix:loss=3.41",
        [{"step": 1230, "loss": 3.41}],
    ),
    (
        "nanogpt",
        "iter 20: loss 1.5 BPC, time 251.2ms",
        [{"step": 20, "loss": 1.5 * math.log(2), "step_s": 0.2512}],
    ),
    (
        "generic",
        "Batch 40 Loss: 8.1234, Speed: 512.2 samples/sec",
        [{"step": 40, "loss": 8.1234, "samples_per_s": 512.2}],
    ),
    (
        "torchtitan",
        TITAN
        + "step:  4  loss:  4.6671  grad_norm:  2.5457  memory:  0.00GiB(0.00%)  tps: 35,051  tflops: 3.59  mfu: 0.36%",
        [
            {
                "step": 4,
                "loss": 4.6671,
                "grad_norm": 2.5457,
                "tokens_per_s_gpu": 35051,
                "tflops": 3.59,
                "mfu": 0.0036,
                "at": 1753113463.242,
            }
        ],
    ),
    (
        "torchtitan",
        "step: 10  loss:  8.2150  memory: 59.43GiB(62.57%)  wps: 6,410  mfu: 47.97%",
        [{"step": 10, "loss": 8.215, "tokens_per_s_gpu": 6410, "mfu": 0.4797}],
    ),
    (
        "torchtitan",
        "step: 10  loss:  8.21500  grad_norm:  1.2000  memory: 59.43GiB(62.57%)  tps: 6,410  "
        "tflops: 1,390.02  mfu: N/A",
        [{"step": 10, "loss": 8.215, "grad_norm": 1.2, "tokens_per_s_gpu": 6410, "tflops": 1390.02}],
    ),
    (
        "nanotron",
        "10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 327281 / 378950 | consumed_tokens: 85.8G | "
        "elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K | tokens_per_sec_per_gpu: 11.4K | "
        "global_batch_size: 64 | lm_loss: 2.38 | lr: 1e-05 | model_tflops_per_gpu: 38.3 | "
        "hardware_tflops_per_gpu: 38.3 | grad_norm: 1.25",
        [
            {
                "step": 327281,
                "step_s": 11.5,
                "loss": 2.38,
                "grad_norm": 1.25,
                "lr": 1e-5,
                "tokens_per_s": 22800,
                "tokens_per_s_gpu": 11400,
                "tflops": 38.3,
                "consumed_tokens": 85.8e9,
                "at": 1760718716,
            }
        ],
    ),
    (
        "nanotron",
        "iteration: 12 / 500 | consumed_tokens: 480B | time_per_iteration_ms: 985 | tokens_per_sec: 1.06M | "
        "tokens_per_sec_per_gpu: 133K | global_batch_size: 1.05M | grad_norm: 1.9 | lm_loss: 9.1 | lr: 0.0003 | "
        "model_tflops_per_gpu: 410 | eta: 0:08:01",
        [
            {
                "step": 12,
                "step_s": 0.985,
                "loss": 9.1,
                "grad_norm": 1.9,
                "lr": 0.0003,
                "tokens_per_s": 1.06e6,
                "tokens_per_s_gpu": 133e3,
                "tflops": 410,
                "consumed_tokens": 480e9,
            }
        ],
    ),
    (
        "picotron",
        "[rank 0] Step: 12    | Loss: 7.1234 | Global batch size:   1.05M | Tokens/s: 123.45K | Tokens/s/GPU:  "
        "15.43K | Tokens:  12.58M/1.00B | MFU: 38.12% | Memory usage:  61.23GB",
        [
            {
                "step": 12,
                "loss": 7.1234,
                "tokens_per_s": 123450,
                "tokens_per_s_gpu": 15430,
                "consumed_tokens": 12.58e6,
                "mfu": 0.3812,
            }
        ],
    ),
    (
        "mlperf",
        MLLOG + '"key": "tracked_stats", "value": {"train_step_timing": 11.039475679397583}, "metadata": '
        '{"file": "/workspace/llm/custom_callbacks.py", "lineno": 277, "step": 8388608}}',
        [{"step_s": 11.039475679397583, "consumed": 8388608, "at": 1696466380.017}],
    ),
    (
        "mlperf",
        MLLOG + '"key": "tracked_stats", "value": {"throughput": 102.4, "train_step_time": 11.25}, "metadata": '
        '{"file": "callbacks.py", "lineno": 230, "step": 46080}}',
        [{"step_s": 11.25, "throughput": 102.4, "consumed": 46080, "at": 1696466380.017}],
    ),
    (
        "mlperf",
        MLLOG + '"key": "tracked_stats", "value": {"train_epoch_timing": 234.9}, "metadata": {"step": 1211105280}}',
        [],
    ),
    ("nanogpt", "iter 1631: loss 4.0863, time 561.94ms", [{"step": 1631, "loss": 4.0863, "step_s": 0.56194}]),
    (
        "nanogpt",
        "iter 1640: loss 4.0711, time 560.02ms, mfu 34.12%",
        [{"step": 1640, "loss": 4.0711, "step_s": 0.56002, "mfu": 0.3412}],
    ),
    (
        "nanochat",
        "step 00010/21400 (0.05%) | loss: 9.412031 | grad norm: 1.2345 | lrm: 1.00 | dt: 338.51ms | "
        "tok/sec: 1,548,809 | mfu: 48.40 | total time: 0.00m",
        [
            {
                "step": 10,
                "loss": 9.412031,
                "grad_norm": 1.2345,
                "step_s": 0.33851,
                "tokens_per_s": 1548809,
                "mfu": 0.484,
            }
        ],
    ),
    (
        "modded_nanogpt",
        "step:4874/4875 train_time:739.484s step_avg:151.72ms",
        [{"step": 4874, "elapsed_s": 739.484}],
    ),
    (
        "modded_nanogpt",
        "step:11/5100 train_loss:9.4012 train_time:1523ms step_avg:nanms",
        [{"step": 11, "loss": 9.4012, "elapsed_s": 1.523}],
    ),
    (
        "modded_nanogpt_evals",
        "step:4875/4875 val_loss:3.27921 train_time:739.640s step_avg:151.72ms",
        [{"step": 4875, "elapsed_s": 739.64}],
    ),
    (
        "llm_c",
        "step    1/30 | loss 10.978910 (+nanz)| norm 0.8456 (+nanz)| lr 3.00e-04 | 1314.95 ms | -100.0% bf16 MFU | "
        "24920 tok/s",
        [
            {
                "step": 1,
                "loss": 10.97891,
                "grad_norm": 0.8456,
                "lr": 3e-4,
                "step_s": 1.31495,
                "tokens_per_s": 24920,
            }
        ],
    ),
    (
        "llm_c",
        "step   20/18865 | loss 7.512800 (-1.42z)| norm 1.1521 (+0.31z)| lr 1.71e-05 | 3312.32 ms | 55.2% bf16 MFU | "
        "158283 tok/s",
        [
            {
                "step": 20,
                "loss": 7.5128,
                "grad_norm": 1.1521,
                "lr": 1.71e-5,
                "step_s": 3.31232,
                "mfu": 0.552,
                "tokens_per_s": 158283,
            }
        ],
    ),
    (
        "maxtext",
        "completed step: 9, seconds: 5.667, TFLOP/s/device: 134.924, Tokens/s/device: 8672.758, total_weights: 196608, "
        "loss: 10.374",
        [{"step": 9, "step_s": 5.667, "tflops": 134.924, "tokens_per_s_gpu": 8672.758, "loss": 10.374}],
    ),
    (
        "composer",
        "[batch=366/48000]:\n\t Train time/token: 382730240\n\t Train memory/current_allocated_mem: 9.7173\n"
        "\t Train loss/train/total: 10.3750\n\t Train loss/train/ce_loss: 10.0000\n"
        "\t Train throughput/device/tokens_per_sec: 12345.6789\n[batch=367/48000]:\n\t Train loss/train/total: 10.2500",
        [
            {"step": 366, "consumed_tokens": 382730240, "loss": 10.375, "tokens_per_s_gpu": 12345.6789},
            {"step": 367, "loss": 10.25},
        ],
    ),
    (
        "olmo",
        "[step=10/1000,epoch=0]\n    train/CrossEntropyLoss=10.51\n    throughput/device/tokens_per_second=11,243\n"
        "    optim/total_grad_norm=2.134",
        [{"step": 10, "loss": 10.51, "tokens_per_s_gpu": 11243, "grad_norm": 2.134}],
    ),
    (
        "fairseq",
        '{"epoch": 27, "update": 26.267, "loss": "8.206", "nll_loss": "7.049", "ppl": "132.47", "wps": "1195.4", '
        '"ups": "1.62", "wpb": "738.1", "bsz": "46.4", "num_updates": "33700", "lr": "0.00017226", "gnorm": "1.833", '
        '"wall": "30542"}',
        [
            {
                "step": 33700,
                "loss": 8.206 * math.log(2),
                "tokens_per_s": 1195.4,
                "lr": 0.00017226,
                "grad_norm": 1.833,
                "elapsed_s": 30542,
            }
        ],
    ),
    (
        "litgpt",
        "Epoch 1 | iter 16 step 2 | loss train: 10.972, val: n/a | iter time: 344.58 ms (step) remaining time: 3:51:08",
        [{"step": 2, "loss": 10.972}],
    ),
    (
        "colab",
        "batches:220 | loss: 7.041/6.790 | tok-seen: 7,208,960 | time: 107.98 | tok/sec: 66,759.81 | "
        "epoch time: 15.14 hrs "
        "batches:440 | loss: 6.532/6.285| tok-seen: 14,417,920| time: 48.81 | tok/sec: 147,693.92 | epoch: 6.84 hrs",
        [
            {"step": 220, "loss": 7.041, "loss_eval": 6.79, "tokens_per_s": 66759.81},
            {"step": 440, "loss": 6.532, "loss_eval": 6.285, "tokens_per_s": 147693.92},
        ],
    ),
    (
        "nemo",
        "Epoch 0:   1%|          | 795/77225 [9:07:58<878:01:48, 41.36s/it, loss=3.1, v_num=, "
        "reduced_train_loss=3.090, global_step=794.0, consumed_samples=1.63e+6]",
        [{"step": 795, "loss": 3.09}],
    ),
    (
        "nemo",
        "Epoch 0: :   3%|▎         | 9000/301500 [1:42:42<55:37:46, v_num=0-56, reduced_train_loss=nan.0, "
        "global_step=9e+3, consumed_samples=6.3e+5, train_step_timing in s=0.615, val_loss=7.040]",
        [{"step": 9000, "loss": math.nan, "step_s": 0.615, "loss_eval": 7.04}],
    ),
    (
        "nemo",
        "Training epoch 0, iteration 120/149 | lr: 3e-05 | consumed_samples: 121 | global_batch_size: 1 | "
        "global_step: 120 | reduced_train_loss: 1.233 | train_step_timing in s: 0.03146 | val_loss: 4.106",
        [
            {
                "step": 120,
                "lr": 3e-5,
                "consumed_samples": 121,
                "loss": 1.233,
                "step_s": 0.03146,
                "loss_eval": 4.106,
            }
        ],
    ),
    (
        "lightning",
        " 93%|█████████▎| 18625/20000 [5:43:21<25:20,  0.90it/s, v_num=0, train_loss=3.400]",
        [{"step": 18625, "loss": 3.4}],
    ),
    (
        "lightning",
        "Epoch 3:  28%|██▊       | 5/18 [00:20<00:53,  4.14s/it, loss=9.850, v_num=193315]",
        [{"epoch": 3, "loss": 9.85}],
    ),
    ("lightning", "Validation DataLoader 0: 100%|████| 50/50 [00:10<00:00,  4.98it/s, v_num=0]", []),
    (
        "tqdm",
        "Epoch 2/3:  12%|█▎        | 2/16 [02:00<13:54, 59.61s/it, loss=3.125]",
        [{"epoch": 2, "loss": 3.125}],
    ),
    (
        "tqdm",
        "Training:  12%|█▎        | 2/16 [02:00<13:54, 59.61s/it, {'loss': 3.125}]",
        [{"step": 2, "loss": 3.125}],
    ),
    (
        "llama_recipes",
        "Training Epoch: 1/3, step 48/50 completed (loss: 1.1268821954727173):  98%"
        "|███| 49/50 [09:01<00:10, 10.82s/it]",
        [{"step": 48, "loss": 1.1268821954727173}],
    ),
    (
        "hpc_gpt_metrics",
        '{"step": 7, "loss": 5.4321, "loss_eval": null, "grad_norm": 1.25, "lr": 0.0003, "step_s": 0.123456, '
        '"tokens_per_s": 66361.4, "tokens": 8192, "skipped": false, "memory_allocated_gib": 3.25, '
        '"memory_reserved_gib": 4.5, "save_s": null, "time": 1790000000.5}',
        [
            {
                "step": 7,
                "loss": 5.4321,
                "grad_norm": 1.25,
                "lr": 0.0003,
                "step_s": 0.123456,
                "tokens_per_s": 66361.4,
                "at": 1790000000.5,
            }
        ],
    ),
    (
        "generic",
        "[INFO] global_step=120 epoch=0 train_loss=3.2184 lr=0.0003 grad_norm=1.21 step_time=0.412s",
        [{"step": 120, "loss": 3.2184, "lr": 0.0003, "grad_norm": 1.21, "step_s": 0.412}],
    ),
    ("generic", "epoch 2 step 40/1000 val_loss 3.2 best loss 3.1", []),
    ("generic", "Step 4: 12 tokens lost, loss of node n3", []),
]

# (line, facts)
FACTS: list[tuple[str, dict[str, Any]]] = [
    (TITAN + "CUDA capacity: NVIDIA H100 with 79.10GiB memory", {"device": "NVIDIA H100"}),
    (
        TITAN + "Model llama3 8B size: 8,030,261,248 total parameters",
        {"name": "llama3 8B", "params": 8030261248},
    ),
    (
        TITAN + "Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]",
        {"dp": 4, "tp": 2, "pp": 1, "cp": 1},
    ),
    (
        TITAN + "Building device mesh with parallelism: pp=2, dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=1",
        {"pp": 2, "dp": 8, "cp": 1, "tp": 2, "ep": 1},
    ),
    (
        TITAN + "Building device mesh with parallelism: pp=2, dp_replicate=2, dp_shard=8, cp=1, tp=2, ep=1",
        {"pp": 2, "cp": 1, "tp": 2, "ep": 1},
    ),
    (
        TITAN + "Training starts at step 1, with local batch size 8, global batch size 64, sequence length 2048, total "
        "steps 10 (warmup 2)",
        {"micro_batch": 8, "global_batch": 64, "seq": 2048, "steps_planned": 10},
    ),
    ("number of parameters: 124.34M", {"params": 124340000}),
    ("tokens per iteration will be: 491,520", {"global_batch_tokens": 491520}),
    ("| num_parameters        | 124475904                                          |", {"params": 124475904}),
    ("number parameters: 1.104 billion", {"params": 1104000000}),
    (" algo throughput: 41797155891.1448 bps, 41.7972 Gbps", {"allreduce_gbit_per_s": 41.7972}),
    (MLLOG + '"key": "global_batch_size", "value": 2048, "metadata": {"file": "x.py"}}', {"global_batch": 2048}),
    (
        "+ LAUNCHER='python -u -m torch.distributed.launch     --nproc_per_node 4     --nnodes 4     "
        "--master_addr n0 '",
        {"gpus_per_node": 4, "nodes": 4},
    ),
    ("torchrun --nnodes $NNODES --nproc_per_node gpu train.py", {}),
    ("World size: 16", {"gpus_said": 16}),
    ("INFO - train - world_size=4, rank=0", {"gpus_said": 4}),
    ("Training GPT-2 on 8 GPUs", {"gpus_said": 8}),
    ("training on 100 documents", {}),
    ("cfg.n_params=1.24e+08", {"params": 1.24e8}),
    ("num_gpus_per_node: 8", {"gpus_per_node": 8}),
    (TITAN + "Applied FullAC activation checkpointing to the model", {"recompute": "full"}),
    ("0: 34.5 B    Total params", {"params_of_rank": 34.5e9}),
    ("    Total params: 1.1 B   ", {"params_of_rank": 1.1e9}),
    ("    Total params: 1.1 Billion", {}),
    (" 0:                 hidden_size=8192,", {"hidden": 8192}),
    (" 0:                 moe_ffn_hidden_size=8192,", {}),
    ("config(hidden_size=8192, num_layers=2)", {}),
    (" 0:   fp8: true", {"fp8_products": 1}),
    (" 0:   fp8: false", {}),
    ("2024-09-30 02:05:36,662: rank0[73][MainThread]: INFO: Using precision Precision.AMP_FP16", {"dtype": "FP16"}),
    ("[0] NVIDIA B200 | 67°C, 100 % | 124906 / 183359 MB | root(1M)", {"gpu_index": 0, "device": "NVIDIA B200"}),
    (
        TITAN
        + "Building llama3 8B with ModelArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, d=1)",
        {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256},
    ),
    (
        TITAN + "Trainer is initialized with local batch size 1, global batch size 48, gradient accumulation steps 2, "
        "sequence length 4096,",
        {"micro_batch": 1, "global_batch": 48, "micro_batches": 2, "seq": 4096},
    ),
    (MLLOG + '"key": "gradient_accumulation_steps", "value": 72.0, "metadata": {}}', {"micro_batches": 72}),
    (MLLOG + '"key": "num_heads", "value": 96, "metadata": {"file": "x.py"}}', {"heads": 96}),
    ("model_dim: 1280", {"hidden": 1280}),
    ("Vocab size: 65,536", {"vocab": 65536}),
    ("training with batch size 1024 for one epoch with 3222 steps", {"global_batch": 1024, "steps_planned": 3222}),
]

# (line, allocated GiB, reserved GiB)
MEMORY = [
    (" - Train memory/reserved_mem: 14.6740", None, 14.674 * GB),
    ("\t Train memory/peak_reserved_mem: 51.3280", None, 51.328 * GB),
    ("\t Train memory/current_allocated_mem: 9.7173", None, None),
    ("peak memory allocated: 39147 MiB reserved: 41056 MiB", 39147 / 1024, 41056 / 1024),
    ("reserved memory: 60240691200", None, 60240691200 / 2**30),
    ("Max CUDA memory allocated was 47 GB", 47.0, None),
]


def read(text: str) -> Part:
    parts = read_lines("log", text.split("\n"))
    assert len(parts) == 1
    return parts[0]


@pytest.mark.parametrize(("dialect", "text", "expected"), STEPS)
def test_steps_have_just_the_figures_printed(dialect: str, text: str, expected: list[dict[str, float]]) -> None:
    part = read(text)
    if not expected:
        assert part.steps == {}
        return
    assert list(part.steps) == [dialect]
    steps = part.steps[dialect]
    assert len(steps) == len(expected)
    for place, figures in enumerate(expected):
        row = {name: float(column[place]) for name, column in steps.columns.items()}
        if len(expected) > 1:
            row = {name: value for name, value in row.items() if name in figures or value == value}
        assert row == pytest.approx(figures, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("text", "expected"), FACTS)
def test_facts(text: str, expected: dict[str, Any]) -> None:
    assert {name: facts[0].value for name, facts in read(text).facts.items()} == expected


@pytest.mark.parametrize(("text", "allocated", "reserved"), MEMORY)
def test_memory(text: str, allocated: float | None, reserved: float | None) -> None:
    found = [(each.allocated_gib, each.reserved_gib) for each in read(text).memory.values()]
    if allocated is None and reserved is None:
        assert found == []
    else:
        assert found == [pytest.approx((allocated, reserved))]


def test_an_mlperf_evaluation_has_a_line_of_its_own() -> None:
    lines = [
        MLLOG
        + '"key": "tracked_stats", "value": {"train_step_timing": 11.0}, "metadata": {"lineno": 1, "step": 2048}}',
        MLLOG + '"key": "eval_accuracy", "value": 2.7, "metadata": {"lineno": 1, "samples_count": 2048}}',
        MLLOG + '"key": "run_stop", "value": null, "metadata": {"lineno": 1, "status": "success"}}',
    ]
    part = read("\n".join(lines))
    assert part.steps["mlperf"]["loss_eval"].tolist()[1:] == [2.7]
    assert [ended for ended, _ in part.ends] == ["done"]


def test_a_line_that_a_program_prints_for_itself_is_never_the_generic_one() -> None:
    part = read("step 250: train loss 4.1012, val loss 4.2077\niter 250: loss 4.0, time 561.94ms")
    assert list(part.steps) == ["nanogpt"]
    assert part.evals == [(250.0, 4.2077, 1)]
