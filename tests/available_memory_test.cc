// SPDX-License-Identifier: Apache-2.0
// What limits memory: the machine, control groups of both versions and their parents, addresses.
#include "base/available_memory.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <string>

#include "address_limit.h"

namespace treeattn::base {
namespace {

using Files = std::map<std::string, std::string>;

constexpr std::size_t kMachine = 16000u << 10;  // bytes, in all of these
constexpr std::size_t kMega = 1000000;

std::size_t available(Files files) {
  files["/proc/meminfo"] = "MemTotal:       32000 kB\nMemFree:        1000 kB\nMemAvailable:   16000 kB\n";
  return available_memory([&](const std::string& path) {
    const auto found = files.find(path);
    return found == files.end() ? std::string() : found->second;
  });
}

TEST(AvailableMemory, IsWhatTheMachineHasWithoutALimit) {
  EXPECT_EQ(available({}), kMachine);
  EXPECT_EQ(available_memory([](const std::string&) { return std::string(); }), 0u);
  EXPECT_EQ(available({{"/proc/self/cgroup", "0::/\n"}}), kMachine);
  EXPECT_EQ(available({{"/proc/self/cgroup", "garbage\n\n:\n0::\n"}}), kMachine);
  EXPECT_EQ(available({{"/proc/self/cgroup", "0::/job\n"},
                       {"/sys/fs/cgroup/job/memory.max", "max\n"},
                       {"/sys/fs/cgroup/job/memory.current", "9000000\n"}}),
            kMachine);
}

TEST(AvailableMemory, PagesOfFilesInAGroupCanBeHad) {
  Files files{{"/proc/self/cgroup", "0::/job\n"},
              {"/sys/fs/cgroup/job/memory.max", "10000000\n"},
              {"/sys/fs/cgroup/job/memory.current", "9000000\n"}};
  EXPECT_EQ(available(files), 1 * kMega);
  files["/sys/fs/cgroup/job/memory.stat"] = "anon 2000000\nfile 7000000\ninactive_file 6000000\nactive_file 1000000\n";
  EXPECT_EQ(available(files), 7 * kMega);
  files["/sys/fs/cgroup/job/memory.max"] = "2000000\n";  // lowered meanwhile
  EXPECT_EQ(available(files), 0u);
}

TEST(AvailableMemory, ParentsHaveLimitsOfTheirOwn) {
  EXPECT_EQ(available({{"/proc/self/cgroup", "0::/slice/job/step\n"},
                       {"/sys/fs/cgroup/slice/memory.max", "8000000\n"},
                       {"/sys/fs/cgroup/slice/memory.current", "5000000\n"},
                       {"/sys/fs/cgroup/slice/memory.stat", "inactive_file 1000000\n"},
                       {"/sys/fs/cgroup/slice/job/memory.max", "7000000\n"},
                       {"/sys/fs/cgroup/slice/job/memory.current", "1000000\n"},
                       {"/sys/fs/cgroup/slice/job/step/memory.max", "max\n"}}),
            4 * kMega);
  // A container's own root.
  EXPECT_EQ(available({{"/proc/self/cgroup", "0::/\n"},
                       {"/sys/fs/cgroup/memory.max", "8000000\n"},
                       {"/sys/fs/cgroup/memory.current", "5000000\n"}}),
            3 * kMega);
}

TEST(AvailableMemory, KnowsTheFirstVersionOfGroups) {
  const std::string lines = "12:cpu,cpuacct:/docker/ab\n5:blkio,memory:/docker/ab:c\n1:name=systemd:/\n0::/\n";
  const std::string root = "/sys/fs/cgroup/memory", own = root + "/docker/ab:c";
  const Files inside{{"/proc/self/cgroup", lines},
                     {root + "/memory.limit_in_bytes", "9000000\n"},
                     {root + "/memory.usage_in_bytes", "8000000\n"},
                     {root + "/memory.stat", "inactive_file 3\ntotal_inactive_file 2000000\n"}};
  EXPECT_EQ(available(inside), 3 * kMega);
  Files outside = inside;
  outside[root + "/memory.limit_in_bytes"] = "9223372036854771712\n";
  EXPECT_EQ(available(outside), kMachine);
  outside[own + "/memory.limit_in_bytes"] = "4000000\n";
  outside[own + "/memory.usage_in_bytes"] = "2000000\n";
  EXPECT_EQ(available(outside), 2 * kMega);
}

TEST(AvailableMemory, AddressesAreALimit) {
  const std::string head = "Limit                     Soft Limit           Hard Limit           Units     \n";
  Files files{
      {"/proc/self/limits", head + "Max address space         unlimited            unlimited            bytes\n"},
      {"/proc/self/status", "Name:\tx\nVmPeak:\t    9000 kB\nVmSize:\t    2000 kB\n"}};
  EXPECT_EQ(available(files), kMachine);
  files["/proc/self/limits"] = head + "Max address space         5048000              unlimited            bytes\n";
  EXPECT_EQ(available(files), 3 * kMega);
  // And truly so.
  const testing_base::AddressLimit limit(std::size_t{64} << 20);
  EXPECT_LE(available_memory(), std::size_t{64} << 20);
  EXPECT_LE(available_addresses(), std::size_t{64} << 20);
}

}  // namespace
}  // namespace treeattn::base
