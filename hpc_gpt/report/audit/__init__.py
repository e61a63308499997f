"""`hpc-gpt report --audit TABLE LOGS`: every cell of a published table against its formula and the logs behind it."""

from hpc_gpt.report.audit.auditing import audit
from hpc_gpt.report.audit.findings import Audit, Cell, Finding, Match
from hpc_gpt.report.audit.named_formulas import NAMED, FormulaName
from hpc_gpt.report.audit.printing import as_json, as_text

__all__ = ["NAMED", "Audit", "Cell", "Finding", "FormulaName", "Match", "as_json", "as_text", "audit"]
