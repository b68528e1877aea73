"""Is a mesh inside the claims, and can the model be cut that way at all?"""

from collections.abc import Mapping

from contracts.axes import AXES
from contracts.claims import Claims
from contracts.errors import MeshNotClaimed
from contracts.model import ModelSection
from contracts.semantics import Semantics


def check_mesh(model: ModelSection, semantics: Semantics, claims: Claims, mesh: Mapping[str, int]) -> None:
    """Refuse a mesh with an axis degree that no gate proved. Axes that `mesh` leaves out have degree 1.

    Raises `MeshNotClaimed`, which names the axis, the degree, the proved degrees, and where the model cannot be cut
    that way, the sizes that do not divide.
    """
    for axis in mesh:
        if axis not in AXES:
            raise MeshNotClaimed(
                field=f"mesh.{axis}",
                found=f"{axis}={mesh[axis]}",
                allowed=f"axes {', '.join(AXES)}",
                reason="No claim is about this axis.",
            )
    for axis in AXES:
        degree = mesh.get(axis, 1)
        claim = claims.axis(axis)
        proved = ", ".join(map(str, claim.allowed))
        allowed = f"{axis} {'in' if claim.kind == 'invariant' else 'pinned to'} {proved} (gate {claim.gate})"
        obstacle = (
            why_uncuttable(model, semantics, axis, degree)
            if isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1
            else f"{degree!r} is not a positive integer."
        )
        if obstacle or degree not in claim.allowed:
            reason = obstacle or f"No gate proved equal bits at {axis}={degree}; proved degrees: {proved}."
            raise MeshNotClaimed(field=f"mesh.{axis}", found=f"{axis}={degree}", allowed=allowed, reason=reason)
    if claims.state != "proved":
        raise MeshNotClaimed(
            field="claims.state",
            found=claims.state,
            allowed="proved",
            reason="No gate has proved this contract yet: run `isojax verify` first.",
        )


def why_uncuttable(model: ModelSection, semantics: Semantics, axis: str, degree: int) -> str | None:
    """Why the model cannot be cut over `degree` ranks of `axis`, naming the sizes; None if it can."""
    obstacles: list[str] = []
    if axis == "tp":
        heads, kv_heads = model.num_heads, model.num_kv_heads
        # With more ranks than KV heads each KV head is held by several ranks, which moves no bit.
        if heads % degree or (kv_heads % degree and degree % kv_heads):
            obstacles.append(f"{heads} heads and {kv_heads} KV heads do not divide over {degree} ranks")
        sizes = (
            (model.intermediate_size, "intermediate columns"),
            (semantics.padded_vocab_size, "vocabulary rows (padding included)"),
            (semantics.vocabulary_leaves, "vocabulary leaves (ranks would hold unequal tiles)"),
            (semantics.split_k_leaves, "leaves of the matmuls that are split along K"),
        )
        obstacles += [f"{size} {what} do not divide over {degree} ranks" for size, what in sizes if size % degree]
    elif axis == "pp" and degree > model.num_layers:
        obstacles.append(f"{model.num_layers} layers are fewer than {degree} stages")
    elif axis == "ep" and degree > 1 and (model.num_experts == 0 or model.num_experts % degree):
        experts = f"{model.num_experts} experts do not divide over {degree} ranks"
        obstacles.append(experts if model.num_experts else "a dense model has no experts to spread")
    return f"{axis}={degree} is impossible: {'; '.join(obstacles)}." if obstacles else None
