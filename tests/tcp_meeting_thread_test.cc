// SPDX-License-Identifier: Apache-2.0
// How ranks connected by TCP find each other: who comes late, twice, from elsewhere or not at all, and strangers.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "comm/tcp_card.h"
#include "comm/tcp_mesh.h"
#include "comm/tcp_socket.h"
#include "comm_cases.h"
#include "tcp_knock.h"
#include "tcp_ranks.h"
#include "temporary_directory.h"

namespace treeattn {
namespace {

using testing::free_port;
using testing::knock_at;
using testing::loopback_at;
using testing::try_knock_at;
using testing::with_deadline;

bool has_ipv6() {
  const int fd = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const bool has = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  ::close(fd);
  return has;
}

// Somebody who listens on this machine.
struct Door {
  explicit Door(int backlog) : socket(::socket(AF_INET, SOCK_STREAM, 0)) {
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(socket.fd(), entry.ai_addr, size), 0);
    EXPECT_EQ(::listen(socket.fd(), backlog), 0);
    EXPECT_EQ(::getsockname(socket.fd(), entry.ai_addr, &size), 0);
  }
  comm::Socket socket;
  sockaddr_in address = loopback_at(0);
  addrinfo entry{0,       AF_INET, SOCK_STREAM, 0, sizeof(sockaddr_in), reinterpret_cast<sockaddr*>(&address),
                 nullptr, nullptr};
};

// A host may have several addresses, and a firewall that says nothing at the first.
TEST(TcpMeeting, AnAddressWithoutAnswerLeavesTimeForTheOthers) {
  Door deaf(0), open(5);
  std::vector<comm::Socket> waiting;  // until there is no room for more before the door
  for (int i = 0; i < 4; ++i) {
    waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    ::connect(waiting.back().fd(), deaf.entry.ai_addr, deaf.entry.ai_addrlen);
  }
  deaf.entry.ai_next = &open.entry;
  const auto start = std::chrono::steady_clock::now();
  const comm::Socket found = comm::connect_to_any(&deaf.entry, "a host", start + std::chrono::seconds(20));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  sockaddr_in other{};
  socklen_t size = sizeof other;
  ASSERT_EQ(::getpeername(found.fd(), reinterpret_cast<sockaddr*>(&other), &size), 0);
  EXPECT_EQ(other.sin_port, open.address.sin_port);
  deaf.entry.ai_next = nullptr;
  EXPECT_THROW(comm::connect_to_any(&deaf.entry, "a host", std::chrono::steady_clock::now()), Unavailable);
}

TEST(TcpMeeting, RanksThatDoNotComeAreWaitedForNoLongerThanTheDeadline) {
  const int port = free_port();
  for (const int rank : {0, 1}) {
    try {
      tcp_communicator(TcpPlace{rank, 2, "127.0.0.1", port}, with_deadline(0.3));
      FAIL() << "alone, and connected";
    } catch (const Unavailable& error) {
      const std::string who = rank == 0 ? "rank 1 of 2 did not come" : "no answer from rank 0 at 127.0.0.1";
      EXPECT_NE(std::string(error.what()).find(who), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("within the deadline"), std::string::npos) << error.what();
    }
  }
}

TEST(TcpMeeting, WhoHasComeHearsWhoHasNot) {
  const int port = free_port();
  const auto come = [&](int rank, double deadline) {
    try {
      tcp_communicator(TcpPlace{rank, 4, "127.0.0.1", port}, with_deadline(deadline));
      ADD_FAILURE() << "two of four, and connected";
    } catch (const Unavailable& error) {
      EXPECT_NE(std::string(error.what()).find("ranks 1, 3 of 4 did not come"), std::string::npos) << error.what();
    }
  };
  std::thread other([&] { come(2, 20); });
  come(0, 1.5);
  other.join();
}

// Comes to the meeting and talks to the others.
void meet(int rank, int size, int port, const std::string& address = "127.0.0.1") {
  try {
    testing::check_chain(*tcp_communicator(TcpPlace{rank, size, address, port}, with_deadline(20)), 3);
  } catch (const Error& error) {
    ADD_FAILURE() << "rank " << rank << ": " << error.what();
  }
}

// A name may be longer than what ranks tell each other of themselves; this one is 127.0.0.1 in octal.
TEST(TcpMeeting, AnyAddressOfRankZero) {
  for (const std::string& address :
       {std::string("::1"), std::string("localhost"), std::string(80, '0') + "177.0.0.1"}) {
    SCOPED_TRACE(address);
    if (address == "::1" && !has_ipv6()) continue;
    const int port = free_port();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] { meet(rank, 3, port, address); });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// A process that does this, and ends with 0, with kNotHere where it may not, or else where an expectation failed.
constexpr int kNotHere = 77;
template <class Body>
pid_t start_process(const Body& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child != 0) return child;
  const bool here = body();
  std::fflush(nullptr);
  ::_exit(here ? int{::testing::Test::HasFailure()} : kNotHere);
}

int status_of(pid_t child) {
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The last thing in a test, which is skipped where the process may not do what it has to.
void expect_end_of(pid_t child, const char* what_is_missing) {
  const int status = status_of(child);
  if (status == kNotHere) GTEST_SKIP() << what_is_missing;
  EXPECT_EQ(status, 0);
}

// A monitor that only looks whether the port is open, a browser, somebody who stops in the middle of a card.
TEST(TcpMeeting, StrangersAtThePortHoldNobodyUp) {
  const int port = free_port();
  std::thread first([&] { meet(0, 2, port); });
  const std::string request = "GET / HTTP/1.1\r\n" + std::string(200, 'x');
  const std::string half = "eerT";  // how a card begins
  std::vector<comm::Socket> strangers;
  for (const std::string& says : {std::string(), request, half}) {
    strangers.push_back(knock_at(port));
    EXPECT_EQ(::send(strangers.back().fd(), says.data(), says.size(), MSG_NOSIGNAL), static_cast<ssize_t>(says.size()));
  }
  knock_at(port);
  meet(1, 2, port);
  first.join();
}

#if !defined(__SANITIZE_THREAD__)  // does not fork
// More of them than rank 0 may have open files.
TEST(TcpMeeting, SilentStrangersMakeRoom) {
  const int port = free_port();
  const pid_t child = start_process([&] {
    const rlimit few{40, 40};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    meet(0, 2, port);
    return true;
  });
  std::vector<comm::Socket> strangers;
  strangers.push_back(knock_at(port));
  for (int i = 0; i < 100; ++i) strangers.push_back(try_knock_at(port));
  meet(1, 2, port);
  EXPECT_EQ(status_of(child), 0);
}
#endif

TEST(TcpMeeting, ALimitOfOpenFilesBelowTheRanksIsNamed) {
  const pid_t child = start_process([&] {
    const rlimit few{40, 40};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    try {
      tcp_communicator(TcpPlace{0, 40, "127.0.0.1", free_port()}, with_deadline(0.3));
      ADD_FAILURE() << "alone, and connected";
    } catch (const Unavailable& error) {
      const std::string why = "size = 40, with a connection to every other rank, and this process may open 40 files; ";
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
    return true;
  });
  EXPECT_EQ(status_of(child), 0);
}

// Who knock and go, one after the other, with no end: rank 0 goes when its time is over, and not when nobody knocks.
TEST(TcpMeeting, StrangersWithoutEndDoNotPutOffTheDeadline) {
  const int port = free_port();
  std::atomic<bool> has_gone = false;
  std::atomic<bool> was_put_off = false;
  const auto flood = [&] {
    const auto enough = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    std::deque<comm::Socket> strangers;
    while (!has_gone && !was_put_off) {
      was_put_off = std::chrono::steady_clock::now() > enough;
      strangers.push_back(try_knock_at(port, SOCK_NONBLOCK));
      const linger at_once{1, 0};  // so that the system has no port to remember
      ::setsockopt(strangers.back().fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      if (strangers.size() > 100) strangers.pop_front();
    }
  };
  std::vector<std::thread> flooding;
  for (int i = 0; i < 2; ++i) flooding.emplace_back(flood);
  EXPECT_THROW(tcp_communicator(TcpPlace{0, 2, "127.0.0.1", port}, with_deadline(0.5)), Unavailable);
  EXPECT_FALSE(was_put_off) << "rank 0 stayed as long as somebody knocked";
  has_gone = true;
  for (std::thread& thread : flooding) thread.join();
}

// What a rank of the next version begins with. All that comes after it may be another.
constexpr comm::TcpGreeting kOfNextVersion{comm::TcpGreeting::kMagic, comm::TcpGreeting::kVersion + 1};

template <class Body>
void expect_both_versions_named(const Body& body) {
  try {
    body();
    ADD_FAILURE() << "connected to a rank of another version";
  } catch (const Unavailable& error) {
    const std::string versions =
        fmt::format("speaks version {} of the protocol, and this rank version {}; accepted: ", kOfNextVersion.version,
                    comm::TcpGreeting::kVersion);
    EXPECT_NE(std::string(error.what()).find(versions), std::string::npos) << error.what();
  }
}

// The greeting alone is enough to tell; no card of another version would be as long.
TEST(TcpMeeting, ARankOfAnotherVersionIsRefusedAndToldWhy) {
  const int port = free_port();
  std::thread first([&] {
    expect_both_versions_named([&] { tcp_communicator(TcpPlace{0, 3, "127.0.0.1", port}, with_deadline(20)); });
  });
  const comm::Socket other = knock_at(port);
  EXPECT_EQ(::send(other.fd(), &kOfNextVersion, sizeof kOfNextVersion, MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof kOfNextVersion));
  comm::TcpGreeting answer{};
  EXPECT_EQ(::recv(other.fd(), &answer, sizeof answer, MSG_WAITALL), static_cast<ssize_t>(sizeof answer));
  EXPECT_EQ(answer.magic, comm::TcpGreeting::kMagic);
  EXPECT_EQ(answer.version, comm::TcpGreeting::kVersion);
  first.join();
}

TEST(TcpMeeting, ARankThatIsRefusedForItsVersionSaysSo) {
  const Door door(1);
  std::thread second([&] {
    const TcpPlace place{1, 3, "127.0.0.1", ntohs(door.address.sin_port)};
    expect_both_versions_named([&] { tcp_communicator(place, with_deadline(20)); });
  });
  const comm::Socket rank(::accept(door.socket.fd(), nullptr, nullptr));
  comm::TcpGreeting greeting{};
  EXPECT_EQ(::recv(rank.fd(), &greeting, sizeof greeting, MSG_WAITALL), static_cast<ssize_t>(sizeof greeting));
  EXPECT_EQ(greeting.version, comm::TcpGreeting::kVersion);
  EXPECT_EQ(::send(rank.fd(), &kOfNextVersion, sizeof kOfNextVersion, MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof kOfNextVersion));
  second.join();
}

// Somebody who answers as rank 0 does, but not with the ranks that there are.
TEST(TcpMeeting, ATableOfOtherRanksIsRefused) {
  const Door door(1);
  std::thread second([&] {
    const TcpPlace place{1, 2, "127.0.0.1", ntohs(door.address.sin_port)};
    try {
      tcp_communicator(place, with_deadline(20));
      ADD_FAILURE() << "connected by a table of other ranks";
    } catch (const Unavailable& error) {
      EXPECT_NE(std::string(error.what()).find("sent what is no table of ranks, at rank 1; accepted: "),
                std::string::npos)
          << error.what();
    }
  });
  const comm::Socket rank(::accept(door.socket.fd(), nullptr, nullptr));
  std::array<comm::TcpCard, 2> table;
  for (comm::TcpCard& card : table) card.size = card.port = 2;  // both are rank 0
  EXPECT_EQ(::send(rank.fd(), table.data(), sizeof table, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof table));
  second.join();
}

// What an earlier run has left at the port: it is sent away and told why, and the ranks of this run meet.
TEST(TcpMeeting, ARankOfAnotherJobIsRefusedByNameAndTheOthersMeet) {
  const int port = free_port();
  const auto come = [&](int rank, const char* job, double seconds) {
    testing::check_chain(*tcp_communicator(TcpPlace{rank, 2, "127.0.0.1", port, job}, with_deadline(seconds)), 3);
  };
  std::thread first([&] { EXPECT_NO_THROW(come(0, "new", 20)); });
  for (const char* job : {"old", ""}) {
    try {
      come(1, job, 20);
      ADD_FAILURE() << "connected to another job";
    } catch (const Unavailable& error) {
      const std::string own = *job != '\0' ? "job \"old\"" : "no job";
      EXPECT_EQ(error.what(),
                fmt::format("tcp_communicator: rank 0 at 127.0.0.1:{} is of job \"new\", and this rank of "
                            "{}; accepted: the same job (TREEATTN_JOB) on all ranks",
                            port, own));
    }
  }
  EXPECT_NO_THROW(come(1, "new", 20));
  first.join();
}

// Where nobody else comes, rank 0 says who did. On a machine that is busy its time may be over before: then once more.
TEST(TcpMeeting, ARankOfAnotherJobIsNamedWhereRanksDoNotCome) {
  const int port = free_port();
  const auto answer_to = [&](int rank, const char* job, const std::string& wanted) {
    for (;;) {
      try {
        tcp_communicator(TcpPlace{rank, 2, "127.0.0.1", port, job}, with_deadline(0.3));
        return std::string("connected to another job");
      } catch (const Unavailable& error) {
        const std::string what = error.what();
        if (what.find(wanted) != std::string::npos) return what;
      }
    }
  };
  std::thread left([&] { answer_to(1, "old", " is of job \"new\", and this rank of job \"old\""); });
  EXPECT_EQ(answer_to(0, "new", "\"old\""),
            "tcp_communicator: rank 1 of 2 did not come (rank 1 of this machine did, of job \"old\", and this is job "
            "\"new\"; accepted: the same job (TREEATTN_JOB) on all ranks) within the deadline");
  left.join();
}

// It had its own deadline, and is started again while rank 0 still waits.
TEST(TcpMeeting, ARankThatWentAwayMayComeAgain) {
  const int port = free_port();
  std::thread first([&] { meet(0, 3, port); });
  knock_at(port);
  EXPECT_THROW(tcp_communicator(TcpPlace{1, 3, "127.0.0.1", port}, with_deadline(0.3)), Unavailable);
  std::thread third([&] { meet(2, 3, port); });
  meet(1, 3, port);
  first.join();
  third.join();
}

TEST(TcpMeeting, ARankThatComesTwiceIsRefused) {
  const int port = free_port();
  const auto come = [&](int rank) { tcp_communicator(TcpPlace{rank, 3, "127.0.0.1", port}, with_deadline(20)); };
  std::thread first([&] { EXPECT_THROW(come(0), InvalidArgument); });
  std::thread twin([&] { EXPECT_THROW(come(1), Unavailable); });
  EXPECT_THROW(come(1), Unavailable);
  first.join();
  twin.join();
}

// A network of this process alone, where the system has few ports to give to those who call. False where it may not.
bool enter_small_network() {
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  ifreq loopback{};
  std::strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP | IFF_RUNNING;
  const int fd = ::socket(AF_INET, SOCK_DGRAM, 0);
  const bool up = fd >= 0 && ::ioctl(fd, SIOCSIFFLAGS, &loopback) == 0;
  ::close(fd);
  return up &&
         static_cast<bool>(std::ofstream("/proc/sys/net/ipv4/ip_local_port_range") << "45680 45687" << std::flush);
}

// The same, with a file of its own in the place of one of the system's.
bool enter_small_network_with(const std::string& file, const char* path) {
  return enter_small_network() && ::unshare(CLONE_NEWNS) == 0 &&
         ::mount(file.c_str(), path, nullptr, MS_BIND, nullptr) == 0;
}

// Who calls rank 0 again and again before it listens is given one port after the other to call from, and one day the
// very port that it calls: then it would be connected to itself, and rank 0 could not listen there any more.
TEST(TcpMeeting, ARankThatWaitsForRank0DoesNotReachItself) {
  const pid_t child = start_process([] {
    if (!enter_small_network()) return false;
    std::thread second([] { meet(1, 2, 45680); });
    std::this_thread::sleep_for(std::chrono::seconds(1));  // fifty calls
    meet(0, 2, 45680);
    second.join();
    return true;
  });
  expect_end_of(child, "no network of its own for a process");
}

// The port where those are called who come before rank 0 is any but its own. Linux gives those of odd numbers first to
// who asks for any; here but one of them is left.
TEST(TcpMeeting, WhoComesBeforeRank0LeavesItsPortFree) {
  const pid_t child = start_process([] {
    if (!enter_small_network()) return false;
    std::deque<comm::Socket> taken;
    for (const int port : {45683, 45685, 45687}) taken.push_back(comm::listen_on(port));
    std::thread second([] { meet(1, 2, 45681); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    meet(0, 2, 45681);
    second.join();
    return true;
  });
  expect_end_of(child, "no network of its own for a process");
}

// A cluster may give rank 0's machine its name when that has started, after others ask for it.
TEST(TcpMeeting, ANameThatIsNotKnownYetIsAskedForAgain) {
  const TemporaryDirectory directory;
  const std::string hosts = directory.path() / "hosts";
  std::ofstream(hosts) << "127.0.0.1 localhost\n";
  const pid_t child = start_process([&] {
    if (!enter_small_network_with(hosts, "/etc/hosts")) return false;
    try {
      tcp_communicator(TcpPlace{1, 2, "rank0", 45680}, with_deadline(0.3));
      ADD_FAILURE() << "connected to a name that nobody has";
    } catch (const Unavailable& error) {
      EXPECT_NE(std::string(error.what()).find("address rank0: "), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("within the deadline"), std::string::npos) << error.what();
    }
    std::thread second([] { meet(1, 2, 45680, "rank0"); });
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    std::ofstream(hosts, std::ios::app) << "127.0.0.1 rank0\n";
    meet(0, 2, 45680);
    second.join();
    return true;
  });
  expect_end_of(child, "no names of its own for a process");
}

// Nothing ends a question to a name server that never answers; the deadline does not wait for it.
TEST(TcpMeeting, ANameServerThatNeverAnswersDoesNotPutOffTheDeadline) {
  const TemporaryDirectory directory;
  const std::string servers = directory.path() / "resolv.conf";
  std::ofstream(servers) << "nameserver 127.0.0.1\noptions timeout:10 attempts:1\n";
  const pid_t child = start_process([&] {
    if (!enter_small_network_with(servers, "/etc/resolv.conf")) return false;
    const comm::Socket silent(::socket(AF_INET, SOCK_DGRAM, 0));
    const sockaddr_in address = loopback_at(53);
    if (::bind(silent.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return false;
    try {
      tcp_communicator(TcpPlace{1, 2, "rank0.example", 45680}, with_deadline(0.3));
      ADD_FAILURE() << "connected to a name that nobody knows";
    } catch (const Unavailable& error) {
      EXPECT_STREQ(error.what(),
                   "tcp_communicator: address rank0.example: no answer from a name server within the deadline");
    }
    char question[512];
    EXPECT_GT(::recv(silent.fd(), question, sizeof question, MSG_DONTWAIT), 0) << "nobody asked the name server";
    return true;
  });
  expect_end_of(child, "no name servers of its own for a process");
}

// The first of these that is there. torchrun says "none" where it was given no name.
TEST(TcpMeeting, TheEnvironmentNamesTheJob) {
  constexpr std::array kNames{"TREEATTN_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"};
  struct Case {
    std::array<const char*, 4> values;
    const char* job;
  };
  for (const Case& one :
       {Case{{nullptr, nullptr, nullptr, nullptr}, ""}, Case{{"a", "b", "7", "0"}, "a"}, Case{{"", "b", "7", "0"}, ""},
        Case{{nullptr, "b", "7", "0"}, "b"}, Case{{nullptr, "none", "7", "0"}, ""},
        Case{{nullptr, nullptr, "7", "0"}, "7.0"}, Case{{nullptr, nullptr, "7", nullptr}, ""}}) {
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      one.values[i] != nullptr ? ::setenv(kNames[i], one.values[i], 1) : ::unsetenv(kNames[i]);
    }
    EXPECT_EQ(comm::job_of_launcher(), one.job);
  }
  for (const char* name : kNames) ::unsetenv(name);
}

TEST(TcpMeeting, TheEnvironmentSaysWhoIsWho) {
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  ::unsetenv("WORLD_SIZE");
  EXPECT_THROW(tcp_communicator(), Unavailable);
  set("WORLD_SIZE", "1");
  set("RANK", "1");
  set("MASTER_PORT", std::to_string(free_port()));
  EXPECT_THROW(tcp_communicator(), InvalidArgument);
  set("RANK", "0");
  const auto world = tcp_communicator();
  EXPECT_EQ(world->size(), 1);
  testing::check_self_message(*world);
  EXPECT_THROW(tcp_communicator(TcpPlace{0, 2, "127.0.0.1", 70000}), InvalidArgument);
  EXPECT_THROW(tcp_communicator(TcpPlace{2, 2, "127.0.0.1", 7000}), InvalidArgument);
  EXPECT_THROW(tcp_communicator(TcpPlace{0, 2'000'000'000, "127.0.0.1", 7000}), InvalidArgument);
  for (const double seconds : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    EXPECT_THROW(tcp_communicator(TcpPlace{0, 2, "127.0.0.1", 7000}, with_deadline(seconds)), InvalidArgument);
  }
  for (const char* name : {"WORLD_SIZE", "RANK", "MASTER_PORT"}) ::unsetenv(name);
}

}  // namespace
}  // namespace treeattn
