// accumulate_block_mass: total = total * decay, plus what each block was attended to. Integer atomics: whichever comes
// first, the sum is the same. A decay below 1 takes a kernel of its own, before.
#include "common.cuh"

namespace pagedkv {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) decay(MassParams p) {
  for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < p.num_blocks; b += int64_t{gridDim.x} * kThreads) {
    p.total[b] = __double2ll_rn(static_cast<double>(p.total[b]) * p.decay);
  }
}

__global__ void __launch_bounds__(kThreads) add(MassParams p) {
  constexpr float kOne = static_cast<float>(int64_t{1} << kMassFractionBits);
  const int64_t places = p.num_seqs * p.max_blocks;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < places; i += int64_t{gridDim.x} * kThreads) {
    const Quotient at = divide(i, static_cast<int>(p.max_blocks));
    const float mass = p.block_mass[at.quotient * p.block_mass_stride + at.remainder];
    const int32_t block = p.block_tables[at.quotient * p.block_tables_stride + at.remainder];
    if (!(mass > 0.f) || block < 0 || block >= p.num_blocks) continue;  // NaN, too
    const int64_t amount = __float2ll_rn(fminf(mass, 1.f) * kOne);      // a product with a power of two: exact
    atomicAdd(reinterpret_cast<unsigned long long*>(p.total + block), static_cast<unsigned long long>(amount));
  }
}

}  // namespace

void accumulate_block_mass(const MassParams& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.decay != 1 && p.num_blocks > 0) decay<<<grid_for(p.num_blocks, kThreads, 1 << 16), kThreads, 0, stream>>>(p);
  const int64_t places = p.num_seqs * p.max_blocks;
  if (places > 0) add<<<grid_for(places, kThreads, 1 << 16), kThreads, 0, stream>>>(p);
  check_launch("accumulate_block_mass");
}

}  // namespace pagedkv
