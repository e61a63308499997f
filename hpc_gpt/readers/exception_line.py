"""The last line of a Python traceback, `module.XError: words`, behind whatever a launcher puts before it.

Failure dialects build their patterns from it: the class of a failure hangs on the exception's name and its words.
"""

from __future__ import annotations

# `[rank3]: `, `[default3]:`, `[1,3]<stderr>:`, `12: `, `r6i4n5: `, `(worker pid=12) `, a time of day, glog's head, the
# bars of an ExceptionGroup. A label that matched is not tried in another way: a line of blanks costs nothing.
_LABEL = (
    r"(?:\[[^\[\]]{1,80}\](?:<std(?:err|out)>)?:? {0,4}"
    r"|\d{1,7}: {0,4}"
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[\d.,+:Z]{0,20} {1,4}(?:- )?"
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d[\d.]{0,12} {1,4}[^\]]{1,160}\] "
    r"|(?!rank|default)(?P<node>[a-z][a-z0-9-]{0,40}\d[a-z0-9.-]{0,40}): {1,4}"
    r"|\([^()]{1,80}\) "
    r"|what\(\): {1,4}"
    r"|[ |+]{1,16})"
)
START = rf"^(?>{_LABEL}){{0,5}}"
_MODULE = r"(?:[A-Za-z_]\w{0,60}\.){0,8}"
# What an exception's class is called; `ray.exceptions.RayTaskError(ValueError)` among them.
ANY_NAME = r"_?[A-Z]\w{1,60}(?:Error|Exception)(?:\([\w.]{1,80}\))?"
_REST = r"(?::.{0,400}|\.?$)"


def raised(names: str, about: str = "") -> str:
    """The regex of a line that tells of an exception of one of `names`, a regex, whose words hold one of `about`.

    >>> import re
    >>> re.search(raised("KeyError"), "[rank3]: KeyError: 'x'")["words"]
    "KeyError: 'x'"
    """
    words = rf"(?=.{{0,2000}}(?:{about}))" if about else ""
    return rf"{START}{words}(?P<words>{_MODULE}(?:{names}){_REST})"
