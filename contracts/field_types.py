"""Field types that say what is legal: names, digests, counts, dtypes and sets."""

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from contracts.cases import CASES, Case
from contracts.float_bits import FloatBits, is_float_bits

# RFC 8785 numbers are doubles: beyond this an integer has no exact form.
LARGEST_INTEGER = 2**53 - 1

Text = Annotated[str, Strict(), Field(min_length=1)]
Name = Annotated[str, Strict(), Field(pattern=r"^[a-z][a-z0-9_]*$")]
Sha256 = Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{64}$")]
Arch = Annotated[str, Strict(), Field(pattern=r"^(cpu-[a-z0-9_]+|sm[0-9]+[a-z]?)$")]
Count = Annotated[int, Strict(), Field(ge=0, le=LARGEST_INTEGER)]
Positive = Annotated[int, Strict(), Field(ge=1, le=LARGEST_INTEGER)]
Integer = Annotated[int, Strict(), Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]

Item = TypeVar("Item")


def is_float8(name: object) -> bool:
    """Whether a dtype's name, in any library's spelling, is one of the 8-bit floats."""
    return isinstance(name, str) and re.search(r"fp8|float8|e4m3|e5m2", name.lower()) is not None


def _no_float8(value: object) -> object:
    if is_float8(value):
        raise PydanticCustomError(
            "float8",
            "FP8 is refused until every row has a scale of its own: "
            "a scale over the whole tensor lets the requests of a batch change each other's bits",
        )
    return value


Dtype = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_no_float8)]


def _constant_text(value: str) -> str:
    if value.startswith("f64:") and not is_float_bits(value):
        raise ValueError("text that starts with f64: is the bit pattern of a float and has 16 hexadecimal digits")
    return value


Constant = Annotated[bool, Strict()] | Integer | FloatBits | Annotated[str, Strict(), AfterValidator(_constant_text)]


def _unique(values: tuple[Item, ...]) -> tuple[Item, ...]:
    if len(set(values)) != len(values):
        raise ValueError("a value is listed twice")
    return values


def _sorted(values: tuple[Item, ...]) -> tuple[Item, ...]:
    return tuple(sorted(_unique(values)))  # type: ignore[type-var]


def _in_case_order(values: tuple[Case, ...]) -> tuple[Case, ...]:
    return tuple(sorted(_unique(values), key=CASES.index))


# Sets: written as lists, kept in one order, without doubles.
TextSet = Annotated[tuple[Text, ...], AfterValidator(_sorted)]
DegreeSet = Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_sorted)]
CaseSet = Annotated[tuple[Case, ...], Field(min_length=1), AfterValidator(_in_case_order)]
Sha256Set = Annotated[tuple[Sha256, ...], AfterValidator(_sorted)]
