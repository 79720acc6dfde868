// accumulate_block_mass: total = total * decay, plus what each block was attended to. One thread: a decode step's
// mass is some ten thousand additions, beside attention that reads thousands of bytes for each.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../ops.h"

namespace pagedkv {
namespace {

constexpr int64_t kTile = 256;  // places counted at a time, which any compiler turns into vectors

int64_t bits_of(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// A mass in units of 2^-kMassFractionBits, rounded half to even: adding 1.5 * 2^52 leaves no fraction bits, and what it
// leaves is an integer in the low bits. A mass that is not above 0, NaN too, counts as 0, one above 1 as 1.
int64_t units_of(float mass) {
  constexpr double kOne = static_cast<double>(int64_t{1} << kMassFractionBits), kMagic = 6755399441055744.0;
  const float clipped = mass > 0 ? (mass < 1 ? mass : 1.0f) : 0.0f;
  return bits_of(static_cast<double>(clipped) * kOne + kMagic) - bits_of(kMagic);
}

}  // namespace

void accumulate_block_mass(const MassParams& p, void*) {
  if (p.decay != 1) {
    for (int64_t b = 0; b < p.num_blocks; ++b) p.total[b] = std::llrint(static_cast<double>(p.total[b]) * p.decay);
  }
  int64_t units[kTile];
  for (int64_t s = 0; s < p.num_seqs; ++s) {
    for (int64_t first = 0; first < p.max_blocks; first += kTile) {
      const float* mass = p.block_mass + s * p.block_mass_stride + first;
      const int32_t* table = p.block_tables + s * p.block_tables_stride + first;
      const int64_t places = std::min(kTile, p.max_blocks - first);
      for (int64_t j = 0; j < places; ++j) units[j] = units_of(mass[j]);
      for (int64_t j = 0; j < places; ++j) {
        if (table[j] >= 0 && table[j] < p.num_blocks) p.total[table[j]] += units[j];
      }
    }
  }
}

}  // namespace pagedkv
