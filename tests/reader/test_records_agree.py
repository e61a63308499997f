"""What the figures of any record owe each other, whatever log it is from.

Every log of `truth/`, every block of `printed/`, every dialect's specimen and every log of the shared data is read. The
bounds are written here again, from the formulas' definitions, not taken from the package.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.reader.lines.dialects import dialects
from hpc_gpt.reader.runs.foreign import read_foreign
from hpc_gpt.reader.runs.grouping import group_logs
from hpc_gpt.report.gather import gather_paths
from tests.reader.reading import read_lines, specimen_of
from tests.reader.test_printed import logs_of

HERE = Path(__file__).parent
ALIKE = 0.05
FASTEST = max(peak for device in DEVICES.values() for peak in device.peaks.values())


def disagreements(record: Record) -> Iterator[str]:
    """What of a record cannot be."""
    flops = {name: getattr(record, f"tflops_{name}") for name in ("seed", "hardware", "model")}
    device = DEVICES.get(record.device or "")
    peak = device.peaks.get(record.units or "") if device else None
    for name, figure in flops.items():
        if figure is not None and not 0 < figure <= (peak or FASTEST):
            yield f"tflops_{name} {figure} of a peak of {peak or FASTEST}"
    model, hardware = flops["model"], flops["hardware"]
    if model and hardware and hardware < model and "multiply no token" not in record.sources["tflops_hardware"]:
        yield f"tflops_hardware {hardware} is below tflops_model {model}"
    if model and flops["seed"] and record.recompute != "full" and flops["seed"] > model:
        yield f"6 P s B {flops['seed']} is above tflops_model {model}, which has attention beside it"
    for name, of in (("mfu", model), ("hfu", hardware)):
        share = getattr(record, name)
        if share is not None and (of is None or not 0 < share <= 1):
            yield f"{name} {share} of {of}"
    if record.mfu_printed is not None and not 0 < record.mfu_printed < 2:
        yield f"mfu_printed {record.mfu_printed} is no share"
    all_gpus, one = record.tokens_per_s, record.tokens_per_s_gpu
    if all_gpus and record.gpus and one and abs(one * record.gpus / all_gpus - 1) > ALIKE:
        yield f"{record.gpus} GPUs of {one} tokens/s, but {all_gpus} together"
    batch, seq, step_s = record.global_batch, record.seq, record.step_s_mean or record.step_s
    if batch and seq and step_s and record.step_s and record.tokens_per_s:
        slow, fast = sorted(batch * seq / seconds for seconds in (step_s, record.step_s))
        if not slow * (1 - ALIKE) <= record.tokens_per_s <= fast * (1 + ALIKE):
            yield f"{batch} x {seq} tokens in {step_s} s, but {record.tokens_per_s} tokens/s"
    params = record.params
    if params is not None and params < (record.vocab or 0) * (record.hidden or 0) * 0.9:
        yield f"{params} parameters, but an embedding of {record.vocab} x {record.hidden}"
    active = record.settings.get("active", {})
    if params and active.get("params", 0) > params * 1.001:
        yield f"a token uses {active['params']} of {params} parameters"
    if (record.settings.get("experts") or 1) > 1 and "params" not in active and any(flops.values()):
        yield "a mixture's TFLOPs without the parameters that a token uses"
    sizes = (record.micro_batch, record.micro_batches, record.dp, batch)
    flagged = any("global batch" in flag or "layout" in flag or "micro_batch" in flag for flag in record.flags)
    if all(sizes) and sizes[0] * sizes[1] * sizes[2] != batch and not flagged:
        yield f"micro_batch x micro_batches x dp of {sizes[:3]} is not {batch}"


def assert_agree(records: list[Record]) -> None:
    assert {record.run: wrong for record in records if (wrong := [*disagreements(record)])} == {}


def test_records_of_logs_with_known_fields_agree() -> None:
    assert_agree(gather_paths([str(HERE / "truth")], Path("/nowhere")).records)


@pytest.mark.long(but="first")
@pytest.mark.parametrize("file", sorted((HERE / "printed").glob("*.txt")), ids=lambda file: file.stem)
def test_records_of_printed_lines_agree(file: Path) -> None:
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        logs = logs_of([line for line in block.split("\n") if line.startswith(("#", ">"))])
        parts = [(Path(name), read_lines(name, lines)) for name, lines in logs.items()]
        assert_agree([read_foreign(run, block.split("\n")[0]).record for run in group_logs(parts)])


def test_records_of_specimens_agree(tmp_path: Path) -> None:
    for dialect in dialects():
        (tmp_path / f"{dialect.name}.log").write_text(specimen_of(dialect.name))
    gathered = gather_paths([str(tmp_path)], Path("/nowhere"))
    assert len(gathered.records) > 20
    assert_agree(gathered.records)


@pytest.mark.shared
def test_records_of_the_shared_logs_agree(shared: Path) -> None:
    gathered = gather_paths([str(shared / "logs"), str(shared / "cases")], Path("/nowhere"))
    assert len(gathered.records) > 60
    assert_agree(gathered.records)
