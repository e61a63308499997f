"""Logs of other programs, made line by line."""

from pathlib import Path

from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from hpc_gpt.reader.runs.run_read import RunRead
from tests.reader.reading import read_lines

ARGUMENTS = {
    "data_parallel_size": 2,
    "global_batch_size": 16,
    "hidden_size": 256,
    "log_interval": 1,
    "make_vocab_size_divisible_by": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 4,
    "num_attention_heads": 4,
    "num_layers": 4,
    "padded_vocab_size": 50432,
    "params_dtype": "torch.float16",
    "pipeline_model_parallel_size": 2,
    "seq_length": 128,
    "tensor_model_parallel_size": 2,
    "train_iters": 1000,
    "world_size": 8,
}
OOM = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TIME_LIMIT = "slurmstepd: error: *** JOB 7 ON r6i4n5 CANCELLED AT 2021-05-27T21:52:36 DUE TO TIME LIMIT ***"
WORLD = "using world size: 4, data-parallel-size: 1, tensor-model-parallel size: 4, pipeline-model-parallel size: 1 "


def dump(**changed) -> list[str]:
    """Megatron's banner and dump of arguments."""
    given = {key: value for key, value in {**ARGUMENTS, **changed}.items() if value is not None}
    tp, pp, dp = (given[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "data"))
    return [
        f"using world size: {given['world_size']}, data-parallel-size: {dp}, tensor-model-parallel size: {tp}, "
        f"pipeline-model-parallel size: {pp} ",
        "using torch.float16 for parameters ...",
        "------------------------ arguments ------------------------",
        *(f"  {key} {'.' * max(3, 48 - len(key))} {value}" for key, value in sorted(given.items())),
        "-------------------- end of arguments ---------------------",
    ]


def iteration(step: int, ms: float = 1000.0, **more) -> str:
    """One line of Megatron's; `loss=None` leaves the loss out."""
    loss = more.get("loss", 10 - step / 1000)
    said = [] if loss is None else [f" lm loss: {loss:.6E} "] if isinstance(loss, float) else [f" lm loss: {loss} "]
    pairs = [
        f" iteration {step:8d}/{more.get('of', 1000):8d} ",
        f" consumed samples: {16 * step:12d} ",
        f" elapsed time per iteration (ms): {ms:.1f} ",
        " learning rate: 1.500E-04 ",
        f" global batch size: {more.get('batch', 16):5d} ",
        *said,
        " loss scale: 1024.0 ",
        " grad norm: 1.000 ",
        f" number of skipped iterations: {more.get('skipped', 0):3d} ",
        f" number of nan iterations: {more.get('nan', 0):3d} ",
    ]
    return "|".join(pairs) + "|"


def iterations(first: int, last: int, ms: float = 1000.0, every: int = 1, **more) -> list[str]:
    """Lines of steps first to last; the first takes five times as long."""
    steps = range(first, last + 1, every)
    return [iteration(step, 5 * ms if step == first else ms, **more) for step in steps]


def write_log(path: Path, *lines: str | list[str]) -> Path:
    """A log with these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(line for each in lines for line in ([each] if isinstance(each, str) else each))
    path.write_text(text + "\n", encoding="utf-8")
    return path


def step(number: int, loss: str = "3.2E+00") -> str:
    """A line of an early Megatron's."""
    return (
        f" iteration {number:8}/    1000 | consumed samples: {number * 4} | elapsed time per iteration (ms): 2767.3 | "
        f"learning rate: 1.500E-04 | global batch size: 4 | lm loss: {loss} | loss scale: 16384.0 | grad norm: 9.8 | "
    )


def timeout(rank: int, sequence: int = 12, at: str = "") -> str:
    """A line of NCCL's watchdog."""
    return (
        f"{at}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600410 milliseconds before timing out."
    )


def run_of(*lines: str | list[str], log: str = "a.log") -> RunRead:
    """The one run in a log of these lines, read line by line."""
    text = [line for each in lines for line in ([each] if isinstance(each, str) else each)]
    (run,) = group_logs([(Path(log), read_lines(log, text))])
    return read_foreign(run, "a")
