// SPDX-License-Identifier: Apache-2.0
// Saved caches: other numbers of ranks, saves that fail or are cut off, files that are damaged.
#include "parallel/kv_files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <thread>

#include "base/file.h"
#include "kv_mirror.h"
#include "parallel/kv_format.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

namespace fs = std::filesystem;
using namespace testing_kv;

KvCacheConfig file_config() {
  return {.layers = 2,
          .kv_heads = 1,
          .k_dim = 16,
          .v_dim = 16,
          .k_type = DType::kInt8,
          .v_type = DType::kFloat16,
          .order = {.chunk_tokens = 64, .branches = 4}};
}

std::vector<char> read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const fs::path& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::vector<fs::path> files_in(const fs::path& directory) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

// A cache of two sequences, one forked, on one rank.
Pair small_pair(std::uint64_t seed = 1) {
  Random random(seed);
  Pair pair(self_communicator(), file_config());
  const SequenceId a = pair.add();
  pair.grow(random, a, 300);
  pair.grow(random, pair.fork(a), 33);
  pair.drop(pair.add());
  pair.add();
  return pair;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const BadFile& error) {
    return error.what();
  }
  return "";
}

// Loading throws BadFile with `part` in its message on each of the ranks.
void expect_refused(const fs::path& directory, int ranks, const std::string& part) {
  std::atomic<int> refused{0};
  run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
    const std::string message = message_of([&] { KvCache::load(world, directory); });
    if (message.find(part) != std::string::npos) {
      ++refused;
    } else {
      ADD_FAILURE() << "rank " << world->rank() << " of " << ranks << ": \"" << message << "\" lacks " << part;
    }
    world->barrier();  // none is stuck somewhere else
  });
  EXPECT_EQ(refused.load(), ranks);
}

TEST(KvFiles, LoadsAtAnyNumberOfRanks) {
  const TemporaryDirectory directory;
  for (const int savers : {1, 3}) {
    run_ranks(savers, [&](std::shared_ptr<Communicator> world) {
      Random random(4);
      Pair pair(world, file_config());
      pair.grow(random, pair.add(), 500);
      pair.cache.save(directory.path());
    });
    EXPECT_EQ(files_in(directory.path()).size(), 5u);  // nothing of the save before
    for (const int loaders : {1, 2, 5, 8}) {
      run_ranks(loaders, [&](std::shared_ptr<Communicator> world) {
        Random random(4);
        Pair pair(world, file_config());
        pair.grow(random, pair.add(), 500);
        pair.cache = KvCache::load(world, directory.path());
        EXPECT_EQ(pair.cache.config(), file_config());
        pair.check();
        pair.grow(random, 0, 100);
        EXPECT_EQ(pair.add(), 1);
        pair.check();
      });
    }
  }
}

TEST(KvFiles, NothingSavedIsSomethingToo) {
  const TemporaryDirectory directory;
  KvCache(self_communicator(), file_config()).save(directory.path() / "a" / "b");
  const KvCache loaded = KvCache::load(self_communicator(), directory.path() / "a" / "b");
  EXPECT_TRUE(loaded.sequences().empty());
  EXPECT_EQ(loaded.allocated_bytes(), 0u);
}

TEST(KvFiles, OtherFilesStay) {
  const TemporaryDirectory directory;
  // Some have names as long as those of branches.
  const std::vector<std::string> names = {"notes",
                                          "branch-of-mine.kv",
                                          "cache.manifest.old",
                                          "branch-of-mine-as-it-was-2025.kv",
                                          "branch-00003.as-it-was-a-year.kv",
                                          "branch-mine-.0123456789abcdef.kv",
                                          "branch-00003-0123456789abcdef.kv"};
  for (const std::string& name : names) write_file(directory.path() / name, {'x'});
  small_pair(1).cache.save(directory.path());
  const std::size_t files = files_in(directory.path()).size();
  small_pair(2).cache.save(directory.path());
  EXPECT_EQ(files_in(directory.path()).size(), files);
  for (const std::string& name : names) EXPECT_EQ(read_file(directory.path() / name), std::vector{'x'}) << name;
}

TEST(KvFiles, WhatIsNotThere) {
  const TemporaryDirectory directory;
  expect_refused(directory.path(), 1, "cache.manifest: cannot open: No such file or directory");
  expect_refused(directory.path(), 3, "cache.manifest: cannot open: No such file or directory");
  small_pair().cache.save(directory.path());
  fs::remove(files_in(directory.path())[2]);
  expect_refused(directory.path(), 4, "cannot open: No such file or directory");
  // A file where the directory should be.
  const fs::path file = directory.path() / "file";
  write_file(file, {'x'});
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    KvCache cache(world, file_config());
    const std::string message = message_of([&] { cache.save(file); });
    EXPECT_NE(message.find(file.string()), std::string::npos) << message;
    EXPECT_EQ(message.find("rank 0: ") == 0, world->rank() != 0);
  });
}

// A bit of every byte of the heads, random bits of the data, random lengths.
TEST(KvFiles, DamageIsNoticed) {
  const TemporaryDirectory directory;
  small_pair().cache.save(directory.path());
  Random random(test_seed());
  const auto refused = [&] { return message_of([&] { KvCache::load(self_communicator(), directory.path()); }); };
  int damages = 0;
  for (const fs::path& file : files_in(directory.path())) {
    const std::vector<char> whole = read_file(file);
    std::vector<std::size_t> bits;
    const std::size_t head = std::min<std::size_t>(whole.size(), 200);
    for (std::size_t byte = 0; byte < head; ++byte) {
      bits.push_back(8 * byte + static_cast<std::size_t>(random.integer(0, 7)));
    }
    const auto last = static_cast<std::int64_t>(8 * whole.size() - 1);
    for (int i = 0; i < 100; ++i) bits.push_back(static_cast<std::size_t>(random.integer(0, last)));
    for (const std::size_t bit : bits) {
      std::vector<char> damaged = whole;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
      write_file(file, damaged);
      ASSERT_NE(refused().find(file.filename().string()), std::string::npos) << file << ", bit " << bit;
      ++damages;
    }
    for (int i = 0; i < 50; ++i) {
      std::vector<char> cut = whole;
      cut.resize(static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(whole.size()) - 1)));
      write_file(file, cut);
      ASSERT_NE(refused().find(file.filename().string()), std::string::npos) << file << ", " << cut.size() << " bytes";
    }
    std::vector<char> longer = whole;
    longer.push_back('\0');
    write_file(file, longer);
    ASSERT_NE(refused(), "");
    write_file(file, whole);
  }
  EXPECT_EQ(refused(), "");
  std::printf("%d flipped bits found\n", damages);
}

TEST(KvFiles, DamageOfOneRankStopsAll) {
  const TemporaryDirectory directory;
  small_pair().cache.save(directory.path());
  for (const fs::path& file : files_in(directory.path())) {
    const std::vector<char> whole = read_file(file);
    std::vector<char> damaged = whole;
    damaged[whole.size() - 10] = static_cast<char>(damaged[whole.size() - 10] ^ 4);
    write_file(file, damaged);
    expect_refused(directory.path(), 3, file.string() + ": damaged: checksum ");
    write_file(file, whole);
  }
}

TEST(KvFiles, FilesOfDifferentSavesDoNotMix) {
  const TemporaryDirectory one, other;
  small_pair(1).cache.save(one.path());
  small_pair(2).cache.save(other.path());
  // Branches 2 and 3 have the same number of chunks.
  const fs::path mine = files_in(one.path())[2], foreign = files_in(other.path())[2];
  fs::copy_file(foreign, mine, fs::copy_options::overwrite_existing);
  expect_refused(one.path(), 2, "belongs to another save or branch");
  fs::copy_file(files_in(one.path())[3], mine, fs::copy_options::overwrite_existing);
  expect_refused(one.path(), 2, "belongs to another save or branch");
}

// A manifest can be whole and still ask for more than there is.
TEST(KvFiles, LyingManifest) {
  const TemporaryDirectory directory;
  small_pair().cache.save(directory.path());
  const fs::path file = directory.path() / "cache.manifest";
  const std::vector<char> whole = read_file(file);
  const parallel::Manifest honest = parallel::parse_manifest(std::as_bytes(std::span(whole)));
  const auto lie = [&](const std::function<void(parallel::Manifest&)>& change) {
    parallel::Manifest manifest = honest;
    change(manifest);
    const std::vector<std::byte> bytes = parallel::encode(manifest);
    std::vector<char> text(bytes.size());
    std::memcpy(text.data(), bytes.data(), bytes.size());
    write_file(file, text);
  };
  lie([](auto& m) { m.sequences[0].length = parallel::KvStore::kMaxTokens; });
  expect_refused(directory.path(), 2, "too few for");
  lie([](auto& m) { m.sequences[1].length += 1; });
  expect_refused(directory.path(), 2, "belongs to another save or branch");
  lie([](auto& m) { m.generation += 1; });
  expect_refused(directory.path(), 2, "cannot open");
  lie([](auto& m) { m.config.kv_heads = 2; });
  expect_refused(directory.path(), 2, "bytes; accepted:");
  lie([](auto& m) { m.config.order.chunk_tokens = std::int64_t{1} << 40; });
  expect_refused(directory.path(), 2, "");
  lie([](auto& m) { m.sequences.resize(100000, {0, 1}); });
  expect_refused(directory.path(), 2, "sequence 0; accepted: 4 to 3");
  lie([](auto& m) { m.config.k_dim = 17; });
  expect_refused(directory.path(), 2, "k_dim = 17; accepted: 16 to 256 in steps of 8");
  lie([](auto& m) { m.next_sequence = std::numeric_limits<SequenceId>::max(); });
  expect_refused(directory.path(), 2, "next sequence 9223372036854775807; accepted: 0 to 2^60");
}

TEST(KvFiles, AFailedSaveLeavesTheEarlierOne) {
  const TemporaryDirectory directory;
  Pair before = small_pair(1);
  before.cache.save(directory.path());
  const std::vector<fs::path> files = files_in(directory.path());
  const auto expect_unharmed = [&] {
    before.cache = KvCache::load(self_communicator(), directory.path());
    before.check();
  };

  // The manifest cannot be written.
  const fs::path draft = directory.path() / "cache.manifest.tmp";
  fs::create_directories(draft / "in the way");
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    Random random(3);
    Pair pair(world, file_config());
    pair.grow(random, pair.add(), 1000);
    const std::string message = message_of([&] { pair.cache.save(directory.path()); });
    EXPECT_NE(message.find("cache.manifest.tmp: cannot create: Is a directory"), std::string::npos) << message;
  });
  fs::remove_all(draft);
  EXPECT_EQ(files_in(directory.path()), files);
  expect_unharmed();

  // The disk is full, as far as this process can tell.
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{3000, old_limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::atomic<int> refused{0};
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    Random random(3);
    Pair pair(world, file_config());
    pair.grow(random, pair.add(), 1000);
    if (message_of([&] { pair.cache.save(directory.path()); }).find("cannot write: File too large") !=
        std::string::npos) {
      ++refused;
    }
  });
  ::setrlimit(RLIMIT_FSIZE, &old_limit);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(refused.load(), 3);
  EXPECT_EQ(files_in(directory.path()), files);
  expect_unharmed();
}

TEST(KvFiles, AFailedSaveLeavesNothingBehind) {
  const TemporaryDirectory directory;
  const fs::path manifest = directory.path() / "cache.manifest";
  fs::create_directories(manifest);
  const std::string message = message_of([&] { small_pair().cache.save(directory.path()); });
  EXPECT_NE(message.find("cache.manifest: cannot rename"), std::string::npos) << message;
  EXPECT_EQ(files_in(directory.path()), std::vector{manifest});
}

// A directory of the same name on every machine is not one that all ranks see.
TEST(KvFiles, ASaveInTwoPlacesIsRefused) {
  const TemporaryDirectory directory, other;
  Pair before = small_pair(1);
  before.cache.save(directory.path());
  const std::vector<fs::path> files = files_in(directory.path());
  std::atomic<int> refused{0};
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    Random random(3);
    Pair pair(world, file_config());
    pair.grow(random, pair.add(), 1000);
    const std::string message =
        message_of([&] { pair.cache.save(world->rank() == 1 ? other.path() : directory.path()); });
    if (message.find("cannot open: No such file or directory") != std::string::npos) ++refused;
  });
  EXPECT_EQ(refused.load(), 3);
  EXPECT_EQ(files_in(directory.path()), files);
  EXPECT_TRUE(files_in(other.path()).empty());
  before.cache = KvCache::load(self_communicator(), directory.path());
  before.check();
}

// One rank has all there is to write, read or move. The others must not wait for all of it in one call, or they would
// give it up when that takes longer than the deadline.
TEST(KvFiles, RanksMeetAfterEveryBranch) {
  const TemporaryDirectory directory;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    std::vector<std::array<std::uint64_t, 3>> steps;  // of save, load, rebalance
    for (const int branches : {4, 16}) {
      KvCacheConfig config = file_config();
      config.order.branches = branches;
      KvCache cache(world, config, std::vector<double>{0, 1, 0});
      cache.extend(cache.add_sequence(), 16 * config.order.chunk_tokens);
      const auto steps_of = [&](const std::function<void()>& call) {
        world->reset_traffic();
        call();
        return world->traffic().steps;
      };
      steps.push_back({steps_of([&] { cache.save(directory.path()); }), steps_of([&] {
                         KvCache::load(world, directory.path(), std::vector<double>{1, 0, 0});
                       }),
                       steps_of([&] {
                         cache.rebalance(std::vector<double>{1, 0, 1});
                       })});
    }
    const std::uint64_t barrier = std::bit_width(world->size() - 1u);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_GE(steps[1][i], steps[0][i] + 12 * barrier) << i;
  });
}

// As what it is, though the others have nothing to complain of.
TEST(KvFiles, WhatOneRankIsGivenWronglyEveryRankRefuses) {
  const TemporaryDirectory directory;
  KvCache(self_communicator(), file_config()).save(directory.path());
  std::atomic<int> refused{0};
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    const int gpu = world->rank() == 1 ? -2 : KvCache::kHost;
    EXPECT_THROW(KvCache::load(world, directory.path(), {}, gpu), InvalidArgument);
    ++refused;
    world->barrier();
  });
  EXPECT_EQ(refused.load(), 3);
}

TEST(KvFiles, ALoadDuringSavesHasOneOfThem) {
  const TemporaryDirectory directory;
  Pair pair = small_pair();
  pair.cache.save(directory.path());
  std::atomic<bool> over{false};
  std::thread saver([&] {
    const Pair same = small_pair();
    for (int i = 0; i < 40; ++i) same.cache.save(directory.path());
    over = true;
  });
  while (!over) {
    EXPECT_EQ(message_of([&] { pair.cache = KvCache::load(self_communicator(), directory.path()); }), "");
    pair.check();
  }
  saver.join();
}

TEST(KvFiles, OneGroupAfterTheOtherSaves) {
  const TemporaryDirectory directory;
  std::atomic<bool> saved{false};
  std::optional<base::DirectoryLock> other(std::in_place);
  ASSERT_TRUE(other->try_take(directory.path()));
  std::thread group([&] {
    run_ranks(3, [&](std::shared_ptr<Communicator> world) {
      KvCache cache(world, file_config());
      cache.save(directory.path());
      saved = true;
    });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // time enough to save, if nothing held it up
  EXPECT_FALSE(saved.load());
  EXPECT_TRUE(files_in(directory.path()).empty());
  other.reset();
  group.join();
  EXPECT_TRUE(saved.load());
  EXPECT_TRUE(base::DirectoryLock().try_take(directory.path()));  // and gives it back
  EXPECT_TRUE(KvCache::load(self_communicator(), directory.path()).sequences().empty());
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // their runtimes dislike a killed child
TEST(KvFiles, AKilledSaveLeavesOneOfTheTwo) {
  const TemporaryDirectory directory;
  Random random(test_seed());
  Pair older = small_pair(1), newer = small_pair(2);
  const auto start = std::chrono::steady_clock::now();
  older.cache.save(directory.path());
  const auto one_save = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
  int changed = 0;
  for (int round = 0; round < 60; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        newer.cache.save(directory.path());
      } catch (...) {
      }
      ::_exit(0);
    }
    ::usleep(static_cast<useconds_t>(random.integer(0, 2 * one_save.count())));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    KvCache loaded = KvCache::load(self_communicator(), directory.path());
    const bool is_new = std::memcmp(loaded.store().chunk(0, 0, 0).k, newer.cache.store().chunk(0, 0, 0).k, 64) == 0;
    Pair& expected = is_new ? newer : older;
    std::swap(loaded, expected.cache);
    expected.check();
    changed += is_new ? 1 : 0;
    std::swap(loaded, expected.cache);
    older.cache.save(directory.path());
    EXPECT_EQ(files_in(directory.path()).size(), 5u);  // and it clears up
  }
  std::printf("%d of 60 saves were through before they were killed\n", changed);
}
#endif

}  // namespace
}  // namespace treeattn
