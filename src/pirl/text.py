"""Human-readable sizes and tables as plain text."""

from collections.abc import Sequence


def size(count: int | float) -> str:
    """Bytes as text, such as `1.5 GB`."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1000:.1f} kB"


def table(rows: Sequence[Sequence[str]], align: str, *, indent: str = "") -> list[str]:
    """Rows as lines with aligned columns; `align` has one `<` or `>` per column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]
