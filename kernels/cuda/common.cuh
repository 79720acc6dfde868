// What the kernels share: error checks, launches, dispatch over dtypes, prefix sums, eight elements at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "ops.h"

namespace pagedkv {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// CTAs for `work` items of which each CTA takes `per_cta`, at most `most`: kernels loop over what is left.
inline unsigned grid_for(int64_t work, int64_t per_cta, int64_t most) {
  const int64_t ctas = (work + per_cta - 1) / per_cta;
  return static_cast<unsigned>(ctas < 1 ? 1 : ctas < most ? ctas : most);
}

// ---------------------------------------------------------------------------------------------- launches

template <typename T>
__global__ void architecture_probe() {}

// The virtual architecture that this library's code was compiled for, times ten: 75 where compute_75 PTX runs
// on a newer card, so that the card's own capability would mislead.
inline int compiled_for() {
  static const int version = [] {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, architecture_probe<void>), "cudaFuncGetAttributes");
    return attributes.ptxVersion;
  }();
  return version;
}

// Launch attribute for a kernel after another of the same call, from sm_90 on: it is scheduled while that one still runs, once all
// of its CTAs have called let_next_kernel_start or ended. Every thread of it calls wait_for_kernel_before, ahead of its first access
// to what the other writes or still reads. Code built for an older architecture does not wait there, so it must not be
// overlapped, whatever runs it.
inline cudaLaunchAttribute overlap() {
  cudaLaunchAttribute attribute{};
  if (compiled_for() >= 90) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return attribute;
}
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// With attributes, of which those left empty are ignored.
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream, std::initializer_list<cudaLaunchAttribute> attributes,
            const Arguments&... arguments) {
  cudaLaunchAttribute given[4];
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.stream = stream;
  config.attrs = given;
  for (const cudaLaunchAttribute& attribute : attributes) {
    if (attribute.id != cudaLaunchAttributeIgnore) given[config.numAttrs++] = attribute;
  }
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "kernel launch");
}

// Calls `use` with a value of the element type that `dtype` names.
template <class Use>
void dispatch_float(DType dtype, Use use) {
  switch (dtype) {
    case DType::kFloat16: return use(__half{});
    case DType::kBFloat16: return use(__nv_bfloat16{});
    default: return use(float{});
  }
}

// a / b and the remainder, both non-negative; 64-bit division only where the numerator needs it.
struct Quotient {
  int64_t quotient;
  int remainder;
};
__device__ __forceinline__ Quotient divide(int64_t a, int b) {
  if (a <= 0x7fffffff) {
    const uint32_t q = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return {q, static_cast<int>(static_cast<uint32_t>(a) - q * static_cast<uint32_t>(b))};
  }
  const int64_t q = a / b;
  return {q, static_cast<int>(a - q * b)};
}

// ------------------------------------------------------------------------------------------- prefix sums

// Inclusive, over aligned groups of kLanes (a power of two) lanes of a warp. All lanes take part.
template <int kLanes = 32, class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int delta = 1; delta < kLanes; delta *= 2) {
    const T before = __shfl_up_sync(~0u, value, delta, kLanes);
    if (lane >= delta) value += before;
  }
  return value;
}

// Exclusive, over the kThreads threads of a CTA, and the total. `scratch` is shared memory for kThreads / 32 + 1 values, free
// again after the caller's next barrier.
template <int kThreads, class T>
__device__ __forceinline__ T block_exclusive_sum(T value, T* scratch, T* total) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T inclusive = warp_inclusive_sum(value);
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  T before = 0;
  if constexpr (kWarps <= 8) {  // a few independent loads take less time than five shuffles and a barrier
    T sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? scratch[w] : T{0};
      sum += scratch[w];
    }
    *total = sum;
  } else {
    static_assert(kWarps == 32, "a lane for each warp");
    if (warp == 0) {
      const T own = scratch[lane];
      const T up_to_here = warp_inclusive_sum(own);
      scratch[lane] = up_to_here - own;
      if (lane == 31) scratch[kWarps] = up_to_here;
    }
    __syncthreads();
    *total = scratch[kWarps];
    before = scratch[warp];
  }
  return before + inclusive - value;
}

// --------------------------------------------------------------------- eight elements, as they lie in memory

constexpr int kUnit = 8;  // head_dim is a multiple of it

template <class T>
struct Unit {
  uint32_t words[kUnit * sizeof(T) / 4];
};

// kAligned: the address is a multiple of min(16, kUnit * sizeof(T)).
template <bool kAligned, class T>
__device__ __forceinline__ Unit<T> load_unit(const T* from) {
  Unit<T> unit;
  if constexpr (kAligned && sizeof(T) == 1) {
    *reinterpret_cast<uint2*>(unit.words) = *reinterpret_cast<const uint2*>(from);
  } else if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(unit) / 16); ++i) {
      reinterpret_cast<uint4*>(unit.words)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
    T* elements = reinterpret_cast<T*>(unit.words);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) elements[i] = from[i];
  }
  return unit;
}

template <bool kAligned, class T>
__device__ __forceinline__ void store_unit(T* to, const Unit<T>& unit) {
  if constexpr (kAligned && sizeof(T) == 1) {
    *reinterpret_cast<uint2*>(to) = make_uint2(unit.words[0], unit.words[1]);
  } else if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(unit) / 16); ++i) {
      reinterpret_cast<uint4*>(to)[i] = make_uint4(unit.words[4 * i], unit.words[4 * i + 1], unit.words[4 * i + 2], unit.words[4 * i + 3]);
    }
  } else {
    const T* elements = reinterpret_cast<const T*>(unit.words);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) to[i] = elements[i];
  }
}

// Where the unit (row of the block, part of the row) of a lane lies as the warp walks a block 32 units at a time.
struct UnitWalk {
  int offset, part, step_offset, step_part, parts;
  __device__ UnitWalk(int lane, int parts_) : parts(parts_) {
    offset = lane / parts, part = lane % parts;
    step_offset = 32 / parts, step_part = 32 % parts;
  }
  __device__ __forceinline__ void advance() {
    offset += step_offset, part += step_part;
    if (part >= parts) part -= parts, ++offset;
  }
};

// Whether rows that start at `base` plus multiples of the strides (in elements) keep load_unit's alignment.
template <class T>
bool units_aligned(const void* base, std::initializer_list<int64_t> strides) {
  constexpr int64_t bytes = kUnit * sizeof(T) < 16 ? kUnit * sizeof(T) : 16;
  bool aligned = reinterpret_cast<uintptr_t>(base) % bytes == 0;
  for (int64_t stride : strides) aligned = aligned && stride * static_cast<int64_t>(sizeof(T)) % bytes == 0;
  return aligned;
}

__device__ __forceinline__ void to_floats(const Unit<__half>& unit, float (&x)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&unit.words[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ void to_floats(const Unit<__nv_bfloat16>& unit, float (&x)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) {  // bfloat16 is the upper half of a float32
    x[2 * i] = __uint_as_float(unit.words[i] << 16), x[2 * i + 1] = __uint_as_float(unit.words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void to_floats(const Unit<float>& unit, float (&x)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) x[i] = __uint_as_float(unit.words[i]);
}

__device__ __forceinline__ void to_floats(const Unit<int8_t>& unit, float (&x)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) x[i] = static_cast<float>(static_cast<int8_t>(unit.words[i / 4] >> (8 * (i % 4))));
}

__device__ __forceinline__ void from_floats(const float (&x)[kUnit], Unit<__half>& unit) {
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) *reinterpret_cast<__half2*>(&unit.words[i]) = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
}

__device__ __forceinline__ void from_floats(const float (&x)[kUnit], Unit<__nv_bfloat16>& unit) {
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) *reinterpret_cast<__nv_bfloat162*>(&unit.words[i]) = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
}

__device__ __forceinline__ void from_floats(const float (&x)[kUnit], Unit<float>& unit) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) unit.words[i] = __float_as_uint(x[i]);
}

}  // namespace pagedkv
