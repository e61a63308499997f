"""A preflight as a table for the log: a line a node, then what is wrong and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from hpc_gpt.doctor.conversation import Conversation
from hpc_gpt.doctor.verdict import NodeReport

if TYPE_CHECKING:
    from hpc_gpt.doctor.preflight import Preflight

# heading, figure of a rank
_COLUMNS = (
    ("free GiB", "memory_free_gib"),
    ("matmul TFLOP/s", "matmul_tflops"),
    ("to device GB/s", "host_to_device_gb_s"),
    ("disk MB/s", "write_mb_s"),
)
_MOST_NODES = 64


def write_table(preflight: Preflight, talk: Conversation, out: TextIO) -> None:
    """Of each node its worst rank. Of very many nodes those with a finding, and the first others."""
    nodes, ranks = len(preflight.nodes), preflight.resolved.ranks_per_node
    out.write(f"preflight of {nodes} node{'s' * (nodes != 1)} x {ranks}, {preflight.took_s:.1f} s\n")
    rows = [["node", "device", *(heading for heading, _ in _COLUMNS), "pairs GB/s", "all-reduce GB/s", "clock s"]]
    wrong = {finding.node for finding in preflight.findings}
    shown = sorted(preflight.nodes, key=lambda node: node not in wrong)[:_MOST_NODES]
    for node in preflight.nodes:
        if node in shown:
            rows.append(_row(node, talk))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.write("  " + "  ".join(cells).rstrip() + "\n")
    if nodes > len(shown):
        out.write(f"  … {nodes - len(shown)} more nodes in preflight.json\n")
    for finding in preflight.findings:
        level = "bad node" if finding.node else "ends" if finding.ended else "warning"
        out.write(f"  {level}{f' {finding.node}' if finding.node else ''}: {finding.words}\n")
    spares = [node for node in preflight.chosen if node in preflight.nodes[preflight.resolved.nodes :]]
    if spares and not preflight.ended:
        out.write(f"  {', '.join(spares)} {'takes' if len(spares) == 1 else 'take'} the place of a bad node\n")
    out.flush()


def _row(node: str, talk: Conversation) -> list[str]:
    report = talk.reports[node]
    device = next(
        (str(each.get("device")) for each in report.figures.values()), "no answer" if not report.here else "?"
    )
    skew = "-" if report.ahead_s is None else f"{report.ahead_s:+.1f}"
    worst = [_number(report, figure) for _, figure in _COLUMNS]
    return [node, device, *worst, _slowest(talk, node, "pair"), _slowest(talk, node, "ring"), skew]


def _number(report: NodeReport, figure: str) -> str:
    found = report.worst(figure)
    return "-" if found is None else f"{found:.3g}"


def _slowest(talk: Conversation, node: str, kind: str) -> str:
    rates = [each.gb_s for each in talk.measures.values() if each.kind == kind and node in each.nodes]
    return f"{min(rates):.3g}" if rates else "-"
