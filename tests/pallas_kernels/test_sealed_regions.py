"""Every region lowers for sm90 on a machine without a card, and XLA's call holds exactly the sealed bytes."""

import contextlib
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from bundle_samples import matmul_types, unlowered
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jaxlib.mlir import ir

import pallas_kernels as kernels
from contracts.errors import BadBundle, KernelMissing
from pallas_kernels import kernel_source, seal
from pallas_kernels.hopper_regions import region_program, seal_region
from pallas_kernels.region import REGIONS
from pallas_kernels.seal import FUSING, seal_program

pytestmark = [pytest.mark.sealing, pytest.mark.long_file(80)]

T, H, D, V = 128, 128, 64, 1000


def _bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _int(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


_TABLE = jax.ShapeDtypeStruct((T, D), jnp.float32)
_HEAT = jax.ShapeDtypeStruct((), jnp.float32)
CALLS = {
    "matmul": ([_bf16(T, H), _bf16(256, H)], {"leaves": 2, "out_dtype": "bfloat16"}),
    "gated_matmul": ([_bf16(T, H), _bf16(256, H)], {}),
    "rms_norm": ([_bf16(T, H), _bf16(H)], {"eps": 1e-6}),
    "add_rms_norm": ([_bf16(T, H), _bf16(T, H), _bf16(H)], {"eps": 1e-6}),
    "residual_add": ([_bf16(T, H), _bf16(T, H)], {}),
    "swiglu": ([_bf16(T, 2 * H)], {}),
    "qk_norm_rope": ([_bf16(T, 4 * D), _TABLE, _bf16(D), _bf16(D)], {"key_heads": 1, "eps": 1e-6}),
    "paged_qk_norm_rope": (
        [_bf16(T, 4 * D), _TABLE, _int(T), _bf16(9, 16, 1, D), _bf16(9, 16, 1, D), _bf16(D), _bf16(D)],
        {"key_heads": 1, "eps": 1e-6},
    ),
    "attention": (
        [_bf16(T, 2, D), _bf16(T, 1, D), _bf16(T, 1, D), _int(T), _int(T), _int()],
        {"scale": 0.125, "split": 512},
    ),
    "paged_attention": (
        [_bf16(T, 2, D), _bf16(9, 16, 1, D), _bf16(9, 16, 1, D), _int(3, 64), _int(T), _int(T)],
        {"scale": 0.125, "split": 512},
    ),
    "paged_decode_attention": (
        [_bf16(T, 2, D), _bf16(9, 16, 1, D), _bf16(9, 16, 1, D), _int(T, 64), _int(T), _int(T)],
        {"scale": 0.125, "split": 512},
    ),
    "log_prob_rows": ([_bf16(T, H), _bf16(1024, H), _HEAT], {"vocab_size": V}),
    "token_log_probs": ([_bf16(T, H), _bf16(1024, H), _int(T), _HEAT], {"vocab_size": V}),
}


def test_only_the_cast_has_no_kernel():
    assert set(REGIONS) - set(CALLS) == {"cast"}
    assert kernels.cast is not None
    with pytest.raises(NotImplementedError, match="cast"):
        region_program("cast", (((8, 8), "bfloat16"),), {"dtype": "float32"})


@pytest.mark.parametrize("name", CALLS)
def test_every_launch_waits_for_the_one_before(name):
    """Blocks may be placed early, so a kernel that did not wait would read what is not written yet."""
    operands, parameters = CALLS[name]
    types = tuple((operand.shape, str(operand.dtype)) for operand in operands)
    for module in seal_region(REGIONS[name], types, parameters).modules:
        for needed in (b"mosaic_gpu.uses_pdl", b"griddepcontrol.wait;", b"griddepcontrol.launch_dependents;"):
            assert needed in module.module, f"{module.name}: {needed!r}"


def test_what_sealing_does_not_look_for_is_hidden_meanwhile_and_only_where_it_is_not_imported():
    with seal._not_looked_for(("planted_and_missing", "json")):
        assert importlib.util.find_spec("json")
        assert sys.modules["planted_and_missing"] is None
    assert "planted_and_missing" not in sys.modules
    assert importlib.import_module("json").dumps(1) == "1"


def test_sealing_looks_for_no_module_that_is_never_there(monkeypatch):
    looked_for = []

    class Watching:
        def find_spec(self, name, path=None, target=None):
            looked_for.append(name)

    operands, parameters = CALLS["residual_add"]
    types = tuple((operand.shape, str(operand.dtype)) for operand in operands)
    (module,) = seal_region(REGIONS["residual_add"], types, parameters).modules
    monkeypatch.setattr(sys, "meta_path", [Watching(), *sys.meta_path])
    assert seal.strip(module.module, fuses=False) == module.module
    assert not set(looked_for) & set(seal._NEVER_THERE)
    monkeypatch.setattr(seal, "_not_looked_for", lambda names: contextlib.nullcontext())
    seal.strip(module.module, fuses=False)
    assert set(looked_for) & set(seal._NEVER_THERE)
    for name in seal._NEVER_THERE:
        with pytest.raises(ImportError):
            importlib.import_module(name)


#: What a register layout of several dimensions is read or written through: ldmatrix and stmatrix, for 32-bit integers
#: too. Their rows start at multiples of 16 bytes.
_MATRIX = re.compile(r"memref\.expand_shape.*?: \(memref<\d+xi32, strided<\[1\], offset: (\d+)>")


def _text(module):
    with mlir.make_ir_context() as context:
        mosaic_gpu_dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        return ir.Module.parse(module).operation.get_asm()


@pytest.mark.parametrize("name", CALLS)
def test_a_product_and_a_sum_are_rounded_as_one_in_attention_alone(name):
    """Mosaic leaves it to the compiler, which may choose one way in one kernel and the other in the next."""
    operands, parameters = CALLS[name]
    types = tuple((operand.shape, str(operand.dtype)) for operand in operands)
    may = any(
        "fastmath<contract>" in _text(module.module) for module in seal_region(REGIONS[name], types, parameters).modules
    )
    assert may == (name in FUSING)


@pytest.mark.parametrize("name", ["attention", "paged_attention", "paged_decode_attention"])
def test_no_row_of_a_matrix_copy_is_misaligned(name):
    """A card says `misaligned address`; the interpreter does not know."""
    operands, parameters = CALLS[name]
    types = tuple((operand.shape, str(operand.dtype)) for operand in operands)
    for module in seal_region(REGIONS[name], types, parameters).modules:
        offsets = [int(offset) for offset in _MATRIX.findall(_text(module.module))]
        assert all(offset % 4 == 0 for offset in offsets), f"{module.name}: {offsets}"


def test_a_planted_misaligned_copy_is_found():
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from pallas_kernels.attention.hopper_sequences import LANES, LOOKUP
    from pallas_kernels.program import Buffer, Program, Step

    def shifted(x, out, notes):
        notes[pl.ds(1, LOOKUP)] = plgpu.load(x, layout=LANES, optimized=False)
        out[...] = plgpu.load(notes.at[pl.ds(2, LOOKUP)], layout=plgpu.Layout.WG_STRIDED((LOOKUP,), vec_size=1))

    kernel = plgpu.kernel(
        shifted,
        out_type=(jax.ShapeDtypeStruct((LOOKUP,), jnp.int32),),
        scratch_types=(plgpu.SMEM((2 * LOOKUP,), jnp.int32),),
    )
    buffers = {name: Buffer((LOOKUP,), "int32") for name in ("x", "out")}
    program = Program(buffers, ("x",), ("out",), (Step("shifted", kernel, ("x",), ("out",)),))
    (module,) = seal_program("planted", "1", {}, program).modules
    assert _MATRIX.findall(_text(module.module)) == ["1"]


def emitted(name, operands, parameters):
    """(module, hash) of every custom call that XLA would run, and no CUDA here."""
    bound = jax.jit(lambda *x: REGIONS[name].bind(*x, **parameters))
    found = []

    def walk(operation):
        if operation.name == "stablehlo.custom_call":
            config = operation.attributes["mhlo.backend_config"]
            found.append((config["module"].value_bytes, config["kernel_hash"].value_bytes))
        for part in operation.regions:
            for block in part.blocks:
                for inner in block.operations:
                    walk(inner.operation)

    walk(bound.trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir().operation)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_call_in_xla_holds_the_sealed_bytes(name):
    operands, parameters = CALLS[name]
    types = tuple((operand.shape, str(operand.dtype)) for operand in operands)
    sealed = seal_region(REGIONS[name], types, parameters)
    expected = [(module.module, bytes.fromhex(module.sha256)) for module in sealed.modules]
    assert emitted(name, operands, parameters) == expected


def test_a_buffer_written_in_place_is_one_buffer_in_xla():
    operands, parameters = CALLS["paged_qk_norm_rope"]
    types = tuple((operand.shape, str(operand.dtype)) for operand in operands)
    (module,) = seal_region(REGIONS["paged_qk_norm_rope"], types, parameters).modules
    assert [(module.operands[i], module.results[j]) for i, j in module.aliases] == [
        ("k_cache", "k_cache"),
        ("v_cache", "v_cache"),
    ]
    assert all(not other.aliases for other in seal_region(REGIONS["swiglu"], ((((T, 2 * H)), "bfloat16"),), {}).modules)


def test_another_scale_is_in_the_kernels_that_score_and_they_fit_the_same_buffers():
    """So one of them can be exchanged for a faulty one, as the gates do."""
    types = tuple((operand.shape, str(operand.dtype)) for operand in CALLS["paged_attention"][0])
    # Splits of 128 positions are two here, so few tokens leave their merge to a third kernel.
    types = tuple(((8, *shape[1:]) if shape[0] == T else shape, dtype) for shape, dtype in types)
    table = ((3, 16), "int32")
    types = (*types[:3], table, *types[4:])
    right, wrong = (
        seal_region(REGIONS["paged_attention"], types, {"scale": scale, "split": 128}) for scale in (0.125, 0.15625)
    )
    assert right.buffers == wrong.buffers
    differs = {}
    for one, other in zip(right.kernels, wrong.kernels, strict=True):
        assert (one.buffers, one.operands, one.results) == (other.buffers, other.operands, other.results)
        differs[one.modules[0].name] = one.digests != other.digests
    assert differs == {"tiles": True, "decode": True, "combine": False}


@pytest.mark.parametrize(("vocab", "rows"), [(1, 1), (97, 97), (104, 104), (1999, 1999), (1999, 2001), (2000, 2001)])
def test_a_vocabulary_of_any_size_lowers(vocab, rows):
    x, w, heat = ((T, H), "bfloat16"), ((rows, H), "bfloat16"), ((), "float32")
    for name, types in (("log_prob_rows", (x, w, heat)), ("token_log_probs", (x, w, ((T,), "int32"), heat))):
        sealed = seal_region(REGIONS[name], types, {"vocab_size": vocab})
        copied = [module.name for module in sealed.modules].count("tail")
        assert copied == (rows % 8 > 0)


def test_weights_too_few_for_the_vocabulary_are_refused():
    types = (((T, H), "bfloat16"), ((1999, H), "bfloat16"), ((), "float32"))
    for vocab in (0, 2000):
        with pytest.raises(ValueError, match=f"vocab_size={vocab} is not between 1 and the weight's 1999 rows"):
            region_program("log_prob_rows", types, {"vocab_size": vocab})


def test_loaded_kernels_are_emitted_byte_for_byte_and_no_others(monkeypatch):
    source = kernel_source.KernelSource()
    monkeypatch.setattr(kernel_source, "LOADED", source)
    parameters = {"leaves": 2, "out_dtype": "bfloat16"}
    loaded = unlowered("matmul", matmul_types(8), parameters, module=b"from a bundle")
    source.add([loaded])
    source.add([loaded])
    operands = [_bf16(8, 256), _bf16(128, 256)]
    assert emitted("matmul", operands, parameters) == [(b"from a bundle", bytes.fromhex(loaded.digests[0]))]
    for other, constants, says in (
        ([_bf16(16, 256), _bf16(128, 256)], parameters, r"bfloat16\[16, 256\].*first operand \(8, 256\)"),
        (operands, parameters | {"leaves": 1}, "'leaves': 1"),
    ):
        with pytest.raises(KernelMissing, match=says):
            emitted("matmul", other, constants)
    with pytest.raises(KernelMissing, match="was not sealed"):
        emitted("swiglu", [_bf16(8, 256)], {})
    with pytest.raises(BadBundle, match="loaded other kernels"):
        source.add([unlowered("matmul", matmul_types(8), parameters, module=b"another")])


@pytest.mark.parametrize("head", [64, 80, 128, 256])
def test_rows_go_to_the_cache_by_copies_that_no_swizzle_takes_part_in(head):
    from pallas_kernels.qk_norm_rope.hopper import paged_qk_norm_rope_program

    program = paged_qk_norm_rope_program(8, 2, 1, head, pages=9, page=16, norm=False, eps=1e-6)
    (module,) = seal_program("rows", "1", {}, program).modules
    # Rows that fill a warpgroup's threads are stored by them, so only shorter ones are copied.
    assert (b"cp.async.bulk.global.shared::cta.bulk_group" in module.module) == (head % 128 != 0)


@pytest.mark.parametrize(("positions", "whole"), [(40_960, False), (131_072, True)])
def test_states_of_splits_take_bounded_memory_however_many_tokens_a_step_has(positions, whole):
    from pallas_kernels.attention.hopper import SCRATCH_BYTES, paged_attention_program

    sizes = {"pages": 2**17, "page": 16, "requests": 256, "request_pages": positions // 16}
    for T in (256, 2048):
        program = paged_attention_program(T, 32, 8, 128, **sizes, scale=0.1, split=512)
        # No state is in memory where a token's splits stay together, else one a split that a request can have.
        assert [step.name for step in program.steps] == ["tiles", "decode", "combine"][: 2 if whole else 3]
        assert ("acc" in program.buffers) != whole
        if not whole:
            assert program.buffers["acc"].size <= SCRATCH_BYTES
            assert program.buffers["acc"].shape[0] == 256 * 32 * positions // 512


@pytest.mark.parametrize("head", [32, 96])
def test_head_sizes_whose_tiles_are_half_as_wide_are_lowered(head):
    from pallas_kernels.attention.hopper import paged_attention_program

    sizes = {"pages": 64, "page": 16, "requests": 4, "request_pages": 8}
    program = paged_attention_program(8, 2, 1, head, **sizes, scale=0.1, split=512)
    assert len(seal_program("paged_attention", "1", {}, program).modules) == 2


@pytest.mark.parametrize("head", [64, 128, 256])
def test_the_program_of_decode_steps_is_the_others_without_tiles(head):
    cache, counts = ((64, 16, 2, head), "bfloat16"), ((16,), "int32")
    types = (((16, 4, head), "bfloat16"), cache, cache, ((16, 40), "int32"), counts, counts)
    constants = {"scale": 0.1, "split": 512}
    whole, decode = (
        seal_region(REGIONS[name], types, constants) for name in ("paged_attention", "paged_decode_attention")
    )
    assert [module.name for module in whole.modules] == ["tiles", "decode", "combine"]
    assert [module.name for module in decode.modules] == ["decode", "combine"]
    assert decode.buffers == whole.buffers
    assert decode.digests[1] == whole.digests[2]
    # Nothing is there yet that it could write in place.
    assert "out" not in decode.modules[0].operands
    assert not decode.modules[0].aliases
    assert decode.modules[1].aliases == whole.modules[2].aliases


def test_contexts_of_one_split_need_no_merge():
    from pallas_kernels.attention.hopper import paged_attention_program

    sizes = {"pages": 64, "page": 16, "requests": 4}
    for positions, steps in ((512, ["tiles", "decode"]), (528, ["tiles", "decode", "combine"])):
        program = paged_attention_program(8, 4, 2, 64, **sizes, request_pages=positions // 16, scale=0.1, split=512)
        assert [step.name for step in program.steps] == steps


def test_a_policy_in_float32_is_refused_on_a_card():
    with pytest.raises(NotImplementedError, match="bfloat16"):
        region_program("residual_add", (((T, H), "float32"),) * 2, {})
