"""The launcher refuses what does not fit a manifest, and explains what does not compile."""

import dataclasses

import pytest
import torch
from gpu_tools import launcher, normal

from contracts.errors import LaunchRefused
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.seal import seal_program

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


def test_a_damaged_module_is_explained_not_launched(compiler):
    sealed = seal_program("matmul", "1", {}, matmul_program(T, N, K))
    with pytest.raises(LaunchRefused, match="null pointer"):
        compiler.compile(dataclasses.replace(sealed.modules[0], module=b"not a module"))
