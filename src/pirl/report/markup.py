"""Safe HTML: text is escaped unless it was created here."""

import html
from collections.abc import Iterable

VOID = frozenset({"br", "img", "input", "meta"})
"""Elements without content."""
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if chr(code) not in "\n\t"}


class Markup(str):
    """Text that is HTML already, not to be escaped."""


Child = str | None | Iterable[str | None]
"""Text, markup, None, or several of these."""


def escape(text: str) -> Markup:
    """Escape text; markup is unchanged. Characters that are invalid in HTML are replaced."""
    if isinstance(text, Markup):
        return text
    printable = text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROLS)
    return Markup(html.escape(printable, quote=True))


def element(name: str, /, *children: Child, **attributes: str | bool | None) -> Markup:
    """`<name ...>children</name>`. Attributes: `class_` is class, `_` is a hyphen, True a bare name, None omitted."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>" + ("" if name in VOID else f"{join(*children)}</{name}>"))


def join(*children: Child) -> Markup:
    """Concatenate children, escaping text."""
    flat = (one for child in children for one in ((child,) if child is None or isinstance(child, str) else child))
    return Markup("".join(escape(one) for one in flat if one is not None))
