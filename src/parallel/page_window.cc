// SPDX-License-Identifier: Apache-2.0
#include "parallel/page_window.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/round_up.h"
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

// Where a part lies in a window.
std::size_t place_of(std::size_t part) { return part % 2 * PageWindow::kPartBytes; }

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
  if (!on_one_machine(communicator)) return nullptr;
  constexpr int kNone = -1;
  const int gpu = memory->device() != nullptr ? memory->device()->gpu() : kNone;
  if (share_one_gpu(communicator, gpu)) return nullptr;
  std::unique_ptr<LentMemory> lent;
  const std::string failure = failure_of([&] {
    if (gpu == kNone) throw Unavailable("no GPU");
    lent = std::make_unique<LentMemory>(gpu, kBytes, LentMemory::Others::kRead);
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
  const Traffic before = communicator.traffic();
  const auto ranks = pages.size();
  const auto rank = static_cast<std::size_t>(communicator.rank());
  std::size_t longest = 0;
  for (const Pages& given : pages) longest = std::max(longest, bytes_of(given));
  for (std::size_t first = 0; first < longest; first += kPartBytes, ++turn_) {
    const std::size_t part = place_of(turn_);
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
  communicator.reset_traffic(before);
  for (std::size_t other = 0; other < ranks; ++other) {
    communicator.count_sent(static_cast<int>(other), bytes_of(pages[rank]));
  }
}

WindowPass::WindowPass(Communicator& communicator, const RingPlace& place, PageWindow& window)
    : communicator_(communicator), place_(place), window_(window), before_(communicator.traffic()) {
  communicator.barrier();  // those who exchanged pages before may not be neighbours
}

// A message without content.
void WindowPass::tell(int rank) {
  static constexpr std::array<std::byte, 1> kNothing{};
  Request request = communicator_.send_in_call(rank, kNothing);
  communicator_.wait(request);
}

void WindowPass::hear(int rank) {
  const auto nothing = std::make_shared<std::byte>();
  Request request = communicator_.receive_in_call(rank, {nothing.get(), 1}, nothing);
  communicator_.wait(request);
}

// Of two ranks, either is both neighbours of the other: what one tells must be heard in the same order. In a turn each
// tells that it has given, hears that its gift before that was taken and that the other has given, and tells that it
// has taken. So the part before the last has always been taken when one is given.
void WindowPass::turn(const PageWindow::Pages& give, const PageWindow::Pages& take, const std::function<void()>& work) {
  using base::divide_up;
  const int gpu = window_.memory_->device()->gpu();
  const std::size_t gives = divide_up(bytes_of(give), PageWindow::kPartBytes);
  const std::size_t takes = divide_up(bytes_of(take), PageWindow::kPartBytes);
  bool worked = false;
  for (std::size_t i = 0; i < std::max<std::size_t>({gives, takes, 1}); ++i) {
    const std::size_t first = i * PageWindow::kPartBytes;
    if (i < gives) {
      for_part(give, first, [&](std::span<std::byte> page, std::size_t at) {
        std::byte* const to = window_.lent_->own() + place_of(given_) + at;
        kernels::cuda::start_copy_on(gpu, to, page.data(), page.size());
      });
      kernels::cuda::finish_copies();
      tell(place_.right());
      ++given_;
    }
    for (; answered_ + (i < gives ? 1 : 0) < given_; ++answered_) hear(place_.right());
    if (i < takes) {
      hear(place_.left());
      for_part(take, first, [&](std::span<std::byte> page, std::size_t at) {
        const std::byte* const from =
            window_.lent_->of(static_cast<std::size_t>(place_.left())) + place_of(taken_) + at;
        kernels::cuda::start_copy_on(gpu, page.data(), from, page.size());
      });
    }
    if (!std::exchange(worked, true)) work();
    if (i < takes) {
      kernels::cuda::finish_copies();
      tell(place_.left());
      ++taken_;
    }
  }
  sent_.push_back(bytes_of(give));
}

void WindowPass::finish() {
  for (; answered_ < given_; ++answered_) hear(place_.right());
  communicator_.reset_traffic(before_);
  for (const std::size_t bytes : sent_) communicator_.count_sent(place_.right(), bytes);
}

}  // namespace treeattn::parallel
