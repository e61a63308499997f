"""The end of a rank's process, by a signal or with an exit code: the same text, whoever saw it.

On Slurm srun reports it, on one machine our own launcher.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

# Printed by a rank whose connection to another rank broke: the other one ended first.
LOST_PEER = "lost another rank"
# srun's words for signals.
_BY_SRUN = {
    "Killed": signal.SIGKILL,
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
}
_RANKS = r"(?P<ranks>\d[\d,-]{0,400})"
_SRUN = re.compile(
    rf"(?:(?P<node>[^\s:]+): )?tasks? {_RANKS}: "
    rf"(?:Exited with exit code (?P<code>\d{{1,3}})|(?P<signal>{'|'.join(_BY_SRUN)}))(?: \(core dumped\))?"
)
_OWN = re.compile(
    rf"ranks? {_RANKS}(?:: .{{1,80}}?)?(?: on (?P<node>[^\s,]+))? "
    r"(?:(?:was|were) ended by (?P<signal>SIG[A-Z0-9]+)|ended with exit code (?P<code>\d{1,3}))"
)
_LOST = re.compile(rf"rank \d{{1,7}} {LOST_PEER}\b")


@dataclass(frozen=True)
class ExitStatus:
    """The end of one rank's process, or of several that ended alike.

    `ranks` is a number, or several as srun lists them (`0-3,5`); `node` is None if it is not known. `code` is an exit
    code, or minus the number of a signal. `program`: what a rank of engine command or megatron-lm started.

    >>> str(ExitStatus("1", "n2", -9))
    "rank 1 on n2 was ended by SIGKILL, by hand or by the kernel's memory killer"
    >>> str(ExitStatus("1", "n2", -11, "a.out")), read_exit_status("rank 1: a.out on n2 was ended by SIGSEGV").node
    ('rank 1: a.out on n2 was ended by SIGSEGV', 'n2')
    >>> str(ExitStatus("0-3", None, 1)), str(ExitStatus("1", "n2", 139))
    ('ranks 0-3 ended with exit code 1', 'rank 1 on n2 was ended by SIGSEGV')
    """

    ranks: str
    node: str | None
    code: int
    program: str = field(default="", repr=False)

    @property
    def rank(self) -> int | None:
        """The rank; None for several."""
        return int(self.ranks) if self.ranks.isdigit() else None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the process; a shell or a container returns 128 + its number."""
        number = -self.code if self.code < 0 else self.code - 128
        return signal.Signals(number) if number in set(signal.Signals) else None

    @property
    def is_kill(self) -> bool:
        return self.signal == signal.SIGKILL

    def is_of(self, other: ExitStatus) -> bool:
        """Whether both report the same end; one may lack the node."""
        same_node = self.node is None or other.node is None or self.node == other.node
        return (self.ranks, self.signal or self.code) == (other.ranks, other.signal or other.code) and same_node

    def __str__(self) -> str:
        who = f"rank{'' if self.ranks.isdigit() else 's'} {self.ranks}"
        who += f": {self.program}" if self.program else ""
        who += f" on {self.node}" if self.node else ""
        if self.signal is None:
            return f"{who} ended with exit code {self.code}"
        text = f"{who} {'was' if self.ranks.isdigit() else 'were'} ended by {self.signal.name}"
        return f"{text}, by hand or by the kernel's memory killer" if self.is_kill else text


def read_exit_status(cause: str | None) -> ExitStatus | None:
    """The end that a text reports in our own words or in srun's; None if it reports none.

    >>> read_exit_status("srun: error: n2: task 1: Killed")
    ExitStatus(ranks='1', node='n2', code=-9)
    >>> read_exit_status("rank 1 was ended by SIGKILL"), read_exit_status("rank 1: KeyError: 'a'")
    (ExitStatus(ranks='1', node=None, code=-9), None)
    """
    match = _OWN.search(cause or "")
    if match is not None:
        name = match["signal"]
        if name and name not in signal.Signals.__members__:
            return None
        return ExitStatus(match["ranks"], match["node"], -signal.Signals[name] if name else int(match["code"]))
    match = _SRUN.search(cause or "")
    return _of_srun(match) if match is not None else None


def exit_code_text(code: int) -> str:
    """An exit code of subprocess in words.

    >>> exit_code_text(-11), exit_code_text(2)
    ('SIGSEGV (exit code -11)', 'exit code 2')
    """
    text = f"exit code {code}"
    return f"{signal.Signals(-code).name} ({text})" if -code in set(signal.Signals) else text


_NEGATIVE = re.compile(r"\(exitcode:? (-\d{1,2})\)|(?<!\()\bexit ?code:? (-\d{1,2})\b")


def name_signals(text: str) -> str:
    """The text with the signals that its negative exit codes are.

    >>> name_signals("Rank 2 crashed with exit code -11."), name_signals("failed (exitcode: -9) local_rank: 2")
    ('Rank 2 crashed with SIGSEGV (exit code -11).', 'failed by SIGKILL (exit code -9) local_rank: 2')
    """
    return _NEGATIVE.sub(lambda match: "by " * bool(match[1]) + exit_code_text(int(match[1] or match[2])), text)


def is_lost_peer(cause: str | None) -> bool:
    """Whether a cause says only that a rank lost another one.

    >>> is_lost_peer("rank 0 lost another rank: RuntimeError: Connection reset by peer"), is_lost_peer("rank 0: no")
    (True, False)
    """
    return _LOST.match(cause or "") is not None


def explain_srun(cause: str) -> str:
    """The text with srun's messages in our words; for a killed rank srun's message, the evidence, is added.

    >>> explain_srun("hpc-gpt cancel, n1: task 0: Exited with exit code 3")
    'hpc-gpt cancel, rank 0 on n1 ended with exit code 3'
    >>> explain_srun("n2: task 1: Killed")
    "rank 1 on n2 was ended by SIGKILL, by hand or by the kernel's memory killer (srun: n2: task 1: Killed)"
    """

    def ours(match: re.Match[str]) -> str:
        end = _of_srun(match)
        return f"{end} (srun: {match[0]})" if end.is_kill else str(end)

    return _SRUN.sub(ours, cause)


def _of_srun(match: re.Match[str]) -> ExitStatus:
    code = int(match["code"]) if match["code"] else -_BY_SRUN[match["signal"]]
    return ExitStatus(match["ranks"], match["node"], code)
