"""Ranges of settings as annotated types, such as `batch_size: Count = 32`; `Checked` dataclasses enforce them."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pirl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """An interval. NaN is in no interval."""

    low: int | float = -math.inf
    """Lower end."""
    high: int | float = math.inf
    """Upper end."""
    open_low: bool = False
    """Whether `low` itself is excluded."""
    open_high: bool = False
    """Whether `high` itself is excluded."""

    def __contains__(self, value: int | float) -> bool:
        above = self.low < value if self.open_low else self.low <= value
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.open_low else 'at least'} {self.low:g}"
        if self.open_low == self.open_high:
            return f"between {self.low:g} and {self.high:g}{', both excluded' if self.open_low else ''}"
        if self.open_low:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"at least {self.low:g} and below {self.high:g}"


Count = Annotated[int, Bounds(low=1)]
"""At least one."""
Natural = Annotated[int, Bounds(low=0)]
"""Zero or more."""
Positive = Annotated[float, Bounds(low=0, open_low=True)]
"""Above zero."""
NotNegative = Annotated[float, Bounds(low=0)]
"""Zero or above."""
Share = Annotated[float, Bounds(low=0, high=1)]
"""Between 0 and 1, both included."""
Inside = Annotated[float, Bounds(low=0, high=1, open_low=True, open_high=True)]
"""Between 0 and 1, both excluded."""
Decay = Annotated[float, Bounds(low=0, high=1, open_high=True)]
"""From 0 to below 1."""
Auto = Literal["auto"]
"""Chosen when the run starts: `Count | Auto`."""


class OutOfRangeError(ConfigError):
    """A setting outside its range."""

    def __init__(self, where: str, problem: str, bounds: Bounds) -> None:
        super().__init__(f"{where}{problem}", hint=f"it is {bounds}")
        self.problem, self.bounds = problem, bounds

    def inside(self, path: str) -> "OutOfRangeError":
        """The same error, naming the setting by its dotted path instead of its class."""
        return OutOfRangeError(path, self.problem, self.bounds)


class Checked:
    """Base of settings dataclasses: raises if a number, also in a tuple, is outside its type's `Bounds`."""

    def __post_init__(self) -> None:
        for name, bounds in bounds_of(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and number not in bounds:
                    raise OutOfRangeError(f"{type(self).__name__}: ", f"{name} is {value}", bounds)


@cache
def bounds_of(cls: type) -> dict[str, Bounds]:
    """Bounds by field name, for fields that have any."""
    hints = get_type_hints(cls, include_extras=True)
    found = {name: _bounds(hint) for name, hint in hints.items()}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def _bounds(hint: Any) -> Bounds | None:
    """The bounds in an annotation, also inside `... | None` and `tuple[...]`."""
    parts = getattr(hint, "__metadata__", ()) + get_args(hint)
    found = (part if isinstance(part, Bounds) else _bounds(part) for part in parts)
    return next((bounds for bounds in found if bounds is not None), None)
