// SPDX-License-Identifier: Apache-2.0
// What limits memory: the machine, control groups of both versions and their parents, addresses, data. And how much of
// the processors' time such groups give.
#include "base/available_memory.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "address_limit.h"
#include "base/control_group.h"
#include "base/machine.h"
#include "treeattn/thread_pool.h"

namespace treeattn::base {
namespace {

using Files = std::map<std::string, std::string>;

constexpr std::size_t kMachine = 16000u << 10;  // bytes, in all of these
constexpr std::size_t kMega = 1000000;

TextOf among(const Files& files) {
  return [&](const std::string& path) {
    const auto found = files.find(path);
    return found == files.end() ? std::string() : found->second;
  };
}

std::optional<std::size_t> available(Files files) {
  files["/proc/meminfo"] = "MemTotal:       32000 kB\nMemFree:        1000 kB\nMemAvailable:   16000 kB\n";
  return available_memory(among(files));
}

TEST(AvailableMemory, IsWhatTheMachineHasWithoutALimit) {
  EXPECT_EQ(available({}), kMachine);
  EXPECT_EQ(available({{"/proc/self/cgroup", "0::/\n"}}), kMachine);
  EXPECT_EQ(available({{"/proc/self/cgroup", "garbage\n\n:\n0::\n"}}), kMachine);
  EXPECT_EQ(available({{"/proc/self/cgroup", "0::/job\n"},
                       {"/sys/fs/cgroup/job/memory.max", "max\n"},
                       {"/sys/fs/cgroup/job/memory.current", "9000000\n"}}),
            kMachine);
}

TEST(AvailableMemory, UnknownIsNotFull) {
  Files files;
  EXPECT_EQ(available_memory(among(files)), std::nullopt);
  files["/proc/meminfo"] = "MemTotal:       32000 kB\n";
  EXPECT_EQ(available_memory(among(files)), std::nullopt);
  files["/proc/self/limits"] = "Max data size             4000000              unlimited            bytes\n";
  EXPECT_EQ(available_memory(among(files)), 4 * kMega);
  files["/proc/meminfo"] = "MemAvailable:       0 kB\n";
  EXPECT_EQ(available_memory(among(files)), 0u);
}

TEST(AvailableMemory, PagesOfFilesInAGroupCanBeHad) {
  Files files{{"/proc/self/cgroup", "0::/job\n"},
              {"/sys/fs/cgroup/job/memory.max", "10000000\n"},
              {"/sys/fs/cgroup/job/memory.current", "9000000\n"}};
  EXPECT_EQ(available(files), 1 * kMega);
  // Those in use as well: after two runs all pages of a model's file are.
  files["/sys/fs/cgroup/job/memory.stat"] = "anon 2000000\nfile 7000000\ninactive_file 1000000\nactive_file 6000000\n";
  EXPECT_EQ(available(files), 8 * kMega);
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

TEST(AvailableMemory, IsWhatCanBeHadBeforeAGroupIsHeldUp) {
  EXPECT_EQ(available({{"/proc/self/cgroup", "0::/job\n"},
                       {"/sys/fs/cgroup/job/memory.max", "max\n"},
                       {"/sys/fs/cgroup/job/memory.high", "6000000\n"},
                       {"/sys/fs/cgroup/job/memory.current", "2000000\n"}}),
            4 * kMega);
}

TEST(AvailableMemory, KnowsTheFirstVersionOfGroups) {
  const std::string lines = "12:cpu,cpuacct:/docker/ab\n5:blkio,memory:/docker/ab:c\n1:name=systemd:/\n0::/\n";
  const std::string root = "/sys/fs/cgroup/memory", own = root + "/docker/ab:c";
  const Files inside{
      {"/proc/self/cgroup", lines},
      {root + "/memory.limit_in_bytes", "9000000\n"},
      {root + "/memory.usage_in_bytes", "8000000\n"},
      {root + "/memory.stat", "inactive_file 3\ntotal_inactive_file 2000000\ntotal_active_file 1000000\n"}};
  EXPECT_EQ(available(inside), 4 * kMega);
  Files outside = inside;
  outside[root + "/memory.limit_in_bytes"] = "9223372036854771712\n";
  EXPECT_EQ(available(outside), kMachine);
  outside[own + "/memory.limit_in_bytes"] = "4000000\n";
  outside[own + "/memory.usage_in_bytes"] = "2000000\n";
  EXPECT_EQ(available(outside), 2 * kMega);
}

TEST(AvailableMemory, AddressesAndDataHaveLimits) {
  const std::string head = "Limit                     Soft Limit           Hard Limit           Units     \n";
  Files files{
      {"/proc/self/limits", head + "Max address space         unlimited            unlimited            bytes\n"},
      {"/proc/self/status", "Name:\tx\nVmPeak:\t    9000 kB\nVmSize:\t    2000 kB\n"}};
  EXPECT_EQ(available(files), kMachine);
  files["/proc/self/limits"] = head + "Max address space         5048000              unlimited            bytes\n";
  EXPECT_EQ(available(files), 3 * kMega);
  files["/proc/self/limits"] = head + "Max data size             4024000              unlimited            bytes\n";
  EXPECT_EQ(available(files), 4024000u);
  files["/proc/self/status"] += "VmData:\t    1000 kB\n";
  EXPECT_EQ(available(files), 3 * kMega);
  // And truly so.
  const testing_base::AddressLimit limit(std::size_t{64} << 20);
  EXPECT_LE(available_memory().value(), std::size_t{64} << 20);
  EXPECT_LE(available_addresses(), std::size_t{64} << 20);
}

constexpr int kAll = std::numeric_limits<int>::max();

int processors(const Files& files) { return control_group_processors(among(files)); }

int with_limit(const std::string& text) {
  return processors({{"/proc/self/cgroup", "0::/job\n"}, {"/sys/fs/cgroup/job/cpu.max", text}});
}

TEST(ControlGroup, GivesPartsOfAPeriod) {
  EXPECT_EQ(with_limit("200000 100000\n"), 2);
  EXPECT_EQ(with_limit("150000 100000\n"), 2);
  EXPECT_EQ(with_limit("1000 100000\n"), 1);
  EXPECT_EQ(with_limit("25000 10000\n"), 3);
  EXPECT_EQ(with_limit("max 100000\n"), kAll);
  EXPECT_EQ(with_limit("100000 0\n"), kAll);
  EXPECT_EQ(with_limit("100000\n"), kAll);
  EXPECT_EQ(with_limit("9223372036854775807 1\n"), kAll);
  EXPECT_EQ(with_limit(""), kAll);
  EXPECT_EQ(processors({}), kAll);
}

TEST(ControlGroup, OfTimeTheLeastOfAllAboveCounts) {
  EXPECT_EQ(processors({{"/proc/self/cgroup", "0::/pod/container\n"},
                        {"/sys/fs/cgroup/pod/cpu.max", "300000 100000\n"},
                        {"/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n"}}),
            3);
  EXPECT_EQ(processors({{"/proc/self/cgroup", "0::/host/path\n"}, {"/sys/fs/cgroup/cpu.max", "400000 100000\n"}}), 4);
}

TEST(ControlGroup, OfTimeKnowsTheFirstVersion) {
  Files files{{"/proc/self/cgroup", "4:memory:/a\n3:cpuset:/a\n2:cpu,cpuacct:/docker/ab\n0::/\n"},
              {"/sys/fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us", "-1\n"},
              {"/sys/fs/cgroup/cpu/docker/ab/cpu.cfs_period_us", "100000\n"}};
  EXPECT_EQ(processors(files), kAll);
  files["/sys/fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us"] = "500000\n";
  EXPECT_EQ(processors(files), 5);
  files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "50000\n";  // as a container sees its own root
  files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n";
  EXPECT_EQ(processors(files), 1);
}

TEST(ControlGroup, AProgramCountsNoMoreCoresThanItHasTimeFor) {
  EXPECT_GE(ThreadPool::available_cores(), 1);
  EXPECT_LE(ThreadPool::available_cores(), quota_cores());
  EXPECT_EQ(read_machine().usable_cores, ThreadPool::available_cores());
  EXPECT_EQ(control_group_name(), control_group_name());
}

}  // namespace
}  // namespace treeattn::base
