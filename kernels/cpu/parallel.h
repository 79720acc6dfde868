// Threads: at::parallel_for with items handed out as threads come free.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>

namespace pagedkv {

// Calls f(i) for i in [0, n) from torch's threads. Items are claimed one at a time, since their costs differ
// (ragged sequences); which thread runs an item never shows in the result.
template <class F>
void parallel_items(int64_t n, const F& f) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, n, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
  });
}

// Calls f(begin, end) over [0, n) cut into equal ranges of at least `grain`.
template <class F>
void parallel_ranges(int64_t n, int64_t grain, const F& f) {
  at::parallel_for(0, n, grain, f);
}

}  // namespace pagedkv
