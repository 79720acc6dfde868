"""The vLLM backend inside real engines, on the CPU: `make test-vllm`, which has vLLM in an environment of its own.

One engine of each kind serves all tests. The INT8 engine takes prompts in pieces of 256 tokens, so prompts longer than that are
prefilled over a cache that already holds INT8, in batches together with decodes.
"""

import importlib.metadata
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

import pagedkv
from pagedkv import models
from pagedkv.bench import vllm_engine as bench

DATA = Path(os.environ.get("PAGEDKV_TEST_DATA", Path(__file__).resolve().parents[1] / "build"))
MODEL, TEXT = DATA / "engine" / models.ENGINE_MODEL, DATA / "downloads" / models.ALICE.name
OURS = "pagedkv.integrations.vllm.backend.PagedKVImpl"
BOUND = 0.15  # of a log-probability, as claimed in workflow/claims.yaml


@pytest.fixture(scope="module")
def engine():
    """Starts engines, which all live to the end: in vLLM 0.32 one that goes takes the others' process groups with it."""
    started = []
    yield lambda *args, **options: started.append(bench.engine(MODEL, *args, **options)) or started[-1]


@pytest.fixture(scope="module")
def stock(engine):
    return engine("stock")


@pytest.fixture(scope="module")
def unquantised(engine):
    return engine("unquantised", max_num_batched_tokens=256, block_size=32)


@pytest.fixture(scope="module")
def int8(engine):
    return engine("int8", max_num_batched_tokens=256, block_size=32)


@pytest.fixture(scope="module")
def text():
    return TEXT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def prompts(stock, text):
    return bench.prompts_of(stock, text)


@pytest.fixture(scope="module")
def reference(stock, prompts):
    return bench.greedy(stock, prompts)


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm) -> int:
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def close(llm, prompts, reference) -> bool:
    return max(map(abs, bench.logprob_deltas(llm, prompts, reference))) <= BOUND


def test_vllm_finds_the_plugin():
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "pagedkv.integrations.vllm:register" in [p.value for p in found]


def test_the_flag_and_only_the_flag_brings_the_backend(stock, unquantised, int8):
    assert bench.backend_of(unquantised) == bench.backend_of(int8) == OURS
    assert bench.backend_of(stock) == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"


def test_unquantised_the_engine_says_what_stock_says(unquantised, prompts, reference):
    assert [a.tokens for a in bench.greedy(unquantised, prompts)] == [a.tokens for a in reference]


def test_int8_is_close_to_stock_for_every_token(int8, prompts, reference):
    deltas = bench.logprob_deltas(int8, prompts, reference)
    assert len(deltas) >= 170
    assert max(map(abs, deltas)) <= BOUND


def test_the_engine_has_as_many_blocks_as_int8_allows(stock, int8):
    """float32 takes twice the bytes of BF16; of which, at head_dim 64, INT8 and its scales take 34/64."""
    tokens = [bench.blocks_of(llm) * llm.llm_engine.vllm_config.cache_config.block_size for llm in (int8, stock)]
    assert tokens[0] / (2 * tokens[1]) >= 1.85


def test_a_prefix_that_is_cached_is_reused(int8, text, stock):
    (prompt,) = bench.prompts_of(stock, text[5000:], (300,))
    int8.reset_prefix_cache()
    first, second = (_generate(int8, [prompt], 8)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 256
    assert close(int8, [prompt], bench.greedy(stock, [prompt], 8))


def test_64_requests_of_mixed_length_at_once(int8, stock, text):
    lengths = tuple(1 + (7 * i) % 97 for i in range(64))
    counts = [1 + i % 9 for i in range(64)]
    prompts = bench.prompts_of(stock, text[20000:], lengths)
    answers = bench.greedy(int8, prompts, counts)
    assert [len(a.tokens) for a in answers] == counts
    assert close(int8, prompts, bench.greedy(stock, prompts, counts))


def test_cancelled_requests_leave_the_others_alone_and_their_blocks_behind(int8, stock, text):
    from vllm import SamplingParams

    prompts = bench.prompts_of(stock, text[40000:], tuple(range(40, 52)))
    core, before, answers = int8.llm_engine, free_blocks(int8), {}
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=20)
    for i, prompt in enumerate(prompts):
        core.add_request(f"cancel-{i}", {"prompt_token_ids": prompt}, sampling)
    for step in range(100):
        for result in core.step():
            if result.finished:
                answers[int(result.request_id.split("-")[1])] = bench.answer(result)
        if step == 3:
            core.abort_request([f"cancel-{i}" for i in range(0, 12, 2)])
        if not core.has_unfinished_requests():
            break
    assert sorted(answers) == list(range(1, 12, 2))
    assert free_blocks(int8) == before
    for i, expected in zip(sorted(answers), bench.greedy(stock, [prompts[i] for i in sorted(answers)], 10), strict=True):
        assert len(answers[i].tokens) == 10
        for token, ours, wanted, theirs in zip(answers[i].tokens, answers[i].logprobs, expected.tokens, expected.logprobs, strict=True):
            assert abs(ours[wanted] - theirs[wanted]) <= BOUND
            if token != wanted:  # from here on they are about another text
                break


def test_layers_with_a_sliding_window_say_what_stock_says(engine, stock, text):
    """Every other layer attends to 64 tokens; vLLM gives those blocks of their own and takes them back once they are out of sight."""
    windowed = {"hf_overrides": {"layer_types": ["sliding_attention", "full_attention"] * 15, "sliding_window": 64}}
    prompts = bench.prompts_of(stock, text[80000:], (10, 300))
    theirs, exact, ours = (engine(cache, max_num_batched_tokens=256, **windowed) for cache in ("stock", "unquantised", "int8"))
    for llm in (theirs, exact, ours):
        assert any(layer.sliding_window == 64 for layer in bench.attention_layers(llm))
    reference = bench.greedy(theirs, prompts, 16)
    assert [a.tokens for a in bench.greedy(exact, prompts, 16)] == [a.tokens for a in reference]
    assert close(ours, prompts, reference)
    assert [a.tokens for a in reference] != [a.tokens for a in bench.greedy(stock, prompts, 16)]


def test_a_cache_too_small_for_all_preempts_and_resumes(engine, stock, text, monkeypatch):
    prompts = bench.prompts_of(stock, text[60000:], (90,) * 6)
    tiny = engine("int8", max_model_len=256, block_size=16, num_gpu_blocks_override=26, max_num_batched_tokens=256)
    preempted, preempt = [], scheduler(tiny)._preempt_request
    monkeypatch.setattr(scheduler(tiny), "_preempt_request", lambda *a, **k: preempted.append(a) or preempt(*a, **k))
    answers = bench.greedy(tiny, prompts, 40)
    assert preempted
    assert [len(a.tokens) for a in answers] == [40] * 6
    reference = bench.greedy(stock, prompts, 40)
    assert close(tiny, prompts, reference)


def test_heads_are_divided_among_processes(engine, int8, prompts, reference):
    """Three of them, with one of the model's KV heads each: every one holds three times the tokens in its bytes."""

    def made(worker):
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        return {(f"{(c := type(layer.impl)).__module__}.{c.__qualname__}", layer.impl.num_kv_heads) for layer in layers}

    divided = engine("int8", tensor_parallel_size=3, max_num_batched_tokens=256, block_size=32)
    assert divided.collective_rpc(made) == [{(OURS, 1)}] * 3
    assert bench.blocks_of(divided) // bench.blocks_of(int8) == 3
    assert close(divided, prompts[:3], reference[:3])


def _generate(llm, prompts, new_tokens):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


# ------------------------------------------------------------------------------------------------------ a batch


def _batch(lengths: list[int], seq_lens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        causal=True,
        num_reqs=len(lengths),
        max_query_len=max(lengths),
        block_table_tensor=torch.arange(10 * len(lengths), dtype=torch.int32).view(-1, 10),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens),
        query_start_loc_cpu=torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
    )


def _build(batch: SimpleNamespace):
    from pagedkv.integrations.vllm.backend import PagedKVMetadataBuilder

    return PagedKVMetadataBuilder(_spec(), [], None, torch.device("cpu")).build(0, batch)


def _spec(**fields):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, **fields)


def test_a_step_of_single_tokens_takes_the_engines_own_tensors():
    """Those are what a CUDA graph has captured."""
    batch = _batch([1, 1, 1], [5, 9, 1])
    built = _build(batch)
    assert built.num_rows == 3 and built.pieces == []
    assert built.seq_lens.data_ptr() == batch.seq_lens.data_ptr() and built.seq_lens.tolist() == [5, 9, 1]
    assert built.block_table.data_ptr() == batch.block_table_tensor.data_ptr() and len(built.block_table) == 3


def test_the_few_last_tokens_of_a_prompt_are_rows_like_decodes():
    built = _build(_batch([1, 3, 200, 100], [50, 640, 200, 300]))
    assert built.num_rows == 4
    assert built.seq_lens.tolist() == [50, 638, 639, 640] and built.block_table[:, 0].tolist() == [0, 10, 10, 10]
    assert [(p.begin, p.end, p.context, int(p.block_table[0])) for p in built.pieces] == [(4, 204, 0, 20), (204, 304, 200, 30)]


# --------------------------------------------------------------------------------------- one layer, without an engine


@pytest.fixture
def layer(monkeypatch):
    """Makes a layer as an engine does, from the arguments and the parts of the configuration that matter to a test."""
    from pagedkv.integrations.vllm import backend

    plain = {"num_heads": 2, "head_size": 64, "scale": 0.125, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None}
    configuration = {
        "kv_transfer_config": None,
        "speculative_config": None,
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "cache_config": SimpleNamespace(),
        "attention_config": SimpleNamespace(use_non_causal=False),
        "model_config": SimpleNamespace(dtype=torch.float32, max_model_len=64),
    }

    def make(configured=(), **arguments):
        monkeypatch.setattr(backend, "get_current_vllm_config", lambda: SimpleNamespace(**{**configuration, **dict(configured)}))
        return backend.PagedKVImpl(**{**plain, "kv_cache_dtype": "int8_per_token_head", **arguments})

    return make


@pytest.mark.parametrize(
    ("cache", "scales", "said"),
    [
        ("auto", "token_head", "INT8 cache, token_head scales"),
        ("int8_per_token_head", "block_head", "INT8 cache, block_head scales"),
        ("auto", "none", "unquantised cache"),
        ("bfloat16", "token_head", "unquantised cache"),
    ],
)
def test_one_log_line_says_what_is_in_use(layer, cache, scales, said, monkeypatch, caplog):
    import vllm.logger

    from pagedkv.integrations.vllm import backend

    vllm.logger._print_info_once.cache_clear()  # or an engine of another test has said it already
    monkeypatch.setenv("PAGEDKV_VLLM_SCALES", scales)
    monkeypatch.setattr(backend.logger, "handlers", [caplog.handler])  # whatever vLLM has its loggers pass on
    monkeypatch.setattr(backend.logger, "propagate", False)
    for _ in range(3):
        layer(kv_cache_dtype=cache)
    assert caplog.messages == [f"PagedKV attention {pagedkv.__version__} is in use: {said}, {pagedkv.backend('cpu')}"]


# --------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"head_size": 20}, "head_dim 20"),
        ({"head_size": 264}, "head_dim 264"),
        ({"alibi_slopes": [1.0, 0.5]}, "ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"attn_type": "encoder"}, "encoder attention"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
        ({"configured": {"attention_config": SimpleNamespace(use_non_causal=True)}}, "attention that is not causal"),
        (
            {"configured": {"model_config": SimpleNamespace(dtype=torch.float32, is_mm_prefix_lm=True)}},
            "attention both ways within a prefix",
        ),
        ({"configured": {"model_config": SimpleNamespace(dtype=torch.float32, use_mla=True)}}, "MLA"),
        ({"configured": {"model_config": SimpleNamespace(dtype=torch.float64)}}, "--dtype float64"),
        ({"configured": {"cache_config": SimpleNamespace(kv_cache_dtype_skip_layers=["0"])}}, "--kv-cache-dtype-skip-layers"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "layers that share a KV cache"),
        ({"chunk_lookback": 4}, "chunk_lookback"),
        ({"configured": {"kv_transfer_config": object()}}, "a KV connector"),
        ({"configured": {"speculative_config": object()}}, "speculative decoding"),
        ({"configured": {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}}, "decode context parallelism"),
        (
            {"configured": {"parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=2)}},
            "prefill context parallelism",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_name(layer, asked, named):
    with pytest.raises(NotImplementedError, match=f"does not support: {named}"):
        layer(**asked)


def test_batch_invariance_is_refused_by_name(layer, monkeypatch):
    from pagedkv.integrations.vllm import backend

    monkeypatch.setattr(backend, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))  # vLLM keeps what it read of the environment
    with pytest.raises(NotImplementedError, match="does not support: VLLM_BATCH_INVARIANT"):
        layer()


def test_soft_caps_sinks_and_windows_are_not_refused(layer):
    layer(logits_soft_cap=30.0, sinks=torch.zeros(2), sliding_window=32)


@pytest.mark.parametrize(
    ("fields", "named"), [({"non_causal": True}, "attention that is not causal"), ({"attention_chunk_size": 32}, "attention within chunks")]
)
def test_layers_that_attend_to_other_tokens_than_a_decoders_are_refused_when_the_cache_is_laid_out(fields, named):
    from pagedkv.integrations.vllm.backend import PagedKVMetadataBuilder

    with pytest.raises(NotImplementedError, match=f"does not support: {named}"):
        PagedKVMetadataBuilder(_spec(**fields), [], None, torch.device("cpu"))


def test_a_cache_of_another_kind_is_refused_by_its_name():
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    from pagedkv.integrations.vllm.backend import PagedKVMetadataBuilder

    spec = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="does not support: CrossAttentionSpec"):
        PagedKVMetadataBuilder(spec, [], None, torch.device("cpu"))


def test_values_of_another_size_than_keys_are_refused_by_name(layer):
    context = {}
    made = layer({"compilation_config": SimpleNamespace(static_forward_context=context)})
    context["layers.0"] = SimpleNamespace(impl=made, head_size_v=32)
    with pytest.raises(NotImplementedError, match="values of another size, 32, than keys, 64"):
        made.process_weights_after_loading(torch.float32)


def test_all_that_is_not_supported_is_named_at_once(layer):
    with pytest.raises(NotImplementedError, match="ALiBi; speculative decoding"):
        layer({"speculative_config": object()}, alibi_slopes=[1.0, 0.5])


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_non_causal": True}, "non-causal attention"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_kv_connector": True}, "KV connector"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
    ],
    ids=str,
)
def test_what_vllm_asks_before_it_makes_a_layer_is_answered_with_no(asked, named):
    """As its CUDA platform asks; the one for the CPU refuses MLA by itself."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from pagedkv.integrations.vllm.backend import PagedKVBackend

    def reasons(**asked):
        asked = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, **asked)
        return PagedKVBackend.validate_configuration(device_capability=DeviceCapability(9, 0), **asked._asdict())

    assert reasons() == []
    assert reasons(**asked) == [f"{named} not supported"]


SPECULATION = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"speculative_config": SPECULATION}, "speculative decoding"),
        ({"kv_transfer_config": CONNECTOR}, "a KV connector"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_asks_for_what_is_refused_does_not_start(asked, named):
    with pytest.raises(Exception, match=f"pagedkv.* does not support: {named}"):
        bench.engine(MODEL, "unquantised", **asked)
