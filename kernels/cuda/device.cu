// instruction_set: which machine code this library runs on the current device.
#include "common.cuh"

namespace pagedkv {
namespace {

__global__ void probe() {}

}  // namespace

// "sm_90" where machine code for the device was built; "compute_75 ptx" where the driver translates PTX.
const char* instruction_set() {
  thread_local std::string name;
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, probe), "cudaFuncGetAttributes");
  const bool translated = attributes.ptxVersion != attributes.binaryVersion;
  name = translated ? "compute_" + std::to_string(attributes.ptxVersion) + " ptx" : "sm_" + std::to_string(attributes.binaryVersion);
  return name.c_str();
}

}  // namespace pagedkv
