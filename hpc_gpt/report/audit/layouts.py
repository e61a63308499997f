"""Whether a row's layout and batch can be: tp x pp x dp is the GPUs, and the batch is made of its parts."""

from __future__ import annotations

from hpc_gpt.report.audit.document import Row
from hpc_gpt.report.audit.ledger import Ledger
from hpc_gpt.report.audit.quantities import AXES, SAID, plain_name
from hpc_gpt.report.audit.values import Values

# What may multiply the GPUs too; expert parallelism does not, but its degree may stand for that of a part.
_OTHERS = ("sp", "ring", "usp", "fsdp", "hsdp", "shard", "replicate", "dp replicate", "dp shard", "ep", "zero")


def check_layout(row: Row, values: Values, ledger: Ledger) -> None:
    """Refuses tp x pp x dp that is not the row's GPUs; with an axis unknown, one that does not divide them."""
    gpus = values.whole("gpus")
    axes = {axis: size for axis in AXES if (size := values.whole(axis)) is not None}
    printed = [axis for axis in axes if ledger.column(axis) is not None]
    of_row = "gpus" if ledger.column("gpus") is not None else "nodes"
    if gpus is None or not printed or ledger.column(of_row) is None:
        return
    product = 1
    for size in axes.values():
        product *= size
    if product == gpus:
        ledger.holds(row, of_row, *printed)
        return
    missing = [axis for axis in ("tp", "pp", "dp") if axis not in axes]
    if missing and gpus % product == 0:
        for quantity in (of_row, *printed):
            ledger.leave(row, quantity, f"the layout: {values.lack(missing[0])}")
        return
    others = _other_axes(row, ledger)
    if others and gpus % product == 0:
        for quantity in (of_row, *printed):
            ledger.leave(row, quantity, f"the layout: {others} may be an axis of its own")
        return
    words = " x ".join(f"{SAID[axis]} {size}" for axis, size in axes.items())
    needs = f"{words} needs {product} GPUs, the row has {gpus}"
    if missing and product < gpus:
        needs = f"{words} = {product} does not divide the row's {gpus} GPUs"
    said = [f"{SAID[axis]} {axes[axis]}: {values.known[axis].where}" for axis in axes if axis not in printed]
    said += [values.known["gpus"].where] if of_row == "nodes" else []
    ledger.breaks(row, "layout", of_row, str(gpus), str(product), f"impossible layout: {needs}", "; ".join(said))


def _other_axes(row: Row, ledger: Ledger) -> str:
    """Headings that may be a way of splitting over GPUs besides those known, where the row does not say 1."""
    found = [
        column.heading.strip()
        for column in ledger.columns
        if column.quantity is None and plain_name(column.heading) in _OTHERS and row.cells[column.at].strip() != "1"
    ]
    return ", ".join(found)


def check_batch(row: Row, values: Values, ledger: Ledger) -> None:
    """Refuses a global batch that is not micro-batch x micro-batches x dp, where the document has no formula of it."""
    whole, micro, dp = values.whole("global_batch"), values.whole("micro_batch"), values.whole("dp")
    chunks = values.whole("micro_batches")
    if whole is None or ledger.column("global_batch") is None:
        return
    if micro is None or dp is None:
        ledger.leave(row, "global_batch", values.lack("micro_batch" if micro is None else "dp"))
    elif chunks is not None:
        product = micro * chunks * dp
        if product == whole:
            ledger.holds(row, "global_batch")
        else:
            arithmetic = f"micro-batch x micro-batches x DP = {micro} * {chunks} * {dp} = {product}"
            _batch_breaks(row, ledger, whole, str(product), arithmetic)
    elif whole % (micro * dp):
        arithmetic = f"{whole} is no multiple of micro-batch x DP = {micro} * {dp} = {micro * dp}"
        _batch_breaks(row, ledger, whole, f"a multiple of {micro * dp}", arithmetic)
    else:
        ledger.leave(row, "global_batch", values.lack("micro_batches"))


def _batch_breaks(row: Row, ledger: Ledger, whole: int, found: str, arithmetic: str) -> None:
    words = f"{arithmetic}, the table says {whole}"
    ledger.breaks(row, "global_batch", "global_batch", str(whole), found, words, "by definition")
