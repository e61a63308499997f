"""The figures of the sweeps against the published texts, cell by cell, contradictions and all."""

import re
from itertools import chain

import pytest

from tests.experiments.sweeps import settle, sweep

pytestmark = pytest.mark.shared


@pytest.fixture
def source(shared):
    """The text of a source by its number."""
    return lambda number: next((shared / "seeds").glob(f"{number}_*")).read_text(encoding="utf-8", errors="replace")


def tables(text):
    """Every table of a source as (heading, rows); rows without a cell are left out."""
    found, heading = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            heading = None
        elif heading is None:
            heading = cells
            found.append((heading, []))
        elif any(cells) and not set("".join(cells)) <= set("-: "):
            cells += [""] * (len(heading) - len(cells))
            found[-1][1].append(dict(zip(heading, cells, strict=False)))
    return found


def number(cell):
    """A cell's figure: 122s, 146, 11846 MB."""
    return float(re.match(r"[\d.]+", cell)[0])


def check_001(name, rows, printed):
    """Each row's layout and figures are those of the printed one; a column that a table lacks is not looked at."""
    assert len(rows) == len(printed)
    for row, cells in zip(rows, printed, strict=True):
        where = f"{name} {row.name}: {cells}"
        assert row.published.get("step_s") == number(cells["Throughput"]), where
        assert row.published.get("tflops_seed") == (number(cells["TFlops"]) if cells["TFlops"] else None), where
        assert row.published.get("notes", "") == cells.get("Notes", ""), where
        assert row.overrides.get("layout", {}).get("gpus", 64) == int(cells["GPUs"]), where
        if row.impossible:
            assert row.overrides["layout"]["pp"] == int(cells["PP"]), where
            assert row.overrides["layout"]["micro_batch"] == int(cells["Mic-BS"]), where
            assert row.overrides["layout"]["micro_batches"] == int(cells["PP Chunks"]), where
            assert row.overrides["model"]["preset"] == cells["Size"].lower(), where
            continue
        run = settle(name, row.name)
        assert run.preset == cells["Size"].lower(), where
        assert run.layout.tp == int(cells.get("TP", run.layout.tp)), where
        assert run.layout.pp == int(cells.get("PP", 1)), where
        assert run.layout.dp == int(cells.get("DP", run.layout.dp)), where
        assert run.batch.micro_batch == int(cells["Mic-BS"]), where
        chunks = cells.get("PP Chunks") or cells.get("PP chunks") or run.batch.micro_batches
        assert run.batch.micro_batches == int(chunks), where
        assert row.published.get("global_batch", run.batch.global_batch) == int(cells["Glob-BS"]), where


def test_megatron_deepspeed(source):
    printed = [rows for heading, rows in tables(source("001")) if "GPUs" in heading]
    assert [len(rows) for rows in printed] == [5, 5, 19, 1, 2, 5, 1, 3, 3]
    check_001("gpt2-meg", sweep("gpt2-meg").rows, list(chain(*printed[:3])))
    check_001("gpt2-meg-ds-3d", sweep("gpt2-meg-ds-3d").rows, printed[3])
    measured = [row for row in sweep("gpt2-meg-ds-zero").rows if "step_s" in row.published]
    check_001("gpt2-meg-ds-zero", measured, list(chain(*printed[4:7])))
    check_001("gpt2-hf-ds", sweep("gpt2-hf-ds").rows, list(chain(*printed[7:])))


def test_mingpt(source):
    printed = list(chain.from_iterable(rows for _, rows in tables(source("000"))))
    rows = sweep("mingpt-fsdp").rows
    assert len(rows) == len(printed)
    for row, cells in zip(rows, printed, strict=True):
        memory, *rest = (cells[heading] for heading in list(cells)[1:])
        run = settle("mingpt-fsdp", row.name)
        assert (run.batch.micro_batch, run.layout.gpus) == (int(cells["Batch Size"]), 4)
        assert str(row.published["memory_mb"]) == memory
        figures = [row.published.get(key, "") for key in ("gpu_util", "tflops_hardware", "step_ms")]
        assert [str(figures[0]), *(float(cell) for cell in figures[1:] if cell)] == [
            rest[0],
            *(float(cell) for cell in rest[1:] if cell),
        ]
    text = source("000")
    assert [row.name for row in rows if settle("mingpt-fsdp", row.name).engine.prefetch] == ["ckpt-prefetch-b64"]
    assert "Mixed Precision (AMP)" in text
    assert "average over 100 iterations" in text


def test_colab_ladder(source):
    """A rung's figure is the last line that the source prints of it; the rungs follow one another as there."""
    text = source("002")
    speeds = re.findall(r"batch size: (\d+)|batch_size: (\d+)|tok/sec: ([\d,.]+)", text)
    rungs = []
    for plain, underlined, speed in speeds:
        if plain or underlined:
            rungs.append([int(plain or underlined), None])
        elif speed:
            rungs[-1][1] = float(speed.replace(",", ""))
    rows = sweep("colab-ladder").rows
    measured = [row for row in rows if "tokens_per_s" in row.published]
    last = [tuple(rung) for rung in rungs if rung[1] is not None]
    # A figure of the baseline stands twice, under one batch: the lines behind the first block are its last ones.
    assert [
        (settle("colab-ladder", row.name).batch.global_batch, row.published["tokens_per_s"]) for row in measured
    ] == last
    memory = re.findall(r"GPU (?:freed up )?([\d.]+) ?/ ?40", text)
    assert [f"{row.published['memory_gb']:g}" for row in rows] == [f"{float(figure):g}" for figure in memory]


def test_training_parallelism(source):
    text = source("003")
    rows = {row.name: row.published for row in sweep("training-parallelism").rows}
    for name in ("one-gpu", "ddp"):
        figures = rows[name]
        assert f"samples_per_second={figures['samples_per_s']:,}, max_mem={figures['memory_mb']:,}" in text
    assert f"{rows['fsdp']['params']:,} parameters. This results in {rows['fsdp']['memory_mb']} mem usage" in text
    larger = rows["fsdp-e2048-l32"]
    assert f"results in {larger['params']:,} params. {larger['memory_mb']} for model parameters" in text
    assert f"--fsdp` is {rows['fsdp-e1024-l32']['params']:_} params" in text


def test_memory_ladder(source):
    [(_, printed)] = tables(source("004"))
    rows = sweep("memory-ladder").rows
    assert [(row.published["memory_mb"], row.published["latency_s"]) for row in rows] == [
        (number(cells["GPU Memory Peak"]), number(cells["Training Latency"])) for cells in printed
    ]
    for row, size in zip(rows, (32, 64, 128), strict=False):
        assert f"batch size = {size}" in printed[rows.index(row)]["Experiments Setting"]
        assert settle("memory-ladder", row.name).batch.global_batch == size
