// SPDX-License-Identifier: Apache-2.0
// Reads sysfs and procfs. A table that is missing (another system, a sandbox) leaves its field at 0 or "unknown".
#include "base/machine.h"

#include <sys/utsname.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "base/control_group.h"

namespace treeattn::base {
namespace {

// The first line of a small file, empty when it cannot be read.
std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string trim(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// "1024K" -> 1048576.
std::size_t parse_size(const std::string& text) {
  std::istringstream in(text);
  std::size_t value = 0;
  char unit = 0;
  in >> value >> unit;
  switch (std::toupper(static_cast<unsigned char>(unit))) {
    case 'K':
      return value << 10;
    case 'M':
      return value << 20;
    case 'G':
      return value << 30;
    default:
      return value;
  }
}

// The value of the first "key : value" line of a table such as /proc/cpuinfo; empty when there is none.
std::string table_value(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon != std::string::npos && trim(line.substr(0, colon)) == key) return trim(line.substr(colon + 1));
  }
  return {};
}

// Arm's kernel tables give a part number instead of a name.
std::string arm_model() {
  const std::string implementer = table_value("/proc/cpuinfo", "CPU implementer");
  const std::string part = table_value("/proc/cpuinfo", "CPU part");
  if (part.empty()) return {};
  static const std::map<std::pair<std::string, std::string>, std::string> kParts = {
      {{"0x41", "0xd03"}, "Cortex-A53"},  {{"0x41", "0xd07"}, "Cortex-A57"},  {{"0x41", "0xd08"}, "Cortex-A72"},
      {{"0x41", "0xd0b"}, "Cortex-A76"},  {{"0x41", "0xd0c"}, "Neoverse-N1"}, {{"0x41", "0xd40"}, "Neoverse-V1"},
      {{"0x41", "0xd41"}, "Cortex-A78"},  {{"0x41", "0xd49"}, "Neoverse-N2"}, {{"0x41", "0xd4f"}, "Neoverse-V2"},
      {{"0x41", "0xd84"}, "Neoverse-V3"}, {{"0x41", "0xd8e"}, "Neoverse-N3"}, {{"0x46", "0x001"}, "A64FX"},
      {{"0xc0", "0xac3"}, "Ampere-1"},    {{"0xc0", "0xac4"}, "Ampere-1a"},
  };
  const auto found = kParts.find({implementer, part});
  return found != kParts.end() ? found->second : "Arm implementer " + implementer + " part " + part;
}

std::string cpu_model() {
  std::string model = table_value("/proc/cpuinfo", "model name");
  if (model.empty()) model = arm_model();
  return model.empty() ? "unknown" : model;
}

// Size of the data or unified cache of one level, as processor 0 sees it.
std::size_t cache_bytes(const std::string& level) {
  for (int index = 0; index < 16; ++index) {
    const std::string dir = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string found = first_line(dir + "level");
    if (found.empty()) break;
    if (found == level && first_line(dir + "type") != "Instruction") return parse_size(first_line(dir + "size"));
  }
  return 0;
}

std::size_t sysconf_bytes(int name) {
  const long value = ::sysconf(name);
  return value > 0 ? static_cast<std::size_t>(value) : 0;
}

}  // namespace

std::size_t Machine::last_cache_bytes() const { return std::max({l1d_bytes, l2_bytes, l3_bytes}); }

Machine read_machine() {
  Machine machine;
  machine.cpu_model = cpu_model();
  utsname names{};
  machine.architecture = ::uname(&names) == 0 ? names.machine : "unknown";
  machine.logical_cores = static_cast<int>(sysconf_bytes(_SC_NPROCESSORS_ONLN));
  machine.usable_cores = usable_cores();
  machine.l1d_bytes = cache_bytes("1");
  machine.l2_bytes = cache_bytes("2");
  machine.l3_bytes = cache_bytes("3");
  machine.page_bytes = sysconf_bytes(_SC_PAGESIZE);
  machine.memory_bytes = sysconf_bytes(_SC_PHYS_PAGES) * machine.page_bytes;
  return machine;
}

std::vector<int> parse_processor_list(const std::string& text) {
  std::vector<int> out;
  std::istringstream in(text);
  for (int first = 0; in >> first;) {
    int last = first;
    if (in.peek() == '-') {
      in.get();
      if (!(in >> last)) break;
    }
    for (int i = first; i <= last; ++i) out.push_back(i);
    if (in.peek() != ',') break;
    in.get();
  }
  return out;
}

std::vector<int> usable_processors() {
  std::vector<int> out;
#if defined(__linux__)
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (::sched_getaffinity(0, sizeof(mask), &mask) != 0) return out;
  std::set<int> usable;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &mask)) usable.insert(i);
  }
  // Hardware threads of one core share its load ports and caches, so a second thread of a core comes after the first
  // thread of every core.
  std::vector<std::pair<int, int>> ranked;  // (place among its usable siblings, processor)
  for (const int processor : usable) {
    const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(processor);
    int place = 0;
    for (const int sibling : parse_processor_list(first_line(path + "/topology/thread_siblings_list"))) {
      place += sibling < processor && usable.count(sibling) != 0 ? 1 : 0;
    }
    ranked.emplace_back(place, processor);
  }
  std::sort(ranked.begin(), ranked.end());
  for (const auto& entry : ranked) out.push_back(entry.second);
#endif
  return out;
}

int usable_cores() {
  const auto processors = static_cast<int>(usable_processors().size());
  const int allowed = processors > 0 ? processors : static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, std::min(allowed, quota_cores()));
}

int quota_cores() { return control_group_processors(text_of_file); }

void stay_on(std::span<const int> processors) {
#if defined(__linux__)
  if (processors.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int processor : processors) CPU_SET(processor, &mask);
  ::sched_setaffinity(0, sizeof(mask), &mask);
#else
  (void)processors;
#endif
}

std::string machine_name() {
  std::string id = first_line("/proc/sys/kernel/random/boot_id");
  if (!id.empty()) return id;
  char name[64] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string control_group_name() {
  // In a container all groups may be "/": then the namespaces differ.
  char space[64] = {};
  if (::readlink("/proc/self/ns/cgroup", space, sizeof space - 1) < 0) space[0] = '\0';
  return space + text_of_file("/proc/self/cgroup");
}

}  // namespace treeattn::base
