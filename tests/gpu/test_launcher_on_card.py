"""The launcher refuses what does not fit a manifest, and runs the same bytes and bits as XLA's custom call."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from gpu_tools import assert_equal_bits, launcher, normal
from jax.extend.core import Primitive
from jax.interpreters import mlir

from bridge.launcher import Launcher
from contracts.errors import LaunchRefused
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.seal import seal_program
from pallas_kernels.sealed_call import emit

T, N, K = 64, 256, 512


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda x: x[:32], "x.shape"),
        (lambda x: x.float(), "x.dtype"),
        (lambda x: x.cpu(), "x.device"),
        (lambda x: x.T.contiguous().T, "x.strides"),
        (lambda x: torch.cat([x.flatten(), x.flatten()])[8 : 8 + T * K].view(T, K), "x.address"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(compiler, spoil, named):
    run = launcher(compiler, matmul_program(T, N, K))
    with pytest.raises(LaunchRefused, match=named):
        run(spoil(normal(T, K)), normal(N, K))


def test_xla_and_torch_give_equal_bits_from_the_same_bytes(compiler):
    sealed = seal_program("matmul", "1", {}, matmul_program(T, N, K, leaves=4))
    primitive = Primitive("sealed_matmul_test")
    primitive.def_abstract_eval(lambda x, w: jax.core.ShapedArray((T, N), x.dtype))
    mlir.register_lowering(primitive, lambda ctx, x, w: emit(ctx, sealed, [x, w]), platform="cuda")
    x, w = normal(T, K, seed=1), normal(N, K, seed=2)
    in_torch = Launcher(sealed, compiler)(x, w)[0]
    torch.cuda.synchronize()
    in_xla = jax.jit(primitive.bind)(jax.dlpack.from_dlpack(x), jax.dlpack.from_dlpack(w))
    host = torch.from_numpy(np.asarray(in_xla).view(np.int16).copy()).view(torch.bfloat16).cuda()
    assert_equal_bits(in_torch, host, "torch against XLA")


def test_a_damaged_module_is_explained_not_launched(compiler):
    sealed = seal_program("matmul", "1", {}, matmul_program(T, N, K))
    with pytest.raises(LaunchRefused, match="null pointer"):
        compiler.compile(dataclasses.replace(sealed.modules[0], module=b"not a module"))
