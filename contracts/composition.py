"""Contract section `composition`: which implementation computes which region in which case."""

from typing import Annotated

from contracts.field_types import Arch, CaseSet, Constant, Name, Positive, Sha256, Text
from contracts.frozen_map import FrozenMap
from contracts.section import BITS, NO_IDENTITY, Section


class CompositionEntry(Section):
    """The owner of one region in the named cases. Entries are explicit: there is no wildcard and no default."""

    region: Annotated[Name, BITS]
    """The operation's place in the policy, such as `attention`."""
    cases: Annotated[CaseSet, BITS]
    """The cases in which this entry owns the region."""
    impl_id: Annotated[Name, BITS]
    """The registered region primitive that computes it, such as `paged_attention`; what call counters record."""
    version: Annotated[Positive, BITS]
    """Version of the implementation's rounding schedule."""
    arch: Annotated[Arch, BITS]
    """`sm90`, or `cpu-` and the instruction set. The same in all entries of a contract."""
    constants: Annotated[FrozenMap[Constant], BITS]
    """Constants of the rounding schedule, such as `leaves` or `split`."""
    kernel_digests: Annotated[FrozenMap[Sha256], BITS]
    """SHA-256 of every sealed kernel that may run, by kernel name. May be empty on a CPU only."""
    gate: Annotated[Text | None, NO_IDENTITY] = None
    """The test that proved the entry. Required where a region has different owners in different cases."""
