"""What a policy is: every number of its architecture that can change a bit, frozen."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from contracts import float_bits, sha256_hex, token_ids
from contracts.errors import UnsupportedModel
from pallas_kernels.attention.spec import BLOCK, DEFAULT_SPLIT

Family = Literal["llama", "qwen3"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base and, for `llama3`, how the frequencies are stretched.

    `theta` is the base of the inverse frequencies. The four scaling numbers are used by kind `llama3` alone
    (Llama 3.1's rule); they are None for kind `default`.
    """

    theta: float
    kind: Literal["default", "llama3"] = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None


@dataclass(frozen=True)
class PolicyConfig:
    """A dense decoder of the llama or Qwen3 family.

    Sizes are counts of elements, `max_position` is in tokens. `leaves` is the number of contiguous pieces into which
    the K axis of the attention output and of the down projection is cut (the largest tensor-parallel degree that the
    rounding schedule allows), `attention_split` the number of keys in one online-softmax split. Both are part of the
    numerical policy. The token ids are carried for the engine's stop rule and change no bit.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    tied_head: bool = False
    leaves: int = 4
    attention_split: int = DEFAULT_SPLIT
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    architecture: str = field(init=False)

    def __post_init__(self) -> None:
        """Raise `UnsupportedModel` where the sizes contradict each other or a region cannot serve them.

        `BadConfig` for a stop token outside of the vocabulary.
        """
        object.__setattr__(self, "architecture", ARCHITECTURE_OF_FAMILY[self.family])
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                field="num_key_value_heads",
                found=self.num_kv_heads,
                allowed=f"a divisor of num_attention_heads = {self.num_heads}",
                reason="Grouped-query attention gives every key head the same number of query heads.",
            )
        if self.head_dim % 2:
            raise UnsupportedModel(
                field="head_dim",
                found=self.head_dim,
                allowed="an even number",
                reason="Rotary embeddings turn pairs of elements, one from each half of the head.",
            )
        if self.leaves not in (1, 2, 4, 8):
            raise UnsupportedModel(
                field="leaves", found=self.leaves, allowed=[1, 2, 4, 8], reason="The fold is a binary tree."
            )
        if self.attention_split > BLOCK and self.attention_split % BLOCK:
            raise UnsupportedModel(
                field="attention_split",
                found=self.attention_split,
                allowed=f"up to {BLOCK}, or a multiple of it",
                reason=f"A split of the online softmax is whole blocks of {BLOCK} keys.",
            )
        token_ids(self.eos_token_ids, field="eos_token_id", vocab_size=self.vocab_size)
        for name, size in (("num_attention_heads x head_dim", self.query_size), ("ffn", self.intermediate_size)):
            if size % self.leaves:
                raise UnsupportedModel(
                    field=name,
                    found=size,
                    allowed=f"a multiple of leaves = {self.leaves}",
                    reason="K is cut into leaves of one size, so that every rank of a mesh folds the same tree.",
                )

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any]) -> "PolicyConfig":
        """Read a parsed config.json; see `isojax.policy.hugging_face.from_hugging_face`."""
        from isojax.policy.hugging_face import from_hugging_face

        return from_hugging_face(raw)

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised a head before the rotation (Qwen3)."""
        return self.family == "qwen3"

    @property
    def query_size(self) -> int:
        """Elements of one token's queries over all heads."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Elements of one token's keys (and of its values) over all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on the attention scores, head_dim ** -0.5 as in the Hugging Face reference."""
        return float(self.head_dim) ** -0.5


ARCHITECTURE_OF_FAMILY: dict[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EXPORTED_ARCHITECTURE = "IsojaxPolicyForCausalLM"
# Fields that change no log-probability, or that the contract states elsewhere, as constants of regions.
_OUTSIDE_OF_DIGEST = frozenset(
    ("initializer_range", "bos_token_id", "eos_token_ids", "pad_token_id", "leaves", "attention_split")
)


def config_digest(config: PolicyConfig) -> str:
    """SHA-256 over every field that decides which logical model this is; floats as bit patterns."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return float_bits(value) if isinstance(value, float) else value

    fields = {name: value for name, value in asdict(config).items() if name not in _OUTSIDE_OF_DIGEST}
    return sha256_hex(plain(fields))
