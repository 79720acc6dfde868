// accumulate_block_mass: total = total * decay, plus what each block was attended to. One thread: a decode step's
// mass is some ten thousand additions, beside attention that reads thousands of bytes for each.
#include <cmath>

#include "../ops.h"

namespace pagedkv {

void accumulate_block_mass(const MassParams& p, void*) {
  if (p.decay != 1) {
    for (int64_t b = 0; b < p.num_blocks; ++b) p.total[b] = std::llrint(static_cast<double>(p.total[b]) * p.decay);
  }
  constexpr float kOne = static_cast<float>(int64_t{1} << kMassFractionBits);
  for (int64_t s = 0; s < p.num_seqs; ++s) {
    const float* mass = p.block_mass + s * p.block_mass_stride;
    const int32_t* table = p.block_tables + s * p.block_tables_stride;
    for (int64_t j = 0; j < p.max_blocks; ++j) {
      if (!(mass[j] > 0) || table[j] < 0 || table[j] >= p.num_blocks) continue;  // NaN, too
      p.total[table[j]] += std::llrint(std::fmin(mass[j], 1.0f) * kOne);         // a product with a power of two: exact
    }
  }
}

}  // namespace pagedkv
