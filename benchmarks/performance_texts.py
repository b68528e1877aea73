"""What docs/performance.md says beside its tables."""

INTRODUCTION = """
Made by `benchmarks/performance.py` from the files in `benchmarks/results/`, which hold card, versions, date and
command. Do not edit it. Kernels are timed by CUDA-graph replays over inputs larger than the L2 cache; each time is a
median, beside the baseline of the same run. The floor is what the card's bandwidth or its tensor cores allow. Ratios
above their aim are work to be done; [the last section](#what-misses-its-aim) says what is known of them. A whole GRPO
step was measured while splits of attention still had 512 positions instead of 1024, and matmul, prefill attention and
norms earlier than the rest, with the same kernels.
"""

ENGINE = """
Medians of three runs (of `batch_invariant` on 8B shapes two, a day earlier), in parentheses their spread (largest less
smallest), and ratios of the medians; vLLM 0.26, pages of 16 positions. Our steps have up to 8192 tokens, stock vLLM's
up to 16384. `isojax` is a rollout, `VllmEngine.generate`, which hands out every token with its log-probability;
`isojax_llm` is the same engine asked for them through `vllm.LLM`, as stock vLLM is; `isojax_paced` is a rollout whose
steps start no sooner after each other than stock vLLM's do. Where seconds are far above device time, the engine waits
for the host: of 256 requests stock vLLM ranks and wraps every token's value at every step, a rollout keeps them on the
device (`bridge/sampled_log.py`).

The arms of a file took turns, run by run; those of `engine_qwen3_8b_batch_invariant` came one after the other. On 1.7B
shapes the host sets the pace, which was slow there and scattered. A second call later that day found a rollout at 0.90,
0.82, 0.85 and 1.06 of stock vLLM's seconds and at 0.85, 0.84, 0.95 and 0.98 of its device time, in the order of the
table, and 32 requests through `vllm.LLM` at 1.02 of its seconds (`engine_qwen3_1b7_again_h200.json`; a time limit ended
it in its fourth round of runs). `engine_alone_qwen3_1b7_h200.json`, of a day earlier, says where the time of one
request went.
"""

TRAINING = """
32 sequences of 512 tokens, layers computed again in the backward; the native arm is plain XLA with cuDNN's attention.
"""

WHOLE_STEPS = """
Rollout, comparison with the trainer's score, update and sync, one after the other, in one process on one H200: 16
prompts of 128 tokens, 8 completions each of 512, medians of three steps after two that compile. The native arm is the
same trainer with XLA's own forward beside stock vLLM. Of 327,680 sampled tokens of either model's shapes 0 differ in
the exact arm; in the native one 327,646 and 327,639 do. The two shapes ran at the same time, each on a card of its own
of one machine, and its arms one after the other. With 16 layers of Qwen3-8B's shapes trainer and engine hold 121 GiB.
"""

MISSES = """
## What misses its aim

- **256 requests on Qwen3-8B's shapes, device time: 1.01**; in seconds a rollout takes 0.92. The card is at its power
  limit in every sample, where whoever pauses more computes faster: stock vLLM computes 11.7 of every 13.3 ms, at 1650
  of 1980 MHz, ours 11.9 of every 12.5 ms, at 1575 MHz (`engine_power_qwen3_8b_h200.json`). At stock vLLM's pace ours
  takes 0.95 of its time on the card. On Qwen3-1.7B's shapes, where the host leaves the card more rest, it takes 0.99
  and 0.95. Tried before: gate, up and SwiGLU in one kernel, tiles of 128 rows, decode steps without attention's first
  kernel, pages fetched by four warps, all kept; weights fetched into L2 ahead, without gain. Then, against 1.04: rows
  of decode attention's products that are no query head hold zeros and get zero weights, which spares energy
  ([above](#decode-attention-at-the-power-limit)); fewer blocks where there is nothing to merge (96 to 35 us a step) and
  more reads in flight for the head's leaves (24 to 11 us), all kept; blocks of 16 tokens for the rotation of keys,
  slower, and no division by a temperature of 1, no faster. What is left is probably the matmuls' energy: in turns
  with cuBLAS, so at the power limit, the shipped ones of 256 tokens take 1.02 to 1.12 of its time ([above](#matmul)).
  Other tiles than the committed ones were swept for them; none was kept, and no file holds it.
- **Prompts of 8192 tokens on Qwen3-1.7B's shapes, seconds**: 1.05, and 1.06 through `vllm.LLM` and in the second call,
  where 1.05 is the aim; in device time a decode step takes 0.98. Prefill attention is next, and steps have up to 8192
  tokens where stock vLLM's have 16384. Tried, all kept: splits of 1024 instead of 512 positions, steps of 8192 instead
  of 2048 tokens, what prefill attention lists below.
- **Prefill attention over packed keys, 1 x 8192: 1.22** (1.15); over pages, as the engine runs it, 1.13. In turns both
  sides meet the card at its power limit: ours scatters by 143 us, FlashAttention 3 by 84. Tried, all kept: the next
  head's queries and keys come while one is computed, a split joins the earlier ones under the next one's scores, a mask
  costs two instructions, splits of 1024 positions instead of 512. What sets the pace is the chain of one warpgroup
  (scores, softmax, weights), not the tensor cores; the overlap that FlashAttention 3 has would need the registers that
  the declared order of the splits takes.
- **Matmul of four leaves, which is what is shipped**: of 48 shapes four are above their aim when rounded to two places,
  4096 columns of K = 4096 at 256 tokens with 1.12 and of K = 12288 at 1024 tokens with 1.08, 6144 columns at 512 tokens
  and 24576 at 256 tokens with 1.07. Ours scatters by up to 8% there, cuBLAS by up to 9%. Three to eleven tiles were
  measured for each of these in an earlier run (`matmul_tiles_h200.json`), leaves in runs of two among them; the
  committed one was the fastest.
- **Matmul of one leaf, 128 to 512 tokens**: K = 12288 takes 1.32 of 128 and 1.21 of 256 tokens: one chain of sums is
  one block's, so there are too few blocks, and four leaves take 0.93 and 1.02. K = 4096 takes 1.07 of 256 tokens with
  4096 and 6144 columns, and 1.11 of 512 with 24576, where ours scatters by 9% and cuBLAS by 13%. From 1024 tokens on it
  is at most 1.01, where 1.00 is the aim.
- **Matmul of two and eight leaves, which no shipped policy has**: up to 1.26 of 128 to 512 tokens; from 1024 tokens on
  two leaves take 1.06 to 1.09 where they miss 1.05, eight 1.11 to 1.16 where they miss 1.10. Every leaf's sum waits in
  registers or shared memory until it is added, which leaves room for narrower tiles only. Leaves in runs of two or
  four, sums in shared memory, two warpgroups a tile and clusters were tried earlier; no file holds a sweep of all tiles
  for these leaves. Up to 64 tokens of eight, another tile than the committed one takes up to 5% less.
- **A head of 16384 rows** is not measured: a result's elements are numbered with 32 bits, and no step asks for it.
"""

MATMUL = """
The committed tile, weights [N, K], bfloat16. Rounds of ours and of cuBLAS took turns, so that both met the card at the
same temperature and power.
"""

ATTENTION = """
32 query heads over 8 of size 128, bfloat16, splits of 1024 positions, in turns with FlashAttention 3.
"""

ENERGY = """
256 requests, the heads of either model, splits of 1024, without pause for seconds, so that the card is at its power
limit; each call with cuBLAS's output projection behind it, whose time and energy are in every figure. In `ours, idle
rows as found` the rows of a product of 64 rows that are no query head hold what shared memory held; the result's bits
are equal. In parentheses the spread of three rounds; energy is the card's own counter, which scatters by up to a tenth
over the second of a round: at a fixed power the time says more.
"""

LAYER = """
Qwen3-8B shapes, in one CUDA graph: all of them with launches chained and not, then each kernel alone, over and over.
"""
