"""A mapping with text keys that is immutable, hashable, picklable and ordered by key."""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Value = TypeVar("Value")


class FrozenMap(Mapping[str, Value], Generic[Value]):
    """`FrozenMap({"b": 2, "a": 1})` reads like a dict, in the order of its keys, and cannot be changed."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Value] = {}) -> None:
        self._items = dict(sorted(items.items()))

    def __getitem__(self, key: str) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return f"{self._items!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMap, (self._items,))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (value_type,) = get_args(source)
        as_dict = handler.generate_schema(dict[str, value_type])  # type: ignore[valid-type]
        return core_schema.chain_schema(
            [
                core_schema.no_info_before_validator_function(_as_dict, as_dict),
                core_schema.no_info_plain_validator_function(cls),
            ],
            serialization=core_schema.plain_serializer_function_ser_schema(_unwrap),
        )


def _as_dict(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _unwrap(value: object) -> object:
    """Plain dicts and lists, also when maps are nested."""
    if isinstance(value, Mapping):
        return {key: _unwrap(item) for key, item in value.items()}
    return [_unwrap(item) for item in value] if isinstance(value, tuple) else value
