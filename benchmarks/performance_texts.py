"""What docs/performance.md says beside its tables."""

INTRODUCTION = """
Made by `benchmarks/performance.py` from the files in `benchmarks/results/`, which hold card, versions, date and
command. Do not edit it. Kernels are timed by CUDA-graph replays over inputs larger than the L2 cache; each time is a
median, beside the baseline of the same run. The floor is what the card's bandwidth or its tensor cores allow. Ratios
above their aim are work to be done; [the last section](#what-misses-its-aim) says what is known of them. Measured
before kernels got their present form: of attention the decode rows of `attention_pages_h200`, launched with the kernel
for several tokens that decode steps no longer have; matmuls of two and eight leaves up to 64 tokens, which had no tiles
of fewer weight rows; norms and elementwise, which the compiler could still fuse; and the decode step by kernels.
"""

ENGINE = """
Medians of one run, in parentheses their spread (largest less smallest), and ratios of the medians; vLLM 0.26, pages of
16 positions. `isojax` is a rollout, `VllmEngine.generate`, which hands out every token with its log-probability;
`isojax_llm` is the same engine asked for them through `vllm.LLM`, as stock vLLM is. Where seconds are far above device
time, the engine waits for the host: of 256 requests stock vLLM ranks and wraps every token's value at every step, a
rollout keeps them on the device (`bridge/sampled_log.py`). In the first three files one arm was measured after the
other. In those named `turns` arms took turns, run by run; both shapes were measured at the same time, each on a card of
its own, while the machine's processors ran tests: what waits for the host scatters there, device time less.

On 1.7B shapes the host sets the pace, and machines differ: one request took a rollout 1.37 s against stock vLLM's 1.26
on one machine, 1.35 against 1.44 in turns on another, and there alone, one process after the other, 0.86 against 1.18
(`engine_alone_qwen3_1b7_h200.json`, with where the host's time goes).
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

- **256 requests on Qwen3-8B's shapes, device time: 1.03**, in both runs. The card is at its power limit: while ours
  decode it draws 692 W at 1635 of 1980 MHz, capped in all 43 samples; while stock vLLM's do, 671 W at 1830 MHz, capped
  in 41 of 44 (`engine_power_qwen3_8b_h200.json`, of the first run), with more pauses: it takes 16.3 ms a step, prompts
  included, of which a step on the card is 11.2, ours 14.1 and 11.6. Alone a layer takes 272 us (the table above), 9.8
  ms for 36. Tried: gate, up and SwiGLU in one kernel, tiles of 128 rows, decode steps without attention's first kernel,
  pages fetched by four warps, all kept; weights fetched into L2 ahead, without gain; attention over pages of 128, no
  faster at 346 tokens. Probably what is left is energy: decode attention has 4 query heads a key head, and the tensor
  cores multiply 64 rows for them. In seconds a rollout takes 0.87 of stock vLLM's, in the other run 0.78.
- **8 prompts of 8192 tokens, seconds: 1.053 and 1.050 on 8B shapes, 1.04 and 1.06 on 1.7B** (1.05), while a decode step
  is faster: prefill pays. Attention over pages of 16 takes 1.14 to 1.18 of FlashAttention 3's time there, packed 0.97
  to 1.19; pages of 128 take ours 2 to 5% less time and FlashAttention 3's 4 to 9%, which leaves 1.14 to 1.25. Products
  of four leaves take up to 1.06 of cuBLAS's time at 2048 tokens for the two that a Qwen3 layer cuts. A rollout also
  checked these 65,536 tokens one by one; since these runs it asks of all at once.
- **One request on 1.7B shapes, seconds**: 1.09 in one run, 0.94 and 0.73 in others, see above; device time 0.79 to
  0.85. A step takes the host 1.75 ms when nothing disturbs it and the card 1.45, so either may be the slower one. Of
  the host's time 0.32 ms are vLLM's inputs, 0.44 the draw and its log, 0.19 the head's launches.
- **Prefill attention, 1 x 8192: 1.19** (1.15). Three changes brought it from 1016 to 941 us: the next head's queries
  and keys come while one is computed, a split joins the earlier ones under the next one's scores, a mask costs two
  instructions. What sets the pace is the chain of one warpgroup (scores, softmax, weights), not the tensor cores; the
  overlap that FlashAttention 3 has would need the registers that the declared order of the splits takes. 16 x 1024 and
  2 x 1024 are within the aim.
- **Matmul of several leaves with many columns** (24576 x 4096): 1.06 to 1.23 from 256 tokens on. Every leaf's sum waits
  in registers or shared memory until it is added, which leaves room for narrower tiles only. Leaves in runs of two or
  four, sums in shared memory, two warpgroups a tile and clusters were tried; the committed tile is the fastest. Of a
  Qwen3 layer only the last products of attention and feed-forward have leaves.
- **Matmul up to 64 tokens**: with one and four leaves within the aim, but for the head of 64 rows, 1.01, where two
  warpgroups a tile measured 0.98 and are not committed yet, and 24576 columns in four leaves, 1.01. Two and eight
  leaves, which no shipped policy has, were not measured with today's tiles. **The head of 128 and 256 rows**: 1.06
  (1.05); tiles of 64 to 256 columns and of 128 rows were tried. **4096 x 12288 in one leaf, 128 tokens**: 1.23, with
  the four that are shipped 0.91.
"""

LAYER = """
Qwen3-8B shapes, in one CUDA graph: all of them with launches chained and not, then each kernel alone, over and over.
"""
