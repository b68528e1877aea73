"""The weight digest: committed vectors, independence of order and sharding, and every accident that it must see."""

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import weight_digest as digests
from contracts.errors import BadCheckpoint

VECTORS = json.loads(Path(digests.__file__).with_name("weight_digest_vectors.json").read_text(encoding="utf-8"))
WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def hexes(lanes):
    return [f"{lane:08x}" for lane in lanes]


def as_words(texts):
    return np.array([int(text, 16) for text in texts], dtype=np.uint32)


def in_plain_integers(words, tensor_id, first_position):
    """The definition again, in Python integers, one element at a time."""
    lanes = []
    for lane in range(2):
        total = 0
        for offset, word in enumerate(words):
            x = word * digests.WORD[lane] + (first_position + offset) * digests.POSITION[lane]
            x = (x + tensor_id * digests.TENSOR[lane] + digests.START[lane]) % 2**32
            x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
            x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
            total += x ^ (x >> 16)
        lanes.append(total % 2**32)
    return tuple(lanes)


@pytest.mark.parametrize("vector", VECTORS["tensors"], ids=lambda vector: vector["description"])
def test_committed_vector(vector):
    tensor_id = digests.tensor_id_of(vector["tensor"])
    words = as_words(vector["words"])
    assert f"{tensor_id:08x}" == vector["tensor_id"]
    assert hexes(digests.tensor_lanes(words, tensor_id, vector["first_position"])) == vector["lanes"]
    assert hexes(in_plain_integers(words.tolist(), tensor_id, vector["first_position"])) == vector["lanes"]


def test_committed_vector_longer_than_a_block():
    ramp = VECTORS["ramp"]
    words = (np.arange(ramp["count"], dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32)
    assert ramp["count"] > digests.BLOCK
    assert hexes(digests.tensor_lanes(words, digests.tensor_id_of(ramp["tensor"]))) == ramp["lanes"]


def test_committed_vector_of_a_checkpoint():
    checkpoint = VECTORS["checkpoint"]
    tensors = {
        name: as_words(words).astype(np.uint16).view(ml_dtypes.bfloat16)
        for name, words in checkpoint["tensors"].items()
    }
    assert digests.weight_digest(tensors) == checkpoint["digest"]
    assert digests.weight_digest(dict(reversed(tensors.items()))) == checkpoint["digest"]


@given(words=WORDS, cuts=st.lists(st.integers(0, 40), max_size=3))
@settings(deadline=None)
def test_shards_add_up_to_the_whole_in_any_order(words, cuts):
    words = np.array(words, dtype=np.uint32)
    edges = sorted({0, words.size, *(min(cut, words.size) for cut in cuts)})
    shards = [digests.tensor_lanes(words[start:end], 7, start) for start, end in itertools.pairwise(edges)]
    assert digests.combine(reversed(shards)) == digests.combine([digests.tensor_lanes(words, 7)])


@given(words=WORDS, data=st.data())
@settings(deadline=None)
def test_one_changed_word_changes_both_lanes(words, data):
    index = data.draw(st.integers(0, len(words) - 1))
    other = list(words)
    other[index] = data.draw(st.integers(0, 2**32 - 1).filter(lambda word: word != words[index]))
    before = digests.tensor_lanes(np.array(words, dtype=np.uint32), 7)
    after = digests.tensor_lanes(np.array(other, dtype=np.uint32), 7)
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.fixture
def weights():
    random = np.random.default_rng(0)
    return {
        name: random.normal(size=(8, 16)).astype(ml_dtypes.bfloat16) for name in ("layers.qkv", "layers.o", "norms")
    }


def permuted(weights):
    return weights | {"norms": weights["norms"][::-1]}


def transposed(weights):
    return weights | {"norms": weights["norms"].T}


def exchanged(weights):
    return weights | {"layers.o": weights["norms"], "norms": weights["layers.o"]}


def missing(weights):
    return {name: tensor for name, tensor in weights.items() if name != "norms"}


def renamed(weights):
    return {("norm" if name == "norms" else name): tensor for name, tensor in weights.items()}


def one_ulp(weights):
    words = weights["norms"].view(np.uint16).copy()
    words[3, 5] += 1
    return weights | {"norms": words.view(ml_dtypes.bfloat16)}


def negative_zero(weights):
    # x * 0 + 0 has the values of zeros, then one of them changes its sign: equal to `==`, not to the digest.
    zeros = np.zeros((8, 16), dtype=ml_dtypes.bfloat16)
    signed = zeros.copy()
    signed[0, 0] = -0.0
    assert (zeros == signed).all()
    assert digests.weight_digest({"z": zeros}) != digests.weight_digest({"z": signed})
    return weights | {"norms": signed}


def padded(weights):
    return weights | {"norms": np.concatenate([weights["norms"], np.zeros((1, 16), dtype=ml_dtypes.bfloat16)])}


def widened(weights):
    return weights | {"norms": weights["norms"].astype(np.float32)}


@pytest.mark.parametrize(
    "accident",
    [permuted, transposed, exchanged, missing, renamed, one_ulp, negative_zero, padded, widened],
    ids=lambda accident: accident.__name__,
)
def test_an_accident_changes_the_digest(weights, accident):
    assert digests.weight_digest(accident(weights)) != digests.weight_digest(weights)


def test_memory_layout_does_not_matter(weights):
    strided = {name: np.asfortranarray(tensor) for name, tensor in weights.items()}
    assert digests.weight_digest(strided) == digests.weight_digest(weights)


def test_the_digest_is_sixteen_hexadecimal_digits_even_when_small():
    assert digests.combine([(1, 2)]) == "0000000100000002"
    assert digests.combine([(2**32 - 1, 0), (1, 0)]) == "0" * 16


def test_random_tensors_do_not_collide():
    # 2,000 tensors of two words that differ in a single bit somewhere: 64 bits must keep them apart.
    seen = set()
    for position in range(1000):
        for word in (0x3F80, 0x3F81):
            seen.add(digests.tensor_lanes(np.array([word, 0], dtype=np.uint32), 1, position))
    assert len(seen) == 2000


def test_elements_that_are_not_words_are_refused():
    with pytest.raises(BadCheckpoint, match="float64"):
        digests.weight_digest({"a": np.zeros(2)})


def test_a_tensor_beyond_the_positions_is_refused():
    with pytest.raises(BadCheckpoint, match="32 bits"):
        digests.tensor_lanes(np.zeros(2, dtype=np.uint32), 1, 2**32 - 1)
