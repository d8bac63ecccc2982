"""A hook of mkdocs: a browser breaks no line inside of a flag such as ``--data-dir``."""

import re
from typing import Any

CODE = re.compile(r"(<code>)(.*?)(</code>)", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--\w[\w-]*")


def on_page_content(html: str, **_: Any) -> str:
    """See the events of mkdocs; blocks of code never break and are left alone."""
    return "".join(
        part if part.startswith("<pre") else CODE.sub(_with_flags, part)
        for part in re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    )


def _with_flags(code: re.Match[str]) -> str:
    start, text, end = code.groups()
    return start + FLAG.sub(r'<span class="flag">\g<0></span>', text) + end
