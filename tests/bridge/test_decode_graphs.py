"""Decode steps are given graphs of their own, on vLLM's own manager, and their attention is the one without tiles."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from bridge import gpu_attention, torch_ops  # noqa: F401  (the latter registers the ops)
from bridge.decode_graphs import DecodeGraphs
from bridge.gpu_attention import GpuCachedAttention, GpuMetadataBuilder, GpuStepMetadata, capturing
from bridge.step_inputs import BatchTensors, StepOperands
from pallas_kernels import counters

BUCKETS = (8, 16, 32, 64)


@pytest.fixture
def manager(monkeypatch):
    """Makes vLLM's manager for capture sizes and a number of requests, and ours in its place."""
    last = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: last)
    monkeypatch.setattr(
        cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None), raising=True
    )

    def make(sizes, requests, decode_buckets=BUCKETS, mode=CUDAGraphMode.FULL):
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=requests),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=max(sizes, default=0)
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=None,
        )
        vllms = ModelCudaGraphManager(config, torch.device("cpu"), mode, 1)
        ours = DecodeGraphs(vllms, decode_buckets)
        ours._graphs_captured = True
        return vllms, ours

    return make


def _decode_tokens(manager) -> list[int]:
    return [desc.num_tokens for desc in manager._capture_descs[CUDAGraphMode.FULL] if desc.uniform_token_count == 1]


@pytest.mark.parametrize(
    ("sizes", "requests", "decode_buckets", "expected"),
    [
        ((8, 16, 32, 64), 16, BUCKETS, [16, 8]),
        # Of five requests a step is padded to eight rows.
        ((8, 16), 5, BUCKETS, [8]),
        ((8, 64), 20, BUCKETS, [64, 8]),
        ((8, 64), 20, (8, 16, 32), [8]),
        ((64,), 4, (8,), []),
    ],
)
def test_every_size_that_a_decode_step_is_padded_to_has_a_graph_of_its_own(
    manager, sizes, requests, decode_buckets, expected
):
    vllms, ours = manager(sizes, requests, decode_buckets)
    assert _decode_tokens(ours) == expected
    assert _decode_tokens(vllms) == []
    others = [desc for desc in ours._capture_descs[CUDAGraphMode.FULL] if desc.uniform_token_count is None]
    assert others == vllms._capture_descs[CUDAGraphMode.FULL]
    assert len(set(ours._capture_descs[CUDAGraphMode.FULL])) == len(sizes) + len(expected)


def test_a_decode_step_takes_its_graph_and_no_other_step_does(manager):
    vllms, ours = manager((8, 16, 32), 12)
    vllms._graphs_captured = True
    for requests in range(1, 13):
        decode = ours.dispatch(requests, requests, 1, 0)
        assert (decode.cg_mode, decode.uniform_token_count) == (CUDAGraphMode.FULL, 1)
        assert decode.num_reqs >= requests
        assert decode.num_tokens == (8 if requests <= 8 else 16)
        for tokens, uniform in ((requests + 1, None), (2 * requests, 2), (30, None)):
            assert ours.dispatch(requests, tokens, uniform, 0) == vllms.dispatch(requests, tokens, uniform, 0)
    # More tokens than any graph has.
    assert ours.dispatch(12, 33, None, 0).cg_mode == CUDAGraphMode.NONE


def test_the_worker_has_our_graphs_captured_in_place_of_vllms(manager, monkeypatch):
    from vllm.v1.worker.gpu_worker import Worker

    from bridge.gpu_worker import IsojaxGpuWorker

    vllms, _ = manager((8, 16, 32), 12)
    captured = []
    monkeypatch.setattr(
        Worker, "compile_or_warm_up_model", lambda self: captured.append(self.model_runner.cudagraph_manager) or "times"
    )
    monkeypatch.setattr(Worker, "get_model", lambda self: SimpleNamespace(decode_buckets=(8, 16)))
    worker = IsojaxGpuWorker.__new__(IsojaxGpuWorker)
    state = SimpleNamespace(serving=False)
    worker.model_runner = SimpleNamespace(cudagraph_manager=vllms, model_state=state)
    assert worker.compile_or_warm_up_model() == "times"
    assert _decode_tokens(captured.pop()) == [16, 8]
    assert state.serving


def test_without_graphs_there_is_nothing_to_capture(manager):
    _, ours = manager((), 8, mode=CUDAGraphMode.NONE)
    assert not ours.needs_capture()


def test_what_a_capture_is_of_reaches_the_metadata_that_is_built_for_it(manager, monkeypatch):
    """vLLM's loop over the graphs, on a machine without any: its dummy batches always look like decode steps."""
    _, ours = manager((8, 16, 32), 12)
    builder = GpuMetadataBuilder.__new__(GpuMetadataBuilder)
    common = SimpleNamespace(query_start_loc=None, slot_mapping=None, block_table_tensor=None, max_query_len=1)
    built = []

    def prepare(*_, **__):
        built.append(builder.build_for_cudagraph_capture(common).decode)
        return cudagraph_utils.AttentionState({}, {})

    stopped = lambda *_, **__: nullcontext()  # noqa: E731
    monkeypatch.setattr(cudagraph_utils, "prepare_inputs_to_capture", prepare)
    monkeypatch.setattr(cudagraph_utils, "set_forward_context", stopped)
    monkeypatch.setattr(cudagraph_utils, "graph_capture", stopped)
    monkeypatch.setattr(cudagraph_utils, "capture_pool", stopped, raising=False)
    monkeypatch.setattr(cudagraph_utils, "current_stream", lambda: None, raising=False)
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", stopped)
    state = SimpleNamespace(prepare_dummy_inputs=lambda *_: {})
    tokens = SimpleNamespace(
        input_ids=torch.zeros(32), positions=torch.zeros(32), is_padding=torch.zeros(32, dtype=torch.bool)
    )
    model = lambda **inputs: torch.zeros(len(inputs["input_ids"]), 4)  # noqa: E731
    ours.capture(model, state, tokens, None, None, [], None)
    wanted = [desc.uniform_token_count == 1 for desc in ours._capture_descs[CUDAGraphMode.FULL]]
    assert wanted == [False, True, False, True, False]
    # Each is built twice: to warm up, and to capture.
    assert built == [decode for decode in wanted for _ in range(2)]
    assert set(ours.graphs) == set(ours._capture_descs[CUDAGraphMode.FULL])


@pytest.mark.parametrize("longest", [1, 2])
def test_the_metadata_of_a_real_step_says_what_the_batch_is(longest):
    common = SimpleNamespace(query_start_loc=None, slot_mapping=None, block_table_tensor=None, max_query_len=longest)
    builder = GpuMetadataBuilder.__new__(GpuMetadataBuilder)
    assert builder.build(0, common).decode == (longest == 1)
    assert not builder.build_for_cudagraph_capture(common).decode
    with capturing(decode=True):
        assert builder.build(0, common).decode == (longest == 1)
        assert builder.build_for_cudagraph_capture(common).decode
    assert not builder.build_for_cudagraph_capture(common).decode


@pytest.mark.parametrize("decode", [False, True])
def test_attention_calls_the_kernels_of_the_step(decode, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    pages, q = (torch.randn(shape, generator=generator).bfloat16() for shape in ((6, 16, 1, 64), (8, 2, 64)))
    owner = torch.tensor([0, 1, *[-1] * 6], dtype=torch.int32)
    positions = torch.tensor([17, 3, *[0] * 6], dtype=torch.int32)
    table = torch.tensor([[0, 2], [4, 0]], dtype=torch.int32)
    operands = StepOperands(positions, positions, owner, positions, table)
    given = GpuStepMetadata(BatchTensors(owner, owner, table), decode, operands)
    monkeypatch.setattr(gpu_attention, "step_metadata", lambda: given)
    attention = GpuCachedAttention(0.125, 512)
    attention.bind(pages)
    expected = torch.ops.isojax.paged_attention(
        q, pages[:-1], pages[1:], table, owner, positions, scale=0.125, split=512
    )
    before = Counter(counters.snapshot().served)
    found = attention.attend(q, positions)
    called = Counter(counters.snapshot().served) - before
    assert [region for region, _ in called] == ["paged_decode_attention" if decode else "paged_attention"]
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
