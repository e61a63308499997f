"""The three FLOPs formulas in use, utilisation, and the memory formula of the table "Training Parallelism".

A FLOPs figure is in TFLOP/s (1e12 a second) per GPU and follows from the seconds of one optimizer step. Each formula
counts something else, so a figure always names its formula. Letters: P parameters (tied embedding once), L layers,
h hidden, s sequence, B global batch in samples, V vocabulary, n GPUs, t seconds.
"""

from hpc_gpt.core.recomputation import Recompute, known_recompute, recomputation

GIB = 2**30  # bytes
MOST_TOKENS = 2**63 - 1  # a count of tokens that the files and tensors of a run can hold


def tflops_seed(
    *, params: float, seq: int, global_batch: int, gpus: int, step_s: float, recompute: Recompute = "full"
) -> float:
    """TFLOP/s by Megatron-DeepSpeed's tables: 8 P s B / (t n 1e12) under full recomputation, else 6 P s B / (t n 1e12).

    A forward pass takes 2 P FLOPs a token, a backward pass 4 P, a recomputed forward pass 2 P more, of a share of the
    layers its share. Attention is not counted; selective recomputation repeats only attention, so it counts as none,
    and so do modules.
    Source: Megatron-DeepSpeed's perf tables, "Metrics":
    `model_size_in_B * 4 * 2 * seq * global_batch_size / (seconds * gpus * 1e3)`.
    """
    _check(seq=seq, global_batch=global_batch, gpus=gpus, step_s=step_s)
    return seed_factor(recompute) * params * seq * global_batch / (step_s * gpus * 1e12)


def seed_factor(recompute: Recompute | None) -> float:
    """The FLOPs of a token and parameter by `tflops_seed`: 6 without recomputation or if it is not known, to 8."""
    return 6 + 2 * recomputation(known_recompute(recompute) or "none").share


def tflops_hardware(
    *,
    layers: int,
    hidden: int,
    seq: int,
    vocab: int,
    global_batch: int,
    gpus: int,
    step_s: float,
    recompute: Recompute,
    layer_weights: float | None = None,
    again_weights: float = 0.0,
    attention_width: float | None = None,
    attention_keys: float | None = None,
) -> float:
    """TFLOP/s that the GPUs compute, including recomputation; attention is not halved for causality.

    A layer's matrices have M weights (`layer_weights`); a is the width of all heads together (`attention_width`). The
    forward pass of a token takes 2 M FLOPs, plus 4 s a for its scores and values; a backward pass takes twice as many.

    full:      8 B s L M (1 + 2 s a / M) + 6 B s h V; the head is not recomputed
    none:      6 B s L M (1 + 2 s a / M) + 6 B s h V
    selective: none, plus one attention forward, 4 B s^2 a L
    a share of the layers: that share of full, and of none the rest
    modules:   none, plus 2 B s A for the A weights of all layers that they multiply again (`again_weights`), and one
               attention forward for core_attn

    By default the layer is GPT-2's, M = 12 h^2 and a = h. Then full is 96 B s L h^2 (1 + s/6h + V/16Lh), eq. 3 of its
    source, and none 72 B s L h^2 (1 + s/6h + V/12Lh). Attention over a window takes 4 k a per token, where k is its
    number of keys, the mean over the layers (`attention_keys`).
    Source: Narayanan et al. 2021 (arXiv:2104.04473), eq. 3 and its derivation; selective: Korthikanti et al. 2022
    (arXiv:2205.05198).
    """
    _check(seq=seq, global_batch=global_batch, gpus=gpus, step_s=step_s)
    again = recomputation(recompute)
    tokens = global_batch * seq
    weights, width = layer_weights or 12 * hidden**2, attention_width or hidden
    passes = 6 + 2 * again.share
    keys = attention_keys or seq
    attention, head = 2 * keys * width / weights, 6 * vocab * hidden / (passes * layers * weights)
    flops = passes * tokens * layers * weights * (1 + attention + head)
    if "core_attn" in again.modules:
        flops += 4 * tokens * keys * width * layers
    flops += 2 * tokens * again_weights
    return flops / (step_s * gpus * 1e12)


def tflops_model(
    *,
    params: float,
    layers: int,
    hidden: float,
    seq: int,
    global_batch: int,
    gpus: int,
    step_s: float,
    attention_keys: float | None = None,
) -> float:
    """TFLOP/s that the model needs, whatever is recomputed: (6 N + 12 L h s) s B / (t n 1e12). h is the width of all
    heads together, in most shapes the hidden size; N (`params`) are the weights that multiply every token, so that
    without recomputation this equals `tflops_hardware`. If a log does not tell enough about its model's matrices, and
    in figures from other sources, N counts every parameter. With attention over a window, the keys of a token, the mean
    over the layers (`attention_keys`), replace the first s.

    Source: PaLM (Chowdhery et al. 2022, arXiv:2204.02311), appendix B. nanoGPT leaves the positions out of N,
    torchtitan the embedding.
    """
    _check(seq=seq, global_batch=global_batch, gpus=gpus, step_s=step_s)
    return (6 * params + 12 * layers * hidden * (attention_keys or seq)) * seq * global_batch / (step_s * gpus * 1e12)


def as_done(
    tflops: float, *, layers: int, hidden: int, seq: int, global_batch: int, gpus: int, step_s: float,
    attention_keys: float | None = None,
) -> float:  # fmt: skip
    """`tflops` of `tflops_model` less the attention that a causal mask spares: 6 L h s of 12 L h s per token."""
    _check(seq=seq, global_batch=global_batch, gpus=gpus, step_s=step_s)
    keys = attention_keys or seq
    return tflops - 6 * layers * hidden * keys * seq * global_batch / (step_s * gpus * 1e12)


def memory_seed003_gib(
    *,
    params: float,
    batch: float,
    seq: int,
    layers: float,
    hidden: float,
    heads: float,
    vocab: float,
    bytes_each: int = 2,
) -> float:
    """GiB of GPU memory that training takes by the formula of "Training Parallelism", which counts in GB of 1e9 bytes:

        activations = B C (2 V + l (6 e + h C))
        bytes       = (4 P + 2 activations) x bytes_each

    B samples in a pass (`batch`), C tokens of context (`seq`), l layers, e the embedding's size (`hidden`), h heads, V
    the vocabulary (the source's `toks`). 4 P are parameters, gradients, momentum and variance; 2 activations "forward
    and backwards"; 6 e the outputs of QKV (3), FFN (2) and projection (1); h C the attention scores. `bytes_each` is
    2, "fixed for bfloat16". The formula ignores fp32 master weights, recomputation, attention kernels that store no
    scores, and sharding: pass the sizes that one GPU holds.
    Source: "Training Parallelism", "FSDP".
    """
    _check(params=params, batch=batch, seq=seq, layers=layers, hidden=hidden, heads=heads, vocab=vocab)
    activations = batch * seq * (2 * vocab + layers * (6 * hidden + heads * seq))
    return (4 * params + 2 * activations) * bytes_each / 2**30


def mfu(tflops_model: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation, 0 to 1: `tflops_model` over the device's dense peak for the dtype (PaLM, appendix B)."""
    return _share(tflops_model, peak_tflops)


def hfu(tflops_hardware: float, peak_tflops: float) -> float:
    """Hardware FLOPs utilisation, 0 to 1: `tflops_hardware` over the device's dense peak for the dtype."""
    return _share(tflops_hardware, peak_tflops)


def _share(tflops: float, peak_tflops: float) -> float:
    if not peak_tflops > 0:
        raise ValueError(f"peak_tflops is {peak_tflops}, but must be above 0")
    return tflops / peak_tflops


def _check(**sizes: float) -> None:
    """Raises ValueError for a size that is not above 0: its figure would be infinite or negative."""
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"{name} is {size}, but must be above 0")
