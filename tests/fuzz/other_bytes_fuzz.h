// SPDX-License-Identifier: Apache-2.0
// What strangers may send beside model files and saved caches: the text of a session, a cluster file, the card with
// which a rank connects over TCP, the header of its messages, and its notes. Called by libFuzzer (model_files_fuzz.cc)
// and by the test that replays the corpus.
#pragma once

#include <cstring>
#include <string>

#include "base/byte_reader.h"
#include "base/checksum.h"
#include "comm/group.h"
#include "comm/note.h"
#include "comm/tcp_card.h"
#include "comm/tcp_header.h"
#include "comm/transport.h"
#include "fuzz/model_files_fuzz.h"
#include "model/session_file.h"
#include "plan/cluster.h"

namespace treeattn::fuzz {

// As given, and with a checksum that fits, so that damage reaches what lies behind it.
inline bool try_session(std::string_view given) {
  bool taken = false;
  std::string bytes(given);
  for (int repaired = 0; repaired < 2; ++repaired) {
    try {
      const model::SavedText text = model::parse_saved_text(std::as_bytes(std::span(bytes)));
      must(model::parse_saved_text(model::encode(text)) == text);
      taken = true;
    } catch (const InvalidArgument&) {
    }
    if (bytes.size() < sizeof(std::uint32_t)) break;
    const std::span<char> body = std::span(bytes).first(bytes.size() - sizeof(std::uint32_t));
    const std::uint32_t checksum = base::crc32c(std::as_bytes(body));
    std::memcpy(bytes.data() + body.size(), &checksum, sizeof checksum);
  }
  return taken;
}

inline bool try_cluster(std::string_view bytes) {
  try {
    const plan::Cluster cluster = plan::parse_cluster(bytes, "fuzz");
    must(cluster.devices_per_node > 0 && cluster.adapters_per_node > 0 && cluster.device_memory_bytes > 0);
    must(cluster.device_bytes_per_s > 0 && cluster.merge_bytes_per_s > 0 && cluster.launch_s >= 0);
    for (const plan::Link& link : {cluster.local, cluster.remote}) must(link.latency_s >= 0 && link.bytes_per_s > 0);
    for (const auto* list : {&cluster.slow_devices, &cluster.slow_local, &cluster.slow_remote}) {
      for (const plan::Slower& slower : *list) must(slower.index >= 0 && slower.factor > 0);
    }
    must(cluster.network(5, 2).node_of_rank.size() == 5);
    return true;
  } catch (const BadFile&) {
    return false;
  }
}

inline bool try_card(std::string_view bytes) {
  comm::TcpCard card;
  if (bytes.size() < sizeof card) return false;
  std::memcpy(&card, bytes.data(), sizeof card);
  if (!comm::is_sound(card)) return false;
  must(std::strlen(card.address.data()) < card.address.size() &&
       std::strlen(card.machine.data()) < card.machine.size());
  return true;
}

inline bool try_header(std::string_view bytes) {
  comm::TcpHeader header;
  base::ByteReader in(std::as_bytes(std::span(bytes)));
  if (!in.take(header)) return false;
  try {
    comm::check_header(1, header);
  } catch (const Error&) {
    return false;
  }
  const bool note = header.tag == comm::TcpHeader::kNote;
  must(note || (header.tag >= 0 && header.tag <= comm::Transport::kMaxTag));
  must(header.bytes <= (note ? comm::Transport::kMaxNoteBytes : comm::TcpHeader::kMostBytes));
  return true;
}

// From rank 1 of 4.
inline bool try_note(std::string_view bytes) {
  try {
    const comm::Note note = comm::parse_note(1, 4, std::as_bytes(std::span(bytes)));
    must(note.head.sender == 1 && note.lost.size() <= 4 && comm::encode(note).size() == bytes.size());
    for (const int rank : note.lost) must(rank >= 0 && rank < 4);
    must(note.head.time_left >= 0 && note.head.time_left <= comm::kLongestDeadline.count());
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace treeattn::fuzz
