// SPDX-License-Identifier: Apache-2.0
// Cluster descriptions: what is built in, what a file may say, and what it is told when it is wrong.
#include "plan/cluster.h"

#include <gtest/gtest.h>

#include <fstream>

#include "temporary_directory.h"
#include "treeattn/error.h"

namespace treeattn::plan {
namespace {

constexpr char kSmall[] = R"(
name = boxes   # a comment
devices_per_node = 4
device_memory = 24 GB
device_rate = 1.008 TB/s
local_latency = 5 us
local_bandwidth = 8 GB/s
remote_latency = 50us
remote_bandwidth = 100 Gb/s
)";

std::string refused(const std::string& text) {
  try {
    parse_cluster(text, "x.cluster");
  } catch (const BadFile& error) {
    return error.what();
  }
  return "";
}

TEST(ClusterTest, TheBuiltInOnes) {
  ASSERT_EQ(built_in_clusters().size(), 3u);
  for (const std::string_view name : built_in_clusters()) {
    const Cluster cluster = find_cluster(std::string(name));
    EXPECT_EQ(cluster.name, name);
    EXPECT_GT(cluster.device_flops_per_s, 1e14) << name;
    EXPECT_GT(cluster.launch_s, 0) << name;
    EXPECT_EQ(cluster.merge_bytes_per_s, cluster.device_bytes_per_s) << name;
  }
  const Cluster dgx = find_cluster("dgx-h100");
  EXPECT_EQ(dgx.devices_per_node, 8);
  EXPECT_EQ(dgx.adapters_per_node, 8);
  EXPECT_DOUBLE_EQ(dgx.device_memory_bytes, 80e9);
  EXPECT_DOUBLE_EQ(dgx.device_bytes_per_s, 3.35e12);
  EXPECT_DOUBLE_EQ(dgx.local.bytes_per_s, 450e9);
  EXPECT_DOUBLE_EQ(dgx.remote.bytes_per_s, 50e9);  // 400 Gb/s
  EXPECT_DOUBLE_EQ(dgx.remote.latency_s, 4e-6);
  EXPECT_THROW(built_in_cluster_text("dgx"), InvalidArgument);
}

TEST(ClusterTest, AFile) {
  const Cluster cluster = parse_cluster(kSmall, "x");
  EXPECT_EQ(cluster.name, "boxes");
  EXPECT_EQ(cluster.devices_per_node, 4);
  EXPECT_EQ(cluster.adapters_per_node, 1);
  EXPECT_DOUBLE_EQ(cluster.device_bytes_per_s, 1.008e12);
  EXPECT_DOUBLE_EQ(cluster.remote.latency_s, 50e-6);
  EXPECT_DOUBLE_EQ(cluster.remote.bytes_per_s, 12.5e9);
  EXPECT_EQ(cluster.launch_s, 0);
  EXPECT_EQ(cluster.local_shared_bytes_per_s, 0);
  EXPECT_TRUE(cluster.slow_devices.empty());

  const Cluster slow =
      parse_cluster(std::string(kSmall) + "slow_device = 3 2.5\nslow_device=4 2\nslow_remote = 0 10\n", "x");
  ASSERT_EQ(slow.slow_devices.size(), 2u);
  EXPECT_EQ(slow.slow_devices[0].index, 3);
  EXPECT_EQ(slow.slow_devices[0].factor, 2.5);
  ASSERT_EQ(slow.slow_remote.size(), 1u);

  const TemporaryDirectory directory;
  const auto path = directory.path() / "mine.cluster";
  std::ofstream(path) << kSmall;
  EXPECT_EQ(find_cluster(path.string()).name, "boxes");
  EXPECT_THROW(find_cluster((directory.path() / "none").string()), InvalidArgument);
  EXPECT_THROW(find_cluster(directory.path().string()), BadFile) << "a directory is no file";
}

TEST(ClusterTest, ItsNetwork) {
  const Network network = parse_cluster(kSmall, "x").network(6, 4);
  EXPECT_EQ(network.node_of_rank, (std::vector<int>{0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(network.adapters_per_node, 1);
  EXPECT_DOUBLE_EQ(network.local.latency_s, 5e-6);
  EXPECT_THROW(parse_cluster(kSmall, "x").network(6, 0), InvalidArgument);
}

TEST(ClusterTest, ErrorsNameTheLineAndTheValue) {
  const std::string small = kSmall;
  EXPECT_EQ(refused(small), "");
  EXPECT_EQ(refused(small + "local_latency = 5 us\n"), "x.cluster:10: local_latency is given twice");
  EXPECT_EQ(refused(small + "launch = fast\n"),
            "x.cluster:10: launch = fast; accepted: 0 to 1e+18 s, a number and its unit, one of s, ms, us, ns");
  EXPECT_EQ(refused(small + "launch = -1 us\n"),
            "x.cluster:10: launch = -1 us; accepted: 0 to 1e+18 s, a number and its unit, one of s, ms, us, ns");
  EXPECT_EQ(refused(small + "launch = nan us\n"),
            "x.cluster:10: launch = nan us; accepted: 0 to 1e+18 s, a number and its unit, one of s, ms, us, ns");
  // 1e-300 B/s: what it would take is not a number any more.
  for (const std::string rate : {"0 GB/s", "-1 GB/s", "0.5 B/s", "1e-300 B/s", "1e19 B/s"}) {
    EXPECT_NE(refused(small + "local_shared = " + rate + "\n")
                  .find("local_shared = " + rate + "; accepted: 1 to 1e+18 B/s, a number and its unit, one of TB/s"),
              std::string::npos)
        << rate;
  }
  EXPECT_EQ(refused(small + "local_shared = 1 B/s\n"), "");
  EXPECT_NE(refused(small + "device_flops = 1e-300 GFLOP/s\n").find("accepted: 1 to 1e+18 FLOP/s"), std::string::npos);
  EXPECT_EQ(refused(small + "launch = 0 s\n"), "");
  EXPECT_NE(refused(small + "local_shared = 3 GB\n").find("one of TB/s, GB/s"), std::string::npos);
  EXPECT_EQ(refused(small + "launch\n"), "x.cluster:10: \"launch\"; accepted: key = value");
  EXPECT_EQ(refused(small + "launch =\n"), "x.cluster:10: launch has no value");
  EXPECT_NE(refused(small + "devices = 8\n").find("unknown key \"devices\"; accepted: devices_per_node"),
            std::string::npos);
  EXPECT_NE(refused(small + "slow_local = 2\n").find("accepted: a rank and how many times slower it is"),
            std::string::npos);
  EXPECT_NE(refused(small + "slow_remote = -1 2\n"), "");
  EXPECT_NE(refused(small + "slow_remote = 1 0\n"), "");
  EXPECT_NE(refused(small + "slow_remote = 1 1e7\n").find("above 0 and up to 1000000"), std::string::npos);
  EXPECT_EQ(refused(small + "slow_device = 3 2\nslow_device = 3 4\n"),
            "x.cluster:11: slow_device = 3 4: rank 3 is given twice; accepted: one factor for a rank");
  EXPECT_NE(refused(small + "slow_remote = 1 2\nslow_remote = 1 2\n").find("node 1 is given twice"), std::string::npos);
  EXPECT_EQ(refused(small + "slow_device = 3 2\nslow_local = 3 2\nslow_device = 2 2\n"), "");
  EXPECT_EQ(refused(small + "adapters_per_node = 1.5\n"),
            "x.cluster:10: adapters_per_node = 1.5; accepted: a whole number, 1 to 4096");
  const std::string needed =
      "; accepted: a file with name, devices_per_node, device_memory, device_rate, local_latency, local_bandwidth, "
      "remote_latency, remote_bandwidth";
  EXPECT_EQ(refused(""), "x.cluster: name is missing" + needed);
  EXPECT_EQ(refused("name = x\n"), "x.cluster: devices_per_node is missing" + needed);
}

}  // namespace
}  // namespace treeattn::plan
