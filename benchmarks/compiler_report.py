"""Prints what ptxas says of a matmul: MOSAIC_GPU_DUMP_PTXAS=1 python benchmarks/compiler_report.py T N K LEAVES."""

import sys

import torch

from bridge.launcher import Compiler
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.seal import seal_program

if __name__ == "__main__":
    T, N, K, leaves = (int(value) for value in sys.argv[1:])
    sealed = seal_program("matmul", "1", {}, matmul_program(T, N, K, leaves=leaves))
    Compiler(torch.device("cuda:0")).compile(sealed.modules[0])
