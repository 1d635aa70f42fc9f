"""Field types of the input models: strict in meaning, forgiving in spelling.

Each type is a plain validator (what it accepts and how it words a refusal) with the JSON Schema
that says the same to an editor. A validator raises :func:`refusal`, which carries the hint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

#: Larger whole numbers than any scenario needs; the product of any two still fits 64 bits.
MAX_WHOLE = 10**9
#: Widths of a model: larger than any, and small enough for products of three.
MAX_WIDTH = 10**7
MAX_BYTES = 10**15
MAX_TEXT = 1000
MAX_NAME = 100


class InputModel(BaseModel):
    """Base of the input models: unknown fields are refused, values are plain data."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


def refusal(message: str, hint: str = "") -> PydanticCustomError:
    """The error that a field validator raises: what is wrong, and what would be right."""
    return PydanticCustomError("gpumix", "{message}", {"message": message, "hint": hint})


def shown(value: Any) -> str:
    """A value as an error message quotes it: short, printable, with its kind."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        text = value if value.isprintable() else ascii(value)[1:-1]
        return f"the text {_cut(text)!r}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    return _cut(str(value))


def _cut(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def simplified(name: str) -> str:
    """A spelling without case, blanks, hyphens and underscores: ``ZeRO-3`` -> ``zero3``."""
    return re.sub(r"[\s_-]+", "", name.lower())


def whole(value: Any, low: int = 0, high: int = MAX_WHOLE) -> int:
    """A whole number within bounds; ``8.0`` counts as one. Raises the refusal that says why."""
    wanted = "a whole number" + (f" from {low:,}" if low else "") + f" to {high:,}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "remove the quotes" if isinstance(value, str) and value.strip().isdigit() else ""
        raise refusal(f"expected a whole number, got {shown(value)}", hint or f"write {wanted}")
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(f"{value} is not a number to work with", f"write {wanted}")
    if value != int(value):
        raise refusal(f"expected a whole number, got {value}", f"write {wanted}")
    if value < low:
        raise refusal(f"{shown(value)} is too small", f"at least {low:,}")
    if value > high:
        raise refusal(f"{shown(value)} is too large", f"at most {high:,}")
    return int(value)


def _number(value: Any, low: float, above: bool = False, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal(f"expected a number, got {shown(value)}", "write a plain number, like 1.0e9")
    try:
        number = float(value)
    except OverflowError:
        raise refusal(f"{shown(value)} is too large", "write a plain number, like 1.0e9") from None
    if not math.isfinite(number):
        raise refusal(f"{number} is not a number to work with", "write a finite number")
    if number < low or (above and number == low):
        raise refusal(f"{shown(value)} is too small", f"{'above' if above else 'at least'} {low:g}")
    if number > high:
        raise refusal(f"{shown(value)} is too large", f"at most {high:g}")
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"yes": True, "on": True, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise refusal(f"expected true or false, got {shown(value)}", "write true or false")


def _text(value: Any, limit: int = MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise refusal(f"expected text, got {shown(value)}", "put it in quotes if it is a name")
    if not value.strip():
        raise refusal("the text is empty", "write a name or leave the field out")
    if len(value) > limit:
        raise refusal(f"the text is too long ({len(value):,} characters)", f"at most {limit:,}")
    return value


def _choice(value: Any, spellings: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    key: Any = None
    if isinstance(value, str):
        key = simplified(value)
    elif isinstance(value, bool):
        key = str(value).lower()
    elif isinstance(value, int):
        key = str(value)
    if key is None or key not in spellings:
        got = shown(value).removeprefix("the text ")
        raise refusal(f"{got} is not a known value", f"choose from {', '.join(names)}")
    return spellings[key]


def choice_of(
    choices: Mapping[str, Any], also: Mapping[str, str] | None = None
) -> tuple[PlainValidator, WithJsonSchema]:
    """Validator and schema of a named choice.

    ``choices`` maps each name to its value; ``also`` maps further spellings to names. Spellings
    are compared without case, hyphens, underscores and blanks.
    """
    spellings = {simplified(name): value for name, value in choices.items()}
    words = list(choices)
    for spelling, name in (also or {}).items():
        spellings[simplified(spelling)] = choices[name]
        words.append(spelling)
    check = partial(_choice, spellings=spellings, names=tuple(choices))
    return PlainValidator(check), WithJsonSchema({"enum": words})


def _free(value: Any, depth: int = 0) -> Any:
    """Plain data of a section that is checked where it is used; numbers must be finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(f"{value} is not a number to work with", "write a finite number")
    if isinstance(value, Mapping):
        return {str(k): _free(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_free(v, depth + 1) for v in value]
    return value


def _free_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refusal(f"expected a mapping, got {shown(value)}", "write key: value lines")
    checked: dict[str, Any] = _free(value)
    return checked


Whole = Annotated[
    int,
    PlainValidator(whole),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_WHOLE}),
]
Count = Annotated[
    int,
    PlainValidator(partial(whole, low=1)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_WHOLE}),
]
Width = Annotated[
    int,
    PlainValidator(partial(whole, low=1, high=MAX_WIDTH)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_WIDTH}),
]
Bytes = Annotated[
    int,
    PlainValidator(partial(whole, high=MAX_BYTES)),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_BYTES}),
]
PositiveBytes = Annotated[
    int,
    PlainValidator(partial(whole, low=1, high=MAX_BYTES)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_BYTES}),
]
SmallCount = Annotated[
    int,
    PlainValidator(partial(whole, low=1, high=1024)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 1024}),
]
SmallWhole = Annotated[
    int,
    PlainValidator(partial(whole, high=1024)),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 1024}),
]
NodeCount = Annotated[
    int,
    PlainValidator(partial(whole, low=1, high=10_000_000)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 10_000_000}),
]
Number = Annotated[
    float,
    PlainValidator(partial(_number, low=0.0)),
    WithJsonSchema({"type": "number", "minimum": 0}),
]
PositiveNumber = Annotated[
    float,
    PlainValidator(partial(_number, low=0.0, above=True)),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]
#: How many times slower something is.
Factor = Annotated[
    float,
    PlainValidator(partial(_number, low=1.0, high=1000.0)),
    WithJsonSchema({"type": "number", "minimum": 1, "maximum": 1000}),
]
Share = Annotated[
    float,
    PlainValidator(partial(_number, low=0.0, high=1.0)),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1}),
]
Flag = Annotated[
    bool,
    PlainValidator(_flag),
    WithJsonSchema({"enum": [True, False, "yes", "no", "on", "off"]}),
]
Text = Annotated[
    str,
    PlainValidator(_text),
    WithJsonSchema({"type": "string", "pattern": r"\S", "maxLength": MAX_TEXT}),
]
Name = Annotated[
    str,
    PlainValidator(partial(_text, limit=MAX_NAME)),
    WithJsonSchema({"type": "string", "pattern": r"\S", "maxLength": MAX_NAME}),
]
FreeMapping = Annotated[
    dict[str, Any], PlainValidator(_free_mapping), WithJsonSchema({"type": "object"})
]
