// paged_gather: read every byte of K and V that decode attention would read, and do nothing with them.
//
// The measured roof of the benchmarks: what a paged kernel could reach on this device if arithmetic were free. Loads as
// attention/decode_mma.cuh does, with four half-steps in flight instead of three. The XOR of all the words goes
// to `checksum`, so that no load can be optimised away and a test can see that every byte was read.
#include "attention/launch.cuh"

namespace pagedkv {
namespace {

using namespace attention;

template <class C>
__global__ void __launch_bounds__(C::threads, 2) gather(AttentionParams p, SplitPlan plan, uint32_t* checksum) {
  WorkItem work;
  if (!find_work<C::threads>(plan, p.seq_lens, blockIdx.x / int(p.num_kv_heads), &work)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Pages<C> pages(p, blockIdx.x % int(p.num_kv_heads), lane / 4, lane % 4);
  const int32_t* table = p.block_tables + work.seq * p.block_tables_stride;
  const int end_step = ceil_div(work.end, kStepTokens);

  uint32_t sum = 0;
  HalfStep<C> k[2], v[2];
  auto load = [&](int which, int step) {
    if (step >= end_step) return;
    const int token = step * kStepTokens;
    const StepEntry at{__ldg(table + token / int(p.block_size)), token % int(p.block_size), 0.f, 0.f};
    pages.load_k(k[which], at);
    pages.load_v(v[which], at);
  };
  auto consume = [&](int which) {
#pragma unroll
    for (int i = 0; i < C::half_step_words; ++i) sum ^= k[which].r[i] ^ v[which].r[i];
  };
  int step = work.begin / kStepTokens + warp;
  load(0, step);
  while (step < end_step) {
    load(1, step + C::warps);
    consume(0);
    step += C::warps;
    if (step >= end_step) break;
    load(0, step + C::warps);
    consume(1);
    step += C::warps;
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum ^= __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) atomicXor(checksum, sum);
}

}  // namespace

void paged_gather(const AttentionParams& p, uint32_t* checksum, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  auto launch = [&](auto config) {
    using C = decltype(config);
    const SplitPlan plan = make_plan(p, C::tokens_per_unit, 2 * num_sms(), int(p.num_kv_heads));
    gather<C><<<unsigned(plan.max_items() * p.num_kv_heads), C::threads, 0, stream>>>(p, plan, checksum);
    check(cudaGetLastError(), "paged_gather");
  };
  if (!fits_mma(p)) throw std::runtime_error("paged_gather: head_dim 64, 128 or 256, blocks of a multiple of 16 tokens and aligned rows only");
  if (p.cache_dtype == DType::kInt8) return with_head_dim<__half, CacheKind::kInt8BlockHead>(p, launch);
  return with_head_dim<__half, CacheKind::kHalf>(p, launch);
}

}  // namespace pagedkv
