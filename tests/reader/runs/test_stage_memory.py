"""Memory of each pipeline stage, by the order in which ranks go through the layout."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.reader.lines.part import Part, PeakMemory, Place
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.results import add_memory


def settled(peaks, arguments=None, **layout):
    """The draft after ranks said their peaks: {rank: GiB}."""
    draft = Draft()
    for name, value in layout.items():
        draft.set(name, value, "a.log:1")
    part = Part("a.log", memory={rank: PeakMemory(peak, None, Place("a.log", 9)) for rank, peak in peaks.items()})
    add_memory(draft, [part], arguments or {})
    return draft


WAYS = st.integers(1, 4)


@given(WAYS, WAYS, WAYS, WAYS, st.booleans())
def test_ranks_go_through_the_axes_with_pp_last_or_before_dp(tp, cp, dp, pp, pipes_first):
    # The slowest axis first, as nested loops.
    axes = (
        product(range(dp), range(pp), range(cp), range(tp)) if pipes_first else product(range(pp), range(dp * cp * tp))
    )
    stages = [place[1] if pipes_first else place[0] for place in axes]
    peaks = {rank: 10.0 * (stage + 1) + rank / 1000 for rank, stage in enumerate(stages)}
    draft = settled(peaks, {"use_tp_pp_dp_mapping": "True"} if pipes_first else {}, tp=tp, pp=pp, dp=dp, cp=cp)
    highest = [max(peak for rank, peak in peaks.items() if stages[rank] == stage) for stage in range(pp)]
    assert draft.get("memory_allocated_gib") == (highest if pp > 1 else [max(peaks.values())])


@pytest.mark.parametrize("peaks", [{None: 3.0}, {99: 3.0}, {0: 3.0, 1: 2.0}])
def test_what_does_not_tell_of_every_stage_is_one_figure(peaks):
    draft = settled(peaks, tp=2, pp=2, dp=1)
    assert draft.get("memory_allocated_gib") == [3.0]
    assert draft.sources["memory_allocated_gib"].startswith("a.log:9")
    assert [flag for flag in draft.flags if "one figure, the highest" in flag]


def test_no_memory_is_no_figure_and_absurd_memory_is_none():
    assert settled({}, tp=1, pp=1, dp=1).get("memory_allocated_gib") is None
    assert settled({0: 1e300}, tp=1, pp=1, dp=1).get("memory_allocated_gib") is None
    assert settled({0: 0.0}, tp=1, pp=1, dp=1).get("memory_allocated_gib") is None
