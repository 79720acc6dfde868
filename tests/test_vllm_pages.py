"""The vLLM backend's pages and prefill, without an engine: what is written into a page is what is attended to, however a prompt is cut."""

import logging
import sys

import pytest
import torch

from pagedkv.integrations import vllm as plugin
from pagedkv.integrations.vllm.pages import SCALE_BYTES, Pages
from pagedkv.integrations.vllm.prefill import Piece, Prefill

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 8
SCALE = DIM**-0.5


@pytest.fixture(autouse=True)
def _plain(plain_pytorch):
    """What is tested here is which bytes are read and written, not the kernels."""


def buffer(dtype: torch.dtype, num_blocks: int = 24) -> torch.Tensor:
    """As vLLM allocates it."""
    content = 2 * (DIM + SCALE_BYTES) if dtype == torch.int8 else 2 * DIM
    return torch.zeros(num_blocks, BLOCK, KV_HEADS, content, dtype=dtype)


def pages_of(dtype: torch.dtype, granularity: str = "token_head") -> Pages:
    return Pages.view(buffer(dtype), BLOCK, KV_HEADS, DIM, granularity)


def tokens(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))


def read(pages: Pages, block_table: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.full((2, end - begin, KV_HEADS, DIM), torch.nan)
    pages.read(block_table, begin, k, v)
    return k, v


def exact(q, k, v, context, window=None, cap=None, sinks=None):
    """Attention of the last tokens to all, in float64; `q` has those after `context`."""
    k, v = (t.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    distance = torch.arange(context, context + len(q))[:, None] - torch.arange(len(k))
    logits = logits.masked_fill((distance < 0) | (distance >= (window or len(k))), -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=2)
    return torch.einsum("hqk,khd->qhd", logits.softmax(2)[..., : len(k)], v).float()


CACHES = [(torch.float32, "token_head"), (torch.int8, "token_head"), (torch.int8, "block_head")]
TOLERANCE = {torch.float32: 1e-5, torch.int8: 0.03}


@pytest.mark.parametrize(("dtype", "granularity"), CACHES)
def test_planes_share_no_byte_and_stay_in_their_page(dtype, granularity):
    cache = buffer(dtype)
    pages = Pages.view(cache, BLOCK, KV_HEADS, DIM, granularity)
    planes = [p for p in (pages.k, pages.v, pages.k_scale, pages.v_scale) if p is not None]
    for number, plane in enumerate(planes, start=1):
        assert (plane == 0).all(), "no plane before wrote here"
        plane.fill_(number)
        assert plane.is_contiguous() or plane[0].is_contiguous()
    assert [p.unique().tolist() for p in planes] == [[n + 1] for n in range(len(planes))]
    pages.k[3].fill_(9)
    assert (cache[2] != 9).all() and (cache[4] != 9).all()


def test_an_int8_page_has_the_bytes_that_vllm_reckons():
    assert buffer(torch.int8)[0].numel() == 2 * BLOCK * KV_HEADS * (DIM + 4)
    assert pages_of(torch.int8).v_scale.shape == (24, BLOCK, KV_HEADS)


@pytest.mark.parametrize(("dtype", "granularity"), CACHES)
def test_pages_may_be_padded(dtype, granularity):
    wide = torch.zeros(24, buffer(dtype)[0].numel() + 64, dtype=dtype)
    shape, page = buffer(dtype).shape, buffer(dtype).stride()
    pages = Pages.view(wide.as_strided(shape, (wide.stride(0), *page[1:])), BLOCK, KV_HEADS, DIM, granularity)
    _, k, v = tokens(20)
    pages.write(k, v, torch.arange(20) + 3 * BLOCK)
    back, _ = read(pages, torch.tensor([3, 4, 5]), 0, 20)
    torch.testing.assert_close(back, k, rtol=0, atol=TOLERANCE[dtype])
    assert (wide[:, -64:] == 0).all()


@pytest.mark.parametrize(("dtype", "granularity"), CACHES)
def test_what_is_written_is_read(dtype, granularity):
    pages = pages_of(dtype, granularity)
    _, k, v = tokens(20)
    table = torch.tensor([7, 2, 11], dtype=torch.int32)
    slots = torch.tensor([int(table[t // BLOCK]) * BLOCK + t % BLOCK for t in range(20)])
    pages.write(k, v, slots)
    pages.write(k + 1, v + 1, torch.full((20,), -1))  # padding
    back_k, back_v = read(pages, table, 5, 19)
    torch.testing.assert_close(back_k, k[5:19], rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(back_v, v[5:19], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("granularity", ["token_head", "block_head"])
def test_a_long_context_is_read_in_parts(granularity, in_kernel, monkeypatch):
    monkeypatch.setattr("pagedkv.integrations.vllm.pages._READ_TOKENS", 2 * BLOCK)
    pages = Pages.view(buffer(torch.int8), BLOCK, KV_HEADS, DIM, granularity, in_kernel)
    _, k, v = tokens(7 * BLOCK + 3)
    table = torch.randperm(24)[:8].int()
    pages.write(k, v, (table.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: len(k)])
    for begin, end in ((0, len(k)), (13, 50), (16, 32), (58, 59)):
        for back, new in zip(read(pages, table, begin, end), (k, v), strict=True):
            torch.testing.assert_close(back, new[begin:end], rtol=0, atol=0.03)


@pytest.mark.parametrize("option", [{}, {"window": 5}, {"cap": 2.0}, {"window": 9, "sinks": torch.linspace(-1, 1, HEADS)}], ids=str)
@pytest.mark.parametrize("cuts", [(30,), (11, 30), (1, 2, 16, 17, 30)], ids=str)
@pytest.mark.parametrize(("dtype", "granularity"), CACHES)
def test_however_a_prompt_is_cut_attention_is_the_same(dtype, granularity, cuts, option):
    pages = pages_of(dtype, granularity)
    q, k, v = tokens(30)
    table = torch.tensor([[0, 0, 0, 0], [9, 4, 17, 6]], dtype=torch.int32)
    slots = torch.tensor([int(table[1, t // BLOCK]) * BLOCK + t % BLOCK for t in range(30)])
    names = {"window": "sliding_window", "cap": "logits_soft_cap", "sinks": "sinks"}
    prefill = Prefill(SCALE, **{names[key]: value for key, value in option.items()})
    out = torch.full_like(q, torch.nan)
    for begin, end in zip((0, *cuts), cuts, strict=False):
        new = slice(begin, end)
        pages.write(k[new], v[new], slots[new])
        prefill(q[new], k[new], v[new], pages, [Piece(0, end - begin, begin, table[1])], out[new])
    torch.testing.assert_close(out, exact(q, k, v, 0, **option), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("granularity", ["token_head", "block_head"])
def test_whoever_rotates_attention_is_over_k_and_v_themselves(granularity, in_kernel):
    pages = Pages.view(buffer(torch.int8), BLOCK, KV_HEADS, DIM, granularity, in_kernel)
    q, k, v = tokens(21)
    k[..., 3] *= 20  # an outlier channel, as K has them
    table = torch.tensor([[9, 4, 17]], dtype=torch.int32)
    pages.write(k, v, torch.tensor([int(table[0, t // BLOCK]) * BLOCK + t % BLOCK for t in range(21)]))
    out = pages.decode(q[20:], table, torch.tensor([21], dtype=torch.int32), SCALE)
    torch.testing.assert_close(out, exact(q[20:], k, v, 20), rtol=0, atol=0.05)


def test_pieces_of_one_batch_do_not_mix():
    pages = pages_of(torch.int8)
    q, k, v = tokens(24)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    pages.write(k[:10], v[:10], torch.arange(10) + 3 * BLOCK)
    pieces = [Piece(0, 8, 0, table[0]), Piece(10, 16, 10, table[1])]  # tokens 8 and 9 of the batch belong to nobody here
    out = torch.zeros_like(q)
    Prefill(SCALE)(q, k, v, pages, pieces, out)
    torch.testing.assert_close(out[:8], exact(q[:8], k[:8], v[:8], 0), rtol=0, atol=1e-5)
    after = [torch.cat((t[:10], t[10:16])) for t in (k, v)]
    torch.testing.assert_close(out[10:16], exact(q[10:16], *after, 10), rtol=0, atol=0.03)
    assert (out[8:10] == 0).all() and (out[16:] == 0).all()


def test_another_vllm_than_those_served_is_named_once_the_backend_is_asked_for(monkeypatch):
    monkeypatch.setattr(plugin, "installed", lambda: "0.21.0")
    with pytest.raises(RuntimeError, match=r"serves vLLM 0\.26, 0\.27, 0\.32; this is 0\.21\.0"):
        _ = plugin.Backend


def test_a_vllm_without_that_registry_starts_all_the_same_and_is_told_why(monkeypatch, caplog):
    """vLLM calls plugins unguarded: an error would end every engine, also those that never ask for this backend."""
    for module in ("vllm.platforms", "vllm.v1.attention.backends.registry"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(plugin, "installed", lambda: "0.10.2")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    assert caplog.messages == ["pagedkv's vLLM backend serves vLLM 0.26, 0.27, 0.32; this is 0.10.2"]
    monkeypatch.setattr(plugin, "installed", lambda: "0.27.1")
    with pytest.raises(ImportError):
        plugin.register()
