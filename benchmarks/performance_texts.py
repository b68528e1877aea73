"""What docs/performance.md says beside its tables."""

INTRODUCTION = """
Made by `benchmarks/performance.py` from the files in `benchmarks/results/`, which hold card, versions, date and
command. Do not edit it. Kernels are timed by CUDA-graph replays over inputs larger than the L2 cache; each time is a
median, beside the baseline of the same run. The floor is what the card's bandwidth or its tensor cores allow. Ratios
above their aim are work to be done; [the last section](#what-misses-its-aim) says what is known of them. Not measured
since splits of attention have 1024 positions instead of 512, an export has steps of up to 8192 tokens instead of 2048
and a head of 151936 rows two warpgroups a block: all engines but `engine_qwen3_8b_paced`, the trainer, a whole GRPO
step, a decode layer and a decode step.
"""

ENGINE = """
Medians of one run, in parentheses their spread (largest less smallest), and ratios of the medians; vLLM 0.26, pages of
16 positions. `isojax` is a rollout, `VllmEngine.generate`, which hands out every token with its log-probability;
`isojax_llm` is the same engine asked for them through `vllm.LLM`, as stock vLLM is; `isojax_paced` is a rollout whose
steps start no sooner after each other than stock vLLM's do. Where seconds are far above device time, the engine waits
for the host: of 256 requests stock vLLM ranks and wraps every token's value at every step, a rollout keeps them on the
device (`bridge/sampled_log.py`).

In `engine_qwen3_8b_paced` arms took turns; a time limit ended it after one run of each, so there is no spread. Its
steps have up to 8192 tokens, those of all other files up to 2048; stock vLLM's have up to 16384. In `engine_qwen3_8b`,
`engine_qwen3_8b_batch_invariant` and `engine_qwen3_1b7` one arm was measured after the other. In those named `turns`
arms took turns, run by run; both shapes were measured at the same time, each on a card of its own, while the machine's
processors ran tests: what waits for the host scatters there, device time less.

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

- **256 requests on Qwen3-8B's shapes, device time: 1.03.** The card is at its power limit, where whoever pauses more
  computes faster. In one run of each, ours take 0.99 of stock vLLM's time on the card at its pace, a step every 13.1
  ms; on their own they come every 12.5 ms, take 1.03, and a rollout takes 0.93 of stock vLLM's seconds. That fits, but
  the half millisecond between them is no more than what runs of earlier kernels scattered by. In an earlier run ours
  drew 692 W at 1635 of 1980 MHz, capped in all 43 samples, and stock vLLM 671 W at 1830 MHz, capped in 41 of 44
  (`engine_power_qwen3_8b_h200.json`). Tried: gate, up and SwiGLU in one kernel, tiles of 128 rows, decode steps without
  attention's first kernel, pages fetched by four warps, all kept; weights fetched into L2 ahead, without gain. Probably
  what is left is energy: decode attention has 4 query heads a key head, and the tensor cores multiply 64 rows for them.
- **8 prompts of 8192 tokens, seconds**: 1.04 with steps of 8192 tokens, within the aim of 1.05, in one run. With steps
  of 2048 it was 1.05 on 8B shapes, 1.04 and 1.06 on 1.7B, which was not measured since. There the prompts took the card
  1.84 s against 1.77 (`prefill_kernels_qwen3_8b_h200.json`): attention 381 ms against 310, since each chunk of a prompt
  reads again what is cached of it, the head 9 against 1, launched 32 times instead of 4; products with SwiGLU 1380
  against 1375.
- **One request on 1.7B shapes, seconds**: 1.09 in one run, 0.94 and 0.73 in others, see above; device time 0.79 to
  0.85. A step takes the host 1.75 ms when nothing disturbs it and the card 1.45, so either may be the slower one. Of
  the host's time 0.32 ms are vLLM's inputs, 0.44 the draw and its log, 0.19 the head's launches.
- **Prefill attention over packed keys, 1 x 8192: 1.22** (1.15); over pages, as the engine runs it, 1.13. In turns both
  sides meet the card at its power limit: ours scatters by 159 us, FlashAttention 3 by 86. Tried, all kept: the next
  head's queries and keys come while one is computed, a split joins the earlier ones under the next one's scores, a mask
  costs two instructions, splits of 1024 positions instead of 512. What sets the pace is the chain of one warpgroup
  (scores, softmax, weights), not the tensor cores; the overlap that FlashAttention 3 has would need the registers that
  the declared order of the splits takes.
- **Matmul of several leaves that no shipped policy has.** 24576 columns in 2 to 8 leaves take 1.06 to 1.23 from 256
  tokens on, fewer columns in two and eight leaves up to 1.26 of 256, 1.14 of 1024 and 1.18 of 8192 tokens, 6144 in four
  leaves 1.10 of 8192. All but the eight leaves up to 64 tokens were timed after cuBLAS and not in turns with it, which
  alone made 4096 columns in four leaves at 8192 tokens 1.10 instead of 1.02. Every leaf's sum waits in registers or
  shared memory until it is added, which leaves room for narrower tiles only. Leaves in runs of two or four, sums in
  shared memory, two warpgroups a tile and clusters were tried; the committed tile is the fastest. **Eight leaves, 32
  tokens**: 1.39 and 1.37 with 6144 and 24576 columns, whose 8 and 64 tokens are within the aim; not known why. 4096
  columns in eight leaves of 64 tokens and 24576 in four take 1.01.
- **Matmul of one leaf.** 4096 columns take 1.26 of 256 tokens, and of K = 12288 1.23 of 128 and 1.18 of 256: one chain
  of sums is one block's, so there are too few blocks; the four leaves that are shipped take 0.87 to 1.05 there. 4096
  columns of 8192 tokens take 1.02, timed after cuBLAS, and 24576 of 4096 tokens 1.01. Two leaves of 8 tokens with 4096
  columns and steps of 16384 tokens were not measured.
"""

MATMUL = """
The committed tile, weights [N, K], bfloat16. In `matmul_turns` rounds of ours and of cuBLAS took turns, so that both
met the card at the same temperature and power; in the other files cuBLAS came first, when the card was cooler.
"""

ATTENTION = """
32 query heads over 8 of size 128, bfloat16, splits of 1024 positions, in turns with FlashAttention 3.
"""

LAYER = """
Qwen3-8B shapes, in one CUDA graph: all of them with launches chained and not, then each kernel alone, over and over.
"""
