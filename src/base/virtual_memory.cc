// SPDX-License-Identifier: Apache-2.0
#include "base/virtual_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

#include "base/buffer.h"
#include "base/round_up.h"

namespace treeattn::base {
namespace {

std::size_t kernel_page() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

}  // namespace

VirtualMemory::VirtualMemory(std::size_t bytes) {
  if (bytes == 0) return;
  const std::size_t wanted = round_up(bytes, kernel_page());
  const std::size_t mapped = wanted + Buffer::kHugePage;  // room to align
  if (wanted < bytes || mapped < wanted) throw std::bad_alloc();
  void* mapping = ::mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = mapping;
  mapped_ = mapped;
  data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(mapping), Buffer::kHugePage));
  reserved_ = wanted;
}

VirtualMemory::~VirtualMemory() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_);
}

VirtualMemory::VirtualMemory(VirtualMemory&& other) noexcept { swap(other); }

VirtualMemory& VirtualMemory::operator=(VirtualMemory&& other) noexcept {
  VirtualMemory taken(std::move(other));
  swap(taken);
  return *this;
}

void VirtualMemory::swap(VirtualMemory& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(reserved_, other.reserved_);
  std::swap(usable_, other.usable_);
}

void VirtualMemory::grow(std::size_t bytes) {
  if (bytes <= usable_) return;
  if (bytes > reserved_) throw std::bad_alloc();
  const std::size_t wanted = round_up(bytes, kernel_page());
  if (::mprotect(data_ + usable_, wanted - usable_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  usable_ = wanted;
  // As in Buffer: small things would only waste most of a huge page. Advice, so refusal is harmless.
  if (usable_ >= Buffer::kHugeFrom) ::madvise(data_, usable_, MADV_HUGEPAGE);
}

void VirtualMemory::discard(std::size_t first, std::size_t bytes) noexcept {
  const std::size_t page = kernel_page();
  const std::size_t begin = round_up(first, page);
  const std::size_t end = (first + bytes) / page * page;
  if (begin < end) ::madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace treeattn::base
