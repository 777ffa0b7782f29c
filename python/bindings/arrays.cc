// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

#include <unistd.h>

#include <map>
#include <memory>
#include <string>

namespace treeattn::python {

namespace {

DType dtype_of(const char* name, const Array& array) {
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  using Code = nb::dlpack::dtype_code;
  if (is(Code::Float, 32)) return DType::kFloat32;
  if (is(Code::Float, 16)) return DType::kFloat16;
  if (is(Code::Bfloat, 16)) return DType::kBFloat16;
  if (is(Code::Int, 8)) return DType::kInt8;
  if (is(Code::Float8_E4M3FN, 8) || is(Code::UInt, 8)) return DType::kFp8E4M3;
  refuse(name, "elements of DLPack type " + std::to_string(type.code) + " with " + std::to_string(type.bits) + " bits",
         "float32, float16, bfloat16, int8, and e4m3 as float8_e4m3fn or the bytes as uint8");
}

// numpy says 0 for arrays without elements, where a stride leads nowhere.
std::int64_t stride_of(const Array& array, std::size_t dim) { return array.size() == 0 ? 1 : array.stride(dim); }

void require_dims(const char* name, const Array& array, std::size_t dims, const char* shape) {
  if (array.ndim() != dims) refuse(name, std::to_string(array.ndim()) + " dimensions", shape);
  if (dims == 4 && array.shape(3) > 1 && stride_of(array, 3) != 1) {
    refuse(name, "elements of a row " + std::to_string(array.stride(3)) + " apart", "1: a row in one piece");
  }
}

std::int64_t size_of(const Array& array, std::size_t dim) { return static_cast<std::int64_t>(array.shape(dim)); }

}  // namespace

Call Call::of(const nb::kwargs& given, unsigned parts) {
  constexpr char kPerSequence[] = "whole numbers, one for each sequence",
                 kAnyScales[] = "an array of the shape of the rows without head_dim";
  Call call;
  std::map<std::string, Setter> known;
  if (parts & kOptions) {
    known.insert({{"scale", sets(call.scale, kNumber)},
                  {"causal", sets(call.causal, kChoice)},
                  {"window", sets(call.window, kWholeNumber)},
                  {"softcap", sets(call.softcap, kNumber)},
                  {"alibi_slopes", sets(call.alibi_slopes, kPerHead)},
                  {"sinks", sets(call.sinks, kPerHead)}});
  }
  if (parts & kFirstQuery) known.insert({"first_query", sets(call.first_query, kPerSequence)});
  if (parts & kInput) {
    known.insert({{"lengths", sets(call.lengths, kPerSequence)},
                  {"first_key", sets(call.first_key, kWholeNumber)},
                  {"chunk_tokens", sets(call.order.chunk_tokens, kWholeNumber)},
                  {"branches", sets(call.order.branches, kWholeNumber)},
                  {"page_table", sets(call.page_table, "a dense int32 array [batch, pages of a sequence]", false)}});
  }
  if (parts & kScales) {
    known.insert({{"k_scales", sets(call.k_scales, kAnyScales)}, {"v_scales", sets(call.v_scales, kAnyScales)}});
  }
  set_options(given, known);
  return call;
}

AttentionOptions Call::options() const {
  return {.scale = scale,
          .causal = causal,
          .window = window,
          .softcap = softcap,
          .alibi_slopes = alibi_slopes,
          .sinks = sinks};
}

Array array_of(const char* name, const nb::object& array) {
  refuse_lazy_tensor(name, array);
  if (Array view; nb::try_cast(array, view)) return view;
  std::string what = shown(array);
  if (nb::hasattr(array, "dtype")) {
    const nb::object type = array.attr("dtype");
    what += std::string(" of ") + nb::str(nb::handle(type)).c_str();
  }
  refuse(name, what, "an array of numpy, torch or jax that DLPack can pass on, in the machine's byte order");
}

nb::object empty_like(const nb::object& like, const std::vector<std::int64_t>& shape) {
  if (is_torch(like)) {
    const nb::module_ torch = nb::module_::import_("torch");
    return torch.attr("empty")(shape, nb::arg("dtype") = torch.attr("float32"),
                               nb::arg("device") = like.attr("device"));
  }
  return nb::module_::import_("numpy").attr("empty")(shape, "float32");
}

void* stream_of(const nb::object& array) {
  if (!is_torch(array) || !nb::cast<bool>(array.attr("is_cuda"))) return nullptr;
  const nb::object stream = nb::module_::import_("torch").attr("cuda").attr("current_stream")(array.attr("device"));
  return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream.attr("cuda_stream")));
}

QueryView query_view(const Array& q) {
  require_dims("q", q, 4, "4: batch, queries, heads, head_dim");
  return {.data = q.data(),
          .dtype = dtype_of("q", q),
          .batch = size_of(q, 0),
          .queries = size_of(q, 1),
          .heads = size_of(q, 2),
          .head_dim = size_of(q, 3),
          .batch_stride = stride_of(q, 0),
          .query_stride = stride_of(q, 1),
          .head_stride = stride_of(q, 2)};
}

KvView kv_view(const char* name, const Array& rows, const std::optional<Array>& scales,
               const std::optional<Table>& page_table) {
  require_dims(name, rows, 4,
               page_table ? "4: pages, page_tokens, kv_heads, head_dim" : "4: batch, tokens, kv_heads, head_dim");
  KvView view;
  view.data = rows.data();
  view.dtype = dtype_of(name, rows);
  view.kv_heads = size_of(rows, 2);
  view.head_dim = size_of(rows, 3);
  view.token_stride = stride_of(rows, 1);
  view.head_stride = stride_of(rows, 2);
  if (page_table) {
    view.pages = size_of(rows, 0);
    view.page_tokens = size_of(rows, 1);
    view.page_stride = stride_of(rows, 0);
    view.batch = static_cast<std::int64_t>(page_table->shape(0));
    view.pages_per_sequence = static_cast<std::int64_t>(page_table->shape(1));
    view.page_table = page_table->data();
    view.tokens = view.pages_per_sequence * view.page_tokens;
  } else {
    view.batch = size_of(rows, 0);
    view.tokens = size_of(rows, 1);
    view.batch_stride = stride_of(rows, 0);
  }
  if (!scales) return view;
  const std::string scales_name = std::string(name) + "_scales";
  require_dims(scales_name.c_str(), *scales, 3, "3: those of the rows without head_dim");
  for (std::size_t dim = 0; dim < 3; ++dim) {
    if (scales->shape(dim) != rows.shape(dim)) {
      refuse(scales_name, std::to_string(scales->shape(dim)) + " in dimension " + std::to_string(dim),
             std::to_string(rows.shape(dim)) + ", as the rows have");
    }
  }
  if (scales->dtype() != nb::dtype<float>()) refuse(scales_name, "elements of another type", "float32");
  view.scales = static_cast<const float*>(scales->data());
  (page_table ? view.scale_page_stride : view.scale_batch_stride) = stride_of(*scales, 0);
  view.scale_token_stride = stride_of(*scales, 1);
  view.scale_head_stride = stride_of(*scales, 2);
  return view;
}

int gpu_of(const Call& call, std::initializer_list<const Array*> arrays) {
  std::vector<const Array*> all(arrays);
  for (const std::optional<Array>* scales : {&call.k_scales, &call.v_scales}) {
    if (*scales) all.push_back(&**scales);
  }
  std::optional<int> common;
  for (const Array* array : all) {
    const int type = array->device_type();
    if (type != nb::device::cpu::value && type != nb::device::cuda::value) {
      refuse("arrays", "one is on a device of DLPack type " + std::to_string(type), "the host's memory, or CUDA's");
    }
    const int device = type == nb::device::cuda::value ? array->device_id() : -1;
    if (common.value_or(device) != device) {
      refuse("arrays", "on devices " + std::to_string(*common) + " and " + std::to_string(device) + " (-1: the host)",
             "one device for all");
    }
    common = device;
  }
  return common.value_or(-1);
}

ThreadPool& default_pool() {
  thread_local std::unique_ptr<ThreadPool> pool;
  thread_local pid_t process = 0;
  if (process != ::getpid()) {  // fork(), as Python's multiprocessing does, copies a pool without its threads
    pool = std::make_unique<ThreadPool>(ThreadPool::available_cores());
    process = ::getpid();
  }
  return *pool;
}

}  // namespace treeattn::python
