"""The base of all contract sections: frozen, closed, and every field declares the identities that it belongs to."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema

IDENTITIES = ("semantic", "numerical_policy", "deployment")


@dataclass(frozen=True)
class BelongsTo:
    """The identities that rotate when a field changes; written once, in the field's own annotation."""

    identities: tuple[str, ...]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # Published with the schema, so that a reader without Python knows as well.
        return handler(schema) | {"x-identities": list(self.identities)}


# Which logical model this is. All of it also decides bits.
MODEL = BelongsTo(("semantic", "numerical_policy"))
# Which logical model this is, where the bits of a row follow from token numbers alone (the tokenizer).
TEXT = BelongsTo(("semantic",))
# Can change a bit.
BITS = BelongsTo(("numerical_policy",))
# Where and how it runs, what has been proved so far: logged, never compared.
DEPLOYMENT = BelongsTo(("deployment",))
# Names something that the other identities already count.
EVERYWHERE = BelongsTo(IDENTITIES)
BITS_AND_DEPLOYMENT = BelongsTo(("numerical_policy", "deployment"))
# Names of gates, and the identities themselves: rotates nothing.
NO_IDENTITY = BelongsTo(())


class Section(BaseModel):
    """A frozen pydantic model that forbids unknown fields.

    Every field is either another section (or a tuple of them), or a leaf that carries exactly one `BelongsTo`. A class
    that breaks this is refused when it is defined, so a new field cannot be forgotten.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # Leaf name to its declaration; None for a field that holds sections.
    declarations: ClassVar[dict[str, BelongsTo | None]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.declarations = {name: _declaration(cls, name) for name in cls.model_fields}


def section_types(annotation: Any) -> tuple[type[Section], ...]:
    """The section classes inside a type annotation; empty for a leaf."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(found for argument in get_args(annotation) for found in section_types(argument))


def _declaration(cls: type[Section], name: str) -> BelongsTo | None:
    field = cls.model_fields[name]
    found = [item for item in field.metadata if isinstance(item, BelongsTo)]
    holds_sections = bool(section_types(field.annotation))
    if len(found) != (0 if holds_sections else 1):
        raise TypeError(
            f"{cls.__name__}.{name} declares {len(found)} memberships; a leaf field declares exactly one, for example "
            "Annotated[int, BITS], and a field that holds sections declares none"
        )
    return found[0] if found else None
