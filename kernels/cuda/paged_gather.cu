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
__global__ void __launch_bounds__(C::threads, C::ctas_per_sm) gather(AttentionParams p, SplitPlan plan, uint32_t* checksum) {
  __shared__ StepEntry entries[C::stage_steps];
  __shared__ WorkItem work;
  const int item = blockIdx.z * gridDim.y + blockIdx.y;
  prefetch_table(plan, p, item);
  if (!find_work<C::threads>(plan, p.seq_lens, item, work)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Pages<C> pages(p, blockIdx.x, lane / 4, lane % 4);
  const int32_t* table = p.block_tables + work.seq * p.block_tables_stride;
  const int end_step = ceil_div(work.end, kStepTokens);

  uint32_t sum = 0;
  HalfStep<C> k[2], v[2];
  for (int stage = work.begin / kStepTokens; stage < end_step; stage += C::stage_steps) {
    const int stage_end = min(end_step, stage + C::stage_steps);
    __syncthreads();
    for (int s = stage + threadIdx.x; s < stage_end; s += C::threads) {
      const int token = s * kStepTokens;
      entries[s - stage] = {uint32_t(__ldg(table + token / int(p.block_size))), uint32_t(token % int(p.block_size)), 0.f, 0.f};
    }
    __syncthreads();
    auto load = [&](int which, int step) {
      if (step >= stage_end) return;
      pages.load_k(k[which], entries[step - stage]);
      pages.load_v(v[which], entries[step - stage]);
    };
    auto consume = [&](int which) {
#pragma unroll
      for (int i = 0; i < C::half_step_words; ++i) sum ^= k[which].r[i] ^ v[which].r[i];
    };
    int step = stage + warp;
    load(0, step);
    while (step < stage_end) {
      load(1, step + C::warps);
      consume(0);
      step += C::warps;
      if (step >= stage_end) break;
      load(0, step + C::warps);
      consume(1);
      step += C::warps;
    }
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum ^= __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) atomicXor(checksum, sum);
}

}  // namespace

void paged_gather(const AttentionParams& p, uint32_t* checksum, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  auto run = [&](auto config) {
    using C = decltype(config);
    if constexpr (!C::mass) {  // which p does not ask for
      const SplitPlan plan = make_plan(p, C::tokens_per_unit, C::ctas_per_sm * num_sms(), int(p.num_kv_heads), false);
      launch_kernel(gather<C>, item_grid(int(p.num_kv_heads), plan.max_items()), C::threads, stream, {}, p, plan, checksum);
    }
  };
  if (!fits_mma(p)) throw std::runtime_error("paged_gather: head_dim 64, 128 or 256, blocks of a multiple of 16 tokens and aligned rows only");
  if (p.cache_dtype == DType::kInt8) return with_head_dim<__half, CacheKind::kInt8BlockHead>(p, run);
  return with_head_dim<__half, CacheKind::kHalf>(p, run);
}

}  // namespace pagedkv
