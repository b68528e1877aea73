"""Tiles that measured faster than the ones that the estimate would choose, by (N, K, leaves) and tokens.

Written by `benchmarks/matmul_table.py` from result files.
"""

from __future__ import annotations

from pallas_kernels.matmul.hopper_cluster import ClusterTile
from pallas_kernels.matmul.hopper_large import LargeTile
from pallas_kernels.matmul.hopper_small import SmallTile

MEASURED: dict[tuple[int, int, int], dict[int, ClusterTile | LargeTile | SmallTile]] = {
    (4096, 4096, 1): {
        128: SmallTile(warpgroups=1, depth=128, stages=6, parallel=1),
        8192: LargeTile(rows=64, columns=256, split="rows", depth=64, stages=10, group=8, cluster=2, run=4),
    },
    (4096, 4096, 4): {
        256: ClusterTile(parallel=2, columns=128, split="rows", depth=64, stages=8, group=8),
    },
    (4096, 12288, 1): {
        512: LargeTile(rows=64, columns=128, split="rows", depth=64, stages=10, group=8, cluster=2, run=4),
    },
    (4096, 12288, 4): {
        2048: LargeTile(rows=64, columns=128, split="rows", depth=64, stages=10, group=8, cluster=1, run=2),
        4096: LargeTile(rows=64, columns=128, split="rows", depth=64, stages=10, group=8, cluster=1, run=2),
        8192: LargeTile(rows=64, columns=128, split="rows", depth=64, stages=10, group=8, cluster=1, run=2),
    },
    (6144, 4096, 1): {
        8192: LargeTile(rows=64, columns=256, split="rows", depth=64, stages=10, group=8, cluster=1, run=4),
    },
    (24576, 4096, 1): {
        128: LargeTile(rows=64, columns=96, split="rows", depth=64, stages=10, group=8, cluster=1, run=4),
        512: LargeTile(rows=64, columns=256, split="rows", depth=64, stages=10, group=8, cluster=2, run=4),
        8192: LargeTile(rows=64, columns=256, split="rows", depth=64, stages=10, group=8, cluster=1, run=4),
    },
    (24576, 4096, 4): {
        128: LargeTile(rows=64, columns=96, split="rows", depth=64, stages=10, group=8, cluster=1, run=4),
    },
    (151936, 4096, 1): {
        128: LargeTile(rows=64, columns=192, split="rows", depth=64, stages=10, group=8, cluster=1, run=4),
        256: LargeTile(rows=64, columns=192, split="rows", depth=64, stages=10, group=8, cluster=2, run=4),
        8192: LargeTile(rows=64, columns=256, split="rows", depth=64, stages=10, group=8, cluster=2, run=4),
    },
}
