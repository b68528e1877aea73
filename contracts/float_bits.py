"""Floats as bit patterns: the only form in which a contract stores a float."""

import re
import struct
from typing import Annotated

from pydantic import BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from contracts.errors import BadContract

FLOAT_BITS_PATTERN = r"^f64:[0-9a-f]{16}$"


def float_bits(value: float) -> str:
    """`f64:` and the 16 hexadecimal digits of the IEEE 754 double. -0.0 and 0.0 differ, as do NaN payloads.

    A float32 widens to a double exactly, so one width serves both.
    """
    return f"f64:{struct.pack('>d', float(value)).hex()}"


def bits_float(bits: str) -> float:
    """The float of a bit pattern that `float_bits` wrote. Raises `BadContract` on anything else."""
    if not is_float_bits(bits):
        raise BadContract(
            field="float bit pattern",
            found=repr(bits),
            allowed="f64: and 16 lower-case hexadecimal digits, such as f64:3ff0000000000000 for 1.0",
            reason="A float written in decimal may not come back as the same bits.",
        )
    return float(struct.unpack(">d", bytes.fromhex(bits[4:]))[0])


def is_float_bits(value: object) -> bool:
    """Whether this is text of the form that `float_bits` writes."""
    return isinstance(value, str) and re.fullmatch(FLOAT_BITS_PATTERN, value) is not None


def _from_float(value: object) -> object:
    if isinstance(value, float):
        return float_bits(value)
    if not is_float_bits(value):
        raise PydanticCustomError(
            "float_bits", "a float is written as f64: and 16 hexadecimal digits, such as f64:3ff0000000000000 for 1.0"
        )
    return value


# Python callers may pass a float; files hold the pattern (`contracts.files` refuses JSON numbers with a fraction).
FloatBits = Annotated[str, Strict(), Field(pattern=FLOAT_BITS_PATTERN), BeforeValidator(_from_float)]
