// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "base/file.h"
#include "model/json.h"

namespace treeattn::model {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are used as they lie in the file");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMostDimensions = 8;
constexpr int kDepth = 4;  // header, tensor, shape, and one to spare for metadata

struct StoredType {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr StoredType kStoredTypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
                                       {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
                                       {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};

std::optional<std::uint64_t> stored_size(std::string_view dtype) {
  for (const StoredType& type : kStoredTypes) {
    if (type.name == dtype) return type.bytes;
  }
  return std::nullopt;
}

std::optional<DType> usable_type(std::string_view dtype) {
  if (dtype == "F32") return DType::kFloat32;
  if (dtype == "F16") return DType::kFloat16;
  if (dtype == "BF16") return DType::kBFloat16;
  return std::nullopt;
}

// Nothing when it does not fit into 64 bits.
std::optional<std::uint64_t> byte_size(std::span<const std::int64_t> shape, std::uint64_t element) {
  std::uint64_t product = element;
  bool fits = true;
  for (const std::int64_t size : shape) {
    std::uint64_t next = 0;
    // A zero further on makes even a product that does not fit zero; such a shape is refused all the same.
    fits = !__builtin_mul_overflow(product, static_cast<std::uint64_t>(size), &next) && fits;
    product = next;
  }
  return fits ? std::optional(product) : std::nullopt;
}

SafetensorsEntry read_entry(const JsonNode& node, std::uint64_t data, std::uint64_t data_bytes) {
  SafetensorsEntry entry;
  entry.dtype = node.at("dtype").text();
  const JsonNode shape = node.at("shape");
  for (const JsonNode& size : shape.elements(kMostDimensions)) {
    entry.shape.push_back(size.integer(0, std::numeric_limits<std::int64_t>::max()));
  }
  const JsonNode offsets = node.at("data_offsets");
  const auto both = offsets.elements(2);
  if (both.size() != 2) offsets.refuse("[begin, end]");
  const std::int64_t begin = both[0].integer(0, std::numeric_limits<std::int64_t>::max());
  const std::int64_t end = both[1].integer(begin, std::numeric_limits<std::int64_t>::max());
  if (static_cast<std::uint64_t>(end) > data_bytes) {
    both[1].refuse(fmt::format("at most {}, where the file ends; is all of it here?", data_bytes));
  }
  entry.begin = data + static_cast<std::uint64_t>(begin);
  entry.end = data + static_cast<std::uint64_t>(end);
  if (const auto element = stored_size(entry.dtype)) {
    const auto bytes = byte_size(entry.shape, *element);
    if (!bytes || *bytes != entry.end - entry.begin) {
      offsets.refuse(fmt::format("as many bytes as the shape {} of {} has, not {}", entry.shape, entry.dtype,
                                 entry.end - entry.begin));
    }
    if (entry.begin % *element != 0 && entry.begin != entry.end) {
      offsets.refuse(fmt::format("a place in the file that is a multiple of {} for {}, not byte {}", *element,
                                 entry.dtype, entry.begin));
    }
  }
  return entry;
}

// The format allows neither holes nor overlaps.
void check_layout(const SafetensorsHeader& header, std::uint64_t data, std::uint64_t file_end,
                  const std::string& name) {
  std::vector<const SafetensorsHeader::value_type*> ordered;
  for (const auto& tensor : header) ordered.push_back(&tensor);
  std::sort(ordered.begin(), ordered.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::uint64_t at = data;
  for (const auto* tensor : ordered) {
    if (tensor->second.begin != at) {
      base::throw_bad_file(name, fmt::format("the data of {} begins at byte {}; accepted: {}, where the tensor before "
                                             "it ends",
                                             shown(tensor->first), tensor->second.begin, at));
    }
    at = tensor->second.end;
  }
  if (at != file_end) {
    base::throw_bad_file(name,
                         fmt::format("the tensors end at byte {}; accepted: {}, the end of the file", at, file_end));
  }
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& name) {
  if (file.size() < kLengthBytes) {
    base::throw_bad_file(name, fmt::format("{} bytes; accepted: at least {}", file.size(), kLengthBytes));
  }
  const std::string_view all(reinterpret_cast<const char*>(file.data()), file.size());
  refuse_lfs_pointer(all, name);
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const std::uint64_t most = std::min<std::uint64_t>(kLongestHeader, file.size() - kLengthBytes);
  if (length > most) {
    base::throw_bad_file(name, fmt::format("a header of {} bytes; accepted: at most {}; is this a safetensors file, "
                                           "and all of it?",
                                           length, most));
  }
  const std::string_view text = all.substr(kLengthBytes, static_cast<std::size_t>(length));
  if (!text.starts_with('{')) base::throw_bad_file(name, "the header does not begin with {; accepted: a JSON object");
  const Json value = parse_json(text, name, kDepth);
  const JsonNode json(value, name);
  const std::uint64_t data = kLengthBytes + length;
  SafetensorsHeader header;
  for (const auto& [tensor, ignored] : value.items()) {
    if (tensor == "__metadata__") {
      if (const auto metadata = json.find(tensor)) metadata->object();  // null: none
    } else {
      header.emplace(tensor, read_entry(json.at(tensor), data, file.size() - data));
    }
  }
  check_layout(header, data, file.size(), name);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : name_(path.string()), file_(path), header_(parse_safetensors(file_.bytes(), name_)) {}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> out;
  for (const auto& [tensor, entry] : header_) out.push_back(tensor);
  return out;
}

Tensor SafetensorsFile::tensor(const std::string& tensor, std::span<const std::int64_t> shape) const {
  const auto found = header_.find(tensor);
  if (found == header_.end()) {
    base::throw_bad_file(name_, fmt::format("has no tensor {} of shape {}", shown(tensor), shape));
  }
  const SafetensorsEntry& entry = found->second;
  if (!std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end())) {
    base::throw_bad_file(name_, fmt::format("{} has the shape {}; accepted: {}", shown(tensor), entry.shape, shape));
  }
  const auto dtype = usable_type(entry.dtype);
  if (!dtype) {
    base::throw_bad_file(
        name_, fmt::format("{} is of type {}; accepted: BF16, F16 or F32", shown(tensor), shown(entry.dtype)));
  }
  return {file_.bytes().data() + entry.begin, *dtype, entry.shape};
}

}  // namespace treeattn::model
