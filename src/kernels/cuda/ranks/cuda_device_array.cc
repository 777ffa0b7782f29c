// SPDX-License-Identifier: Apache-2.0
// Addresses first, memory later, on a GPU: the driver's virtual memory management, reached through the runtime, so that
// nothing links to the driver.
#include <cuda.h>
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/round_up.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/driver_entry.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {
namespace {

template <class Function>
void find_entry(Function*& function, const char* name) {
  void* const found = driver_entry(name);
  if (found == nullptr) {
    throw Unavailable(fmt::format("the CUDA driver has no {}; accepted: one of CUDA 12 or later", name));
  }
  function = reinterpret_cast<Function*>(found);
}

struct Driver {
  decltype(cuMemAddressReserve)* reserve = nullptr;
  decltype(cuMemAddressFree)* release = nullptr;
  decltype(cuMemCreate)* create = nullptr;
  decltype(cuMemRelease)* destroy = nullptr;
  decltype(cuMemMap)* map = nullptr;
  decltype(cuMemUnmap)* unmap = nullptr;
  decltype(cuMemSetAccess)* set_access = nullptr;
  decltype(cuMemGetAllocationGranularity)* granularity = nullptr;

  Driver() {
    find_entry(reserve, "cuMemAddressReserve");
    find_entry(release, "cuMemAddressFree");
    find_entry(create, "cuMemCreate");
    find_entry(destroy, "cuMemRelease");
    find_entry(map, "cuMemMap");
    find_entry(unmap, "cuMemUnmap");
    find_entry(set_access, "cuMemSetAccess");
    find_entry(granularity, "cuMemGetAllocationGranularity");
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
  throw Unavailable(fmt::format("{}: driver error {}", what, static_cast<int>(result)));
}

CUmemAllocationProp memory_of(int gpu) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = gpu;
  return properties;
}

CUdeviceptr address(const std::byte* data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

DeviceArray::DeviceArray(int gpu, std::size_t bytes) : gpu_(gpu) {
  if (bytes == 0) return;
  const UseDevice use(gpu);
  check(cudaFree(nullptr), "start of the GPU");  // the driver's calls need a context
  const CUmemAllocationProp properties = memory_of(gpu);
  check(driver().granularity(&step_, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "granularity of GPU memory");
  CUdeviceptr data = 0;
  const std::size_t wanted = base::round_up(bytes, step_);
  if (wanted < bytes || driver().reserve(&data, wanted, 0, 0, 0) != CUDA_SUCCESS) throw std::bad_alloc();
  data_ = reinterpret_cast<std::byte*>(data);
  reserved_ = wanted;
}

DeviceArray::~DeviceArray() {
  if (data_ == nullptr) return;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(gpu_);
  for (const Piece& piece : pieces_) {
    driver().unmap(address(data_ + piece.first), piece.bytes);
    driver().destroy(piece.handle);
  }
  driver().release(address(data_), reserved_);
  cudaSetDevice(before);
}

void DeviceArray::swap(DeviceArray& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(data_, other.data_);
  std::swap(reserved_, other.reserved_);
  std::swap(usable_, other.usable_);
  std::swap(step_, other.step_);
  pieces_.swap(other.pieces_);
}

void DeviceArray::grow(std::size_t bytes) {
  if (bytes <= usable_) return;
  if (bytes > reserved_) throw std::bad_alloc();
  const UseDevice use(gpu_);
  pieces_.reserve(pieces_.size() + 1);
  Piece piece{0, usable_, base::round_up(bytes, step_) - usable_};
  const CUmemAllocationProp properties = memory_of(gpu_);
  check(driver().create(&piece.handle, piece.bytes, &properties, 0), "GPU memory");
  const CUdeviceptr at = address(data_ + piece.first);
  if (const CUresult result = driver().map(at, piece.bytes, 0, piece.handle, 0); result != CUDA_SUCCESS) {
    driver().destroy(piece.handle);
    check(result, "mapping of GPU memory");
  }
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (const CUresult result = driver().set_access(at, piece.bytes, &access, 1); result != CUDA_SUCCESS) {
    driver().unmap(at, piece.bytes);
    driver().destroy(piece.handle);
    check(result, "access to GPU memory");
  }
  pieces_.push_back(piece);
  usable_ = piece.first + piece.bytes;
}

}  // namespace treeattn::kernels::cuda
