"""On a card vLLM must fit the sealed sizes: left open it is set, chosen otherwise it is refused by name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform

from bridge.gpu_settings import check_requests_here, set_for_kernels
from bridge.ptxas import parse_version, places, ptxas_version
from contracts.errors import ToolchainMismatch, UnsupportedModel, UnsupportedRequest
from pallas_kernels.kernel_shapes import KernelShapes

SHAPES = KernelShapes(token_buckets=(8, 64, 512, 1024), page_size=16, max_requests=64, max_context=2048)


def _config(**changes):
    parts = {
        "cache_config": {"block_size": 16, "user_specified_block_size": False, "kv_cache_dtype_skip_layers": []},
        "scheduler_config": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
        "model_config": {"max_model_len": 2048, "enforce_eager": False},
        "compilation_config": {
            "mode": None,
            "cudagraph_mode": None,
            "cudagraph_capture_sizes": None,
            "max_cudagraph_capture_size": None,
        },
        "kernel_config": {"enable_flashinfer_autotune": None},
    }
    for name, value in changes.items():
        part = next(fields for fields in parts.values() if name in fields)
        part[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()})


@pytest.fixture(autouse=True)
def platform_check(monkeypatch):
    """The platform's own check of requests, put back after every test."""
    seen = []
    monkeypatch.setattr(current_platform, "validate_request", lambda inputs, params: seen.append(params), raising=False)
    return seen


def test_requests_outside_of_the_contract_are_refused_before_they_are_queued(platform_check):
    for _ in range(2):
        check_requests_here()
    good = SamplingParams(temperature=1.0)
    current_platform.validate_request(None, good)
    with pytest.raises(UnsupportedRequest, match="top_p"):
        current_platform.validate_request(None, SamplingParams(temperature=1.0, top_p=0.9))
    assert len(platform_check) == 2
    assert platform_check[0] is good


def test_settings_left_open_are_set():
    config = _config(block_size=32)
    set_for_kernels(config, SHAPES)
    compilation = config.compilation_config
    assert compilation.mode == CompilationMode.NONE
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL
    assert compilation.cudagraph_capture_sizes == [8, 64, 512]
    assert compilation.max_cudagraph_capture_size == 512
    assert config.cache_config.block_size == 16
    assert config.cache_config.user_specified_block_size
    assert config.kernel_config.enable_flashinfer_autotune is False
    with pytest.raises(UnsupportedRequest, match="top_p"):
        current_platform.validate_request(None, SamplingParams(temperature=1.0, top_p=0.9))


@pytest.mark.parametrize("changes", [{"enforce_eager": True}, {"cudagraph_mode": CUDAGraphMode.NONE}])
def test_graphs_can_be_left_out(changes):
    config = _config(**changes)
    set_for_kernels(config, SHAPES)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.compilation_config.mode == CompilationMode.NONE


def test_steps_between_two_buckets_have_graphs_up_to_the_lower_one():
    config = _config(max_num_batched_tokens=600)
    set_for_kernels(config, SHAPES)
    assert config.compilation_config.cudagraph_capture_sizes == [8, 64, 512]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 32, "user_specified_block_size": True}, "block_size: found 32; allowed: 16"),
        ({"max_num_seqs": 65}, "max_num_seqs: found 65; allowed: at most 64"),
        ({"max_model_len": 4096}, "max_model_len: found 4096; allowed: at most 2048"),
        ({"max_num_batched_tokens": 2048}, "max_num_batched_tokens: found 2048; allowed: at most 1024"),
        ({"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE}, "cudagraph_mode: found FULL_AND_PIECEWISE"),
        ({"cudagraph_capture_sizes": [8, 24]}, r"cudagraph_capture_sizes: found \[24\]"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_beyond_the_sealed_sizes_are_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        set_for_kernels(_config(**changes), SHAPES)


def test_the_version_of_ptxas_is_read_from_what_it_prints():
    printed = "ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release 13.0, V13.0.88\nBuild x\n"
    assert parse_version(printed) == "13.0.88"
    with pytest.raises(ToolchainMismatch, match="ptxas"):
        parse_version("no such thing")


def test_a_ptxas_is_looked_for_where_jax_says_then_in_wheels_then_in_the_system(tmp_path, monkeypatch):
    (tmp_path / "wheels" / "nvidia" / "cu13").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "wheels"))
    found = places("/opt/cuda")
    wheel = tmp_path / "wheels" / "nvidia" / "cu13" / "bin" / "ptxas"
    order = [found.index(place) for place in (Path("/opt/cuda/bin/ptxas"), wheel, Path("/usr/local/cuda/bin/ptxas"))]
    assert order == sorted(order)


def test_without_a_ptxas_the_toolchain_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("bridge.ptxas.places", lambda cuda_path: [tmp_path / "ptxas"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainMismatch, match=r"toolchain\.ptxas"):
        ptxas_version()
