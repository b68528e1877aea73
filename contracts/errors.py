"""Every refusal isojax makes, each with the field, the value found, what is allowed and why."""


class IsojaxError(Exception):
    """Base of all errors that a user can meet; `exit_code` is what the command line returns for it."""

    exit_code = 2


class _Explained(IsojaxError):
    """An error that names the field, the value found, the values allowed and the reason."""

    def __init__(self, *, field: str, found: object, allowed: object, reason: str) -> None:
        self.field = field
        self.found = found
        self.allowed = allowed
        self.reason = reason
        super().__init__(f"{field}: found {found}; allowed: {allowed}. {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments don't survive the default pickling, and engines live in other processes.
        return (_rebuild, (type(self), self.field, self.found, self.allowed, self.reason))


def _rebuild(kind: type[_Explained], field: str, found: object, allowed: object, reason: str) -> _Explained:
    return kind(field=field, found=found, allowed=allowed, reason=reason)


class Refusal(_Explained):
    """isojax will not run this: it was not proved, or the input is wrong. Exit code 2."""


class DifferenceFound(_Explained):
    """A check ran and found two things that must be equal to differ. Exit code 1."""

    exit_code = 1


class UncoveredArithmetic(Refusal):
    """A policy's forward rounds outside of a region."""


class MeshNotClaimed(Refusal):
    """A mesh axis has a degree that no gate proved, or that the model cannot be cut into."""


class UnknownCase(Refusal):
    """A log-probability path that the contract does not know."""


class BadContract(Refusal):
    """A contract that is malformed or contradicts itself."""


class IdentityMismatch(Refusal):
    """A stored identity differs from the recomputed one, or two sides differ in one."""


class HandshakeRefused(Refusal):
    """Trainer and engine do not run the same contract."""


class WeightDigestMismatch(Refusal):
    """Trainer and engine do not hold the same weights."""


class ToolchainMismatch(Refusal):
    """The installed libraries or card differ from those that the contract was proved with."""


class UnsupportedRequest(Refusal):
    """A sampling request that the contract's semantics do not cover."""


class UnsupportedModel(Refusal):
    """An architecture or a model setting that isojax does not implement exactly."""


class BadCheckpoint(Refusal):
    """A weights file or training checkpoint that is missing, damaged, incomplete or misshapen."""


class CannotWrite(Refusal):
    """A file that the disk did not take, because it is full or for another reason of its own."""


class BadConfig(Refusal):
    """A setting that is unknown, of the wrong type or out of range."""


class PromptTooLong(Refusal):
    """A prompt that does not fit the policy's context."""


class EmptyBatch(Refusal):
    """A batch, prompt or completion without a single token."""


class NonFiniteLogits(Refusal):
    """NaN or infinity in a row of logits."""


class BadBundle(Refusal):
    """A kernel bundle that is damaged, truncated, foreign or of another version."""


class LaunchRefused(Refusal):
    """A kernel launch whose buffers do not fit the kernel's manifest, or a kernel that did not compile."""


class KernelMissing(Refusal):
    """A region is called at shapes for which the policy's bundle holds no kernel."""
