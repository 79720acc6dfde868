// accumulate_block_mass: total = total * decay, plus what each block was attended to. Integer atomics: whichever comes
// first, the sum is the same. A decay below 1 takes a kernel of its own, before.
#include <algorithm>

#include "common.cuh"

namespace pagedkv {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) decay(MassParams p) {
  for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < p.num_blocks; b += int64_t{gridDim.x} * kThreads) {
    p.total[b] = __double2ll_rn(static_cast<double>(p.total[b]) * p.decay);
  }
}

// A thread goes down `rows` of a column, and adds to memory once for neighbours that hold the same block: the same sequence at several
// steps, or sequences that share their beginning.
template <int kInFlight>
__global__ void __launch_bounds__(kThreads) add(MassParams p, int64_t rows) {
  constexpr float kOne = static_cast<float>(int64_t{1} << kMassFractionBits);
  const int64_t stretches = (p.num_seqs + rows - 1) / rows * p.max_blocks;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < stretches; i += int64_t{gridDim.x} * kThreads) {
    const Quotient at = divide(i, static_cast<int>(p.max_blocks));
    const int64_t end = min(p.num_seqs, (at.quotient + 1) * rows);
    int32_t block = -1;
    unsigned long long sum = 0;
    const auto put = [&] {
      if (sum > 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.total + block), sum);
    };
    for (int64_t row = at.quotient * rows; row < end; row += kInFlight) {
      float mass[kInFlight];
      int32_t held[kInFlight];
#pragma unroll
      for (int r = 0; r < kInFlight; ++r) {
        const bool is_one = row + r < end;
        mass[r] = is_one ? p.block_mass[(row + r) * p.block_mass_stride + at.remainder] : 0.f;
        held[r] = is_one ? p.block_tables[(row + r) * p.block_tables_stride + at.remainder] : -1;
      }
#pragma unroll
      for (int r = 0; r < kInFlight; ++r) {
        if (!(mass[r] > 0.f) || held[r] < 0 || held[r] >= p.num_blocks) continue;  // NaN, too
        if (held[r] != block) put(), block = held[r], sum = 0;
        sum += static_cast<unsigned long long>(__float2ll_rn(fminf(mass[r], 1.f) * kOne));  // a product with a power of two: exact
      }
    }
    put();
  }
}

}  // namespace

void accumulate_block_mass(const MassParams& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.decay != 1 && p.num_blocks > 0) decay<<<grid_for(p.num_blocks, kThreads, 1 << 16), kThreads, 0, stream>>>(p);
  const int64_t rows = std::clamp<int64_t>(p.num_seqs / 64, 1, 16);  // few rows are spread over as many threads as they fill
  const int64_t stretches = (p.num_seqs + rows - 1) / rows * p.max_blocks;
  const auto kernel = rows == 1 ? add<1> : add<8>;
  if (stretches > 0) kernel<<<grid_for(stretches, kThreads, 1 << 16), kThreads, 0, stream>>>(p, rows);
  check_launch("accumulate_block_mass");
}

}  // namespace pagedkv
