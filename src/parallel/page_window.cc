// SPDX-License-Identifier: Apache-2.0
#include "parallel/page_window.h"

#include <algorithm>
#include <string>
#include <utility>

#include "parallel/agree.h"
#include "parallel/lend.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

using kernels::cuda::LentMemory;

std::size_t bytes_of(const PageWindow::Pages& pages) {
  std::size_t sum = 0;
  for (const auto& page : pages) sum += page.size();
  return sum;
}

// Bytes [first, first + PageWindow::kPartBytes) of the pages one after the other: copy(piece of a page, where it lies
// in the part).
template <class Copy>
void for_part(const PageWindow::Pages& pages, std::size_t first, const Copy& copy) {
  std::size_t page_first = 0;
  for (const auto& page : pages) {
    const std::size_t begin = std::max(page_first, first);
    const std::size_t end = std::min(page_first + page.size(), first + PageWindow::kPartBytes);
    if (begin < end) copy(page.subspan(begin - page_first, end - begin), begin - first);
    page_first += page.size();
  }
}

}  // namespace

std::unique_ptr<PageWindow> PageWindow::make(Communicator& communicator, std::shared_ptr<KvMemory> memory) {
  std::unique_ptr<LentMemory> lent;
  const std::string failure = failure_of([&] {
    if (memory->device() == nullptr) throw Unavailable("no GPU");
    lent = std::make_unique<LentMemory>(memory->device()->gpu(), kBytes, LentMemory::Others::kRead);
  });
  try {
    connect_together(communicator, lent.get(), failure);
  } catch (const Unavailable&) {
    return nullptr;
  }
  return std::unique_ptr<PageWindow>(new PageWindow(std::move(memory), std::move(lent)));
}

PageWindow::PageWindow(std::shared_ptr<KvMemory> memory, std::unique_ptr<LentMemory> lent)
    : memory_(std::move(memory)), lent_(std::move(lent)) {}

PageWindow::~PageWindow() {
  try {
    memory_->finish();  // what still reads the others' memory
  } catch (...) {       // a GPU that has failed reads nothing
  }
}

// A rank that has come to the barrier of a part is done with reading the part before it, whose memory is that of the
// part after it.
void PageWindow::exchange(Communicator& communicator, std::span<const Pages> pages) {
  const auto ranks = pages.size();
  const auto rank = static_cast<std::size_t>(communicator.rank());
  std::size_t longest = 0;
  for (const Pages& given : pages) longest = std::max(longest, bytes_of(given));
  for (std::size_t first = 0; first < longest; first += kPartBytes, ++turn_) {
    const std::size_t part = turn_ % 2 * kPartBytes;
    for_part(pages[rank], first, [&](std::span<std::byte> page, std::size_t at) {
      memory_->copy(lent_->own() + part + at, page.data(), page.size());
    });
    memory_->finish();
    communicator.barrier();
    for (std::size_t step = 1; step < ranks; ++step) {
      const std::size_t other = (rank + step) % ranks;  // not all from one at a time
      for_part(pages[other], first, [&](std::span<std::byte> page, std::size_t at) {
        memory_->copy(page.data(), lent_->of(other) + part + at, page.size());
      });
    }
  }
  for (std::size_t other = 0; other < ranks; ++other) {
    if (other != rank) communicator.count_sent(static_cast<int>(other), bytes_of(pages[rank]));
  }
}

}  // namespace treeattn::parallel
