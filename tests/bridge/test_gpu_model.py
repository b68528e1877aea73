"""The card's model class on CPU tensors and CPU regions: its padding, paging and bucketing give the trainer's bits."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from engine_samples import PADDED_ROWS, PADDED_TOKENS, same_bits, tiny_policy

from bridge import attention_backend, gpu_model
from bridge.arrays import to_torch
from bridge.gpu_attention import GpuMetadataBuilder
from contracts.errors import LaunchRefused, WeightDigestMismatch
from isojax import export_policy, pack
from pallas_kernels.kernel_shapes import KernelShapes

PAGE, BLOCKS = 16, 12
SHAPES = KernelShapes(token_buckets=(8, 32), head_rows=(8, 16), page_size=PAGE, max_requests=4, max_context=256)
LENGTHS = (20, 9)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A model with weights and a cache, and the forward context that vLLM would set."""
    policy, params = tiny_policy("bfloat16", tied=False)
    folder = tmp_path_factory.mktemp("policy") / "exported"
    export_policy(folder, policy, params, {})
    context = SimpleNamespace(attn_metadata=None, no_compile_layers={})
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
        cache_config=SimpleNamespace(block_size=PAGE),
        compilation_config=SimpleNamespace(static_forward_context=context.no_compile_layers),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_model, "current_card", lambda: torch.device("cpu"))
        bundle = SimpleNamespace(shapes=SHAPES, programs=(), sha256="0" * 64)
        patch.setattr(gpu_model, "load_kernels", lambda folder, contract: bundle)
        patch.setattr(gpu_model, "compile_kernels", lambda programs, device: 0.0)
        patch.setattr(attention_backend, "get_forward_context", lambda: context)
        model = gpu_model.GpuPolicyModel(vllm_config=config)
        model.weights.begin_update()
        for name, value in params.items():
            model.weights.write(name, 0, to_torch(jnp.asarray(value)).reshape(-1))
        assert not model.weights.finish_update()
        size = policy.config.num_kv_heads, policy.config.head_dim
        for layer in model.layers:
            # Pages that nobody wrote hold NaN.
            layer.kv_cache = torch.full((BLOCKS, 2, PAGE, *size), float("nan"), dtype=torch.bfloat16)
        yield SimpleNamespace(model=model, policy=policy, params=params, context=context)


def _run(engine, spans: list[tuple[int, int]], sequences: list[list[int]], padded: int) -> torch.Tensor:
    """Hidden states of a step that computes tokens `before..after` of each sequence, padded as a graph's would be."""
    real = sum(after - before for before, after in spans)
    starts = np.cumsum([0, *(after - before for before, after in spans)])
    table = torch.zeros(4, 8, dtype=torch.int32)
    ids, positions = torch.full((padded,), 77, dtype=torch.int32), torch.full((padded,), 9, dtype=torch.int64)
    slots = torch.full((padded,), -1, dtype=torch.int64)
    for number, ((before, after), sequence) in enumerate(zip(spans, sequences, strict=True)):
        table[number, :2] = torch.tensor([1 + 2 * number, 2 + 2 * number])
        for at, position in enumerate(range(before, after), int(starts[number])):
            ids[at], positions[at] = sequence[position], position
            slots[at] = int(table[number, position // PAGE]) * PAGE + position % PAGE
    ends = torch.tensor([*starts, *[real] * (4 - len(spans))], dtype=torch.int32)
    common = SimpleNamespace(
        query_start_loc=ends,
        slot_mapping=slots,
        block_table_tensor=table,
        max_query_len=max(after - before for before, after in spans),
    )
    builder = GpuMetadataBuilder.__new__(GpuMetadataBuilder)
    engine.context.attn_metadata = {"layer": builder.build(0, common)}
    return engine.model(ids, positions)[:real]


def test_chunks_then_decode_give_the_trainers_rows(engine):
    generator = np.random.default_rng(0)
    sequences = [generator.integers(3, 300, length + 1).tolist() for length in LENGTHS]
    hidden: list[list[torch.Tensor]] = [[], []]
    steps = [[(0, 13), (0, 9)], [(13, 20)], [(20, 21), (9, 10)]]
    for spans, padded in zip(steps, (32, 8, 8), strict=True):
        rows = _run(engine, spans, sequences[: len(spans)], padded)
        for number, (before, after) in enumerate(spans):
            hidden[number].append(rows[: after - before])
            rows = rows[after - before :]
    # 31 rows: two buckets of the head, one after the other.
    together = torch.cat([torch.cat(parts) for parts in hidden])
    found = engine.model.compute_logits(together)
    assert found.dtype == torch.float32
    batch = pack(sequences, length_multiple=PADDED_TOKENS)
    wanted = np.flatnonzero(batch.segment_ids >= 0)
    padded_rows = np.resize(wanted, PADDED_ROWS)
    expected = np.asarray(engine.policy.log_prob_rows(engine.params, batch, padded_rows))[: len(wanted)]
    assert same_bits([found.numpy()], [expected])
    few = engine.model.compute_logits(together[5:8])
    assert same_bits([few.numpy()], [expected[5:8]])


def test_profiling_without_a_cache_gives_the_right_shape(engine):
    engine.context.attn_metadata = None
    hidden = engine.model(torch.zeros(11, dtype=torch.int32), torch.zeros(11, dtype=torch.int64))
    assert hidden.shape == (11, engine.policy.config.hidden_size)


def test_more_tokens_than_any_bucket_holds_are_refused(engine):
    engine.context.attn_metadata = None
    with pytest.raises(LaunchRefused, match="tokens of a step: found 33; allowed: at most 32"):
        engine.model(torch.zeros(33, dtype=torch.int32), torch.zeros(33, dtype=torch.int64))


def test_each_case_has_the_attention_of_its_steps(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(gpu_model, "ptxas_version", lambda: "none")
    installed = engine.model.describe()["installed"]
    attention = {case: {name for name in names if "attention" in name} for case, names in installed.items()}
    assert attention == {"engine_prefill": {"paged_attention"}, "engine_decode": {"paged_decode_attention"}}
    assert len(installed["engine_prefill"]) == len(installed["engine_decode"])


def test_served_kernels_are_those_of_the_buckets_that_ran(engine):
    model = engine.model
    small = {"matmul": {"small"}}
    model._launched.update(
        {
            (8, False): small | {"paged_attention": {"any"}},
            (8, True): small | {"paged_decode_attention": {"single"}},
            (32, False): {"matmul": {"large"}},
        }
    )
    model._launched_by_head.update({"log_prob_rows": {"head"}})
    model.note_step(5, decode=True)
    model.note_step(8, decode=False)
    # Nothing of decode's own was launched for that many tokens, so it ran as any step does.
    model.note_step(20, decode=True)
    served = {case: model._kernels_of(case, buckets) for case, buckets in model._served.items()}
    assert served == {
        "engine_decode": {"matmul": ["small"], "log_prob_rows": ["head"], "paged_decode_attention": ["single"]},
        "engine_prefill": {"matmul": ["large", "small"], "log_prob_rows": ["head"], "paged_attention": ["any"]},
    }


def test_dropped_weights_are_not_served_before_they_were_written_again(engine):
    weights = engine.model.weights
    weights.require_known()
    held = weights.digest
    weights.begin_update()
    with pytest.raises(WeightDigestMismatch, match="dropped by a deep sleep"):
        weights.require_known()
    weights.digest = held


def test_vllms_dummy_weights_reach_the_parameters_alone(engine):
    # load_format dummy overwrites every floating-point entry of the state: none may be a constant.
    floating = {name for name, tensor in engine.model.state_dict().items() if tensor.is_floating_point()}
    assert floating == {f"weights.{name.replace('.', '_')}" for name in engine.policy.parameter_shapes}
