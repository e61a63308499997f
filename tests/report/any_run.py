"""Runs with whatever a log may have made of their figures, for hypothesis."""

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.run_read import RunRead
from tests.report.step_tables import step_table

figures = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, -1.0, 1e308, 5e-324, 1.0]))
sizes = st.one_of(st.none(), st.integers(-(10**30), 10**30))


@st.composite
def any_run(draw) -> RunRead:
    count = draw(st.integers(0, 30))
    column = st.lists(st.floats(), min_size=count, max_size=count)
    mask = st.lists(st.booleans(), min_size=count, max_size=count)
    columns = {name: np.array(draw(column)) for name in ("step", "step_s", "loss", "at", "lr")}
    masks = {name: np.array(draw(mask), np.bool_) for name in ("steady", "counts", "skipped")}
    whole = {name: draw(sizes) for name in ("gpus", "global_batch", "seq", "params", "hidden", "layers", "vocab")}
    parts = {name: draw(figures) for name in ("step_s", "tokens_per_s", "tflops_model")}
    lists = {"memory_reserved_gib": draw(st.one_of(st.none(), st.lists(st.floats())))}
    texts = {"name": draw(st.text()), "cause": draw(st.text()), "settings": draw(st.dictionaries(st.text(), figures))}
    curve = step_table(**columns, **masks, attempt=np.ones(count, np.int64))
    return RunRead(Record(**whole, **parts, **lists, **texts), curve, files=[Path(draw(st.sampled_from("ab")))])
