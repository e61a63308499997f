"""The order of the faults follows from the seed alone."""

from bench.torture.faults import EARLIEST, KINDS
from bench.torture.order import LATEST, STARTING, planned


def test_a_seed_is_an_order_that_a_longer_one_continues() -> None:
    kinds = sorted(KINDS)
    some, more = (planned(kinds, 7, count, EARLIEST) for count in (20, 100))
    assert more[:20] == some
    assert planned(kinds, 8, 20, EARLIEST) != some
    assert [fault.number for fault in more] == list(range(1, 101))


def test_every_kind_comes_once_before_any_comes_again() -> None:
    kinds = sorted(KINDS)
    first = planned(kinds, 1, len(kinds), EARLIEST)
    assert sorted(fault.kind for fault in first) == kinds


def test_no_fault_comes_before_it_makes_sense_nor_after_the_run() -> None:
    faults = planned(sorted(KINDS), 3, 500, EARLIEST)
    assert all(EARLIEST[fault.kind] <= fault.step <= LATEST for fault in faults)
    starting = [fault for fault in faults if fault.step == STARTING]
    assert starting
    assert {fault.nodes for fault in faults} == {2, 4}
