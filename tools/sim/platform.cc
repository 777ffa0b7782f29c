// SPDX-License-Identifier: Apache-2.0
#include "platform.h"

#include <fmt/format.h>

#include <algorithm>
#include <simgrid/kernel/routing/NetZoneImpl.hpp>

namespace treeattn::tools {
namespace {

namespace sg4 = simgrid::s4u;

// Faster than anything that is simulated.
constexpr double kNoLimit = 1e18;

double slowdown(const std::vector<plan::Slower>& list, int index) {
  for (const plan::Slower& slower : list) {
    if (slower.index == index) return slower.factor;
  }
  return 1;
}

// Both ways of a full-duplex link; each has half of the latency, because a message takes one at either end.
struct Port {
  sg4::Link* out = nullptr;
  sg4::Link* in = nullptr;
};

Port make_port(sg4::NetZone& zone, const std::string& name, const plan::Link& link, double slower) {
  const auto make = [&](const char* way) {
    return zone.create_link(name + way, link.bytes_per_s / slower)->set_latency(link.latency_s / 2)->seal();
  };
  return {make("_out"), make("_in")};
}

using Links = std::vector<sg4::LinkInRoute>;

// One node: its devices reach each other by a port each, and the outside by the adapters, which they share out.
class Node {
 public:
  Node(const plan::Cluster& cluster, sg4::NetZone& cluster_zone, int number, int first_rank, int ranks)
      : cluster_(cluster), name_(fmt::format("node{}", number)), zone_(sg4::create_full_zone(name_)) {
    zone_->set_parent(&cluster_zone);
    router_ = zone_->create_router(name_ + "_router");
    const double slow_adapter = slowdown(cluster.slow_remote, number);
    for (int i = 0; i < std::min(ranks, cluster.adapters_per_node); ++i) {
      adapters_.push_back(make_port(*zone_, fmt::format("{}_adapter{}", name_, i), cluster.remote, slow_adapter));
    }
    for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
      const double speed = cluster.device_bytes_per_s / slowdown(cluster.slow_devices, rank);
      hosts_.push_back(zone_->create_host(fmt::format("rank{}", rank), speed)->seal());
      ports_.push_back(
          make_port(*zone_, fmt::format("rank{}_port", rank), cluster.local, slowdown(cluster.slow_local, rank)));
    }
    add_routes();
    zone_->seal();
  }

  const std::vector<sg4::Host*>& hosts() const { return hosts_; }
  sg4::NetZone& zone() const { return *zone_; }
  simgrid::kernel::routing::NetPoint* router() const { return router_; }

 private:
  void add_routes() {
    Links shared;
    if (cluster_.local_shared_bytes_per_s > 0) {
      shared.emplace_back(zone_->create_link(name_ + "_shared", cluster_.local_shared_bytes_per_s)->seal());
    }
    for (std::size_t from = 0; from < hosts_.size(); ++from) {
      for (std::size_t to = 0; to < hosts_.size(); ++to) {
        if (from == to) continue;
        Links links = {sg4::LinkInRoute(ports_[from].out), sg4::LinkInRoute(ports_[to].in)};
        links.insert(links.end(), shared.begin(), shared.end());
        add_route(hosts_[from]->get_netpoint(), hosts_[to]->get_netpoint(), links);
      }
      const Port& adapter = adapters_[from % adapters_.size()];
      add_route(hosts_[from]->get_netpoint(), router_, {sg4::LinkInRoute(adapter.out)});
      add_route(router_, hosts_[from]->get_netpoint(), {sg4::LinkInRoute(adapter.in)});
    }
  }

  void add_route(simgrid::kernel::routing::NetPoint* from, simgrid::kernel::routing::NetPoint* to, const Links& links) {
    zone_->add_route(from, to, nullptr, nullptr, links, false);
  }

  const plan::Cluster& cluster_;
  std::string name_;
  sg4::NetZone* zone_;
  simgrid::kernel::routing::NetPoint* router_ = nullptr;
  std::vector<Port> adapters_;
  std::vector<sg4::Host*> hosts_;
  std::vector<Port> ports_;  // [hosts_]
};

// A zone without a parent can then make links and hosts.
void take_models(sg4::NetZone& zone, const sg4::NetZone& from) {
  const auto* models = from.get_impl();
  auto* taking = zone.get_impl();
  taking->set_network_model(models->get_network_model());
  taking->set_cpu_pm_model(models->get_cpu_pm_model());
  taking->set_cpu_vm_model(models->get_cpu_vm_model());
  taking->set_disk_model(models->get_disk_model());
  taking->set_host_model(models->get_host_model());
}

}  // namespace

void configure_simulator() {
  for (const char* setting :
       {// Latency plus bytes over a fair share of the bandwidth; the defaults are for TCP over gigabit Ethernet.
        "network/model:CM02", "network/latency-factor:1", "network/bandwidth-factor:1", "network/weight-S:0",
        "network/TCP-gamma:0", "network/crosstraffic:no",
        // Picoseconds, because small messages take a few microseconds.
        "surf/precision:1e-12",
        // Only what is asked for takes time.
        "smpi/simulate-computation:no", "smpi/test:0", "smpi/iprobe:0", "smpi/wtime:0", "smpi/host-speed:1e9f",
        // A send is over when its message has arrived. By default those below 64 KiB leave at once, into a buffer, as
        // in an MPI between main memories, and a rank's messages of several rounds then share its link.
        "smpi/send-is-detached-thresh:0",
        // Messages inside this are not copied: K and V have no memory.
        "smpi/shared-malloc:local"}) {
    sg4::Engine::set_config(std::string(setting));
  }
}

// SimGrid looks for the name of every new link and host in all zones below the first, and for the hosts of every zone
// that is sealed: with thousands of nodes that takes minutes. So the first zone gets the cluster when that is whole.
std::vector<sg4::Host*> make_platform(const plan::Cluster& cluster, int ranks, int ranks_per_node,
                                      const std::function<void()>& on_node) {
  sg4::NetZone* world = sg4::create_star_zone("world");
  sg4::NetZone* top = sg4::create_star_zone("cluster");
  take_models(*top, *world);
  const bool shared = cluster.remote_shared_bytes_per_s > 0;
  sg4::Link* between = top->create_link("between_nodes", shared ? cluster.remote_shared_bytes_per_s : kNoLimit);
  if (!shared) between->set_sharing_policy(sg4::Link::SharingPolicy::FATPIPE);
  between->seal();
  std::vector<sg4::Host*> hosts;
  for (int first = 0, number = 0; first < ranks; first += ranks_per_node, ++number) {
    const Node node(cluster, *top, number, first, std::min(ranks_per_node, ranks - first));
    hosts.insert(hosts.end(), node.hosts().begin(), node.hosts().end());
    // Every message between nodes goes out of one of them: counted there.
    top->add_route(node.zone().get_netpoint(), nullptr, node.router(), nullptr, {sg4::LinkInRoute(between)}, false);
    top->add_route(nullptr, node.zone().get_netpoint(), nullptr, node.router(), {}, false);
    on_node();
  }
  top->set_parent(world);
  top->seal();
  world->seal();
  return hosts;
}

}  // namespace treeattn::tools
