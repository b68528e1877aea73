"""Contract section `deployment`: where and how a policy runs. Logged, never compared."""

from typing import Annotated

from pydantic import Field, Strict

from contracts.field_types import Positive
from contracts.frozen_map import FrozenMap
from contracts.section import DEPLOYMENT, Section


class Deployment(Section):
    """Facts for the log. Two sides may differ in all of them."""

    trainer_mesh: Annotated[FrozenMap[Positive], DEPLOYMENT] = Field(default_factory=FrozenMap)
    """Degree by axis on the trainer."""
    engine_mesh: Annotated[FrozenMap[Positive], DEPLOYMENT] = Field(default_factory=FrozenMap)
    """Degree by axis on the engine."""
    policy_path: Annotated[str, Strict(), DEPLOYMENT] = ""
    """Where the policy came from."""
    notes: Annotated[str, Strict(), DEPLOYMENT] = ""
    """Anything a person wants to remember."""
