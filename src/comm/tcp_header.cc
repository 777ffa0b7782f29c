// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_header.h"

#include "base/sent.h"
#include "comm/transport.h"

namespace treeattn::comm {

using base::require_sent;

void check_header(int from, const TcpHeader& header) {
  const bool note = header.tag == TcpHeader::kNote;
  require_sent(note || (header.tag >= 0 && header.tag <= Transport::kMaxTag), from,
               "a message with tag {}; accepted: {} to {}", header.tag, TcpHeader::kNote, Transport::kMaxTag);
  require_sent(header.given_up == 0 || (header.given_up == 1 && !note && header.bytes == 0), from,
               "a {} of {} bytes with given_up = {}; accepted: 0, or 1 for a message without bytes",
               note ? "note" : "message", header.bytes, header.given_up);
  const std::uint64_t most = note ? Transport::kMaxNoteBytes : TcpHeader::kMostBytes;
  require_sent(header.bytes <= most, from, "a {} of {} bytes; accepted: up to {}", note ? "note" : "message",
               header.bytes, most);
}

}  // namespace treeattn::comm
