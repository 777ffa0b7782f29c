// SPDX-License-Identifier: Apache-2.0
// Communicators, the cache spread over them, and attention to it.
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"
#include "treeattn/kv_cache.h"
#include "treeattn/parallel_attention.h"
#include "treeattn/strategy.h"
#include "use.h"

namespace treeattn::python {
namespace {

using World = std::shared_ptr<Communicator>;

constexpr char kRunRanks[] =
    R"(run_ranks(ranks, body, deadline=30.0) -> list

Calls body(world) on a thread for each rank, and returns what each has returned. What the lowest rank raises is raised
here when all have ended. deadline: the seconds that a rank waits for another.)";

constexpr char kDecode[] =
    R"(decode(cache, layer, sequences, q, **options) -> out, lse

Attention of q [sequences, queries, heads, k_dim], the same on every rank, to all that the cache has of the sequences.
Every rank calls it, and gets all. Options: scale, causal, window, softcap, alibi_slopes, sinks, first_query.)";

constexpr char kPrefill[] =
    R"(prefill(cache, layer, sequence, first, count, q, **options) -> out, lse

Attention of tokens [first, first + count) of a sequence, whose k and v are in the cache. Every rank calls it with the
queries of those that it carries (KvCache.carried), and gets these. Options: those of decode without first_query.)";

RankOptions rank_options(double deadline) { return {.deadline = Seconds(deadline)}; }

// Ranks that are processes and may use the same cores get each its own.
World with_own_cores(World world) {
  take_own_cores(*world);
  return world;
}

// LostRanks that went through Python is LostRanks again, which run_ranks() tells from others; and the object itself.
struct LostInPython : LostRanks {
  explicit LostInPython(std::exception_ptr object) : LostRanks("in Python", {}, {}), raised(std::move(object)) {}
  std::exception_ptr raised;
};

// Calls the body of a rank.
nb::object result_of(const nb::callable& body, World world) {
  try {
    return body(std::move(world));
  } catch (const nb::python_error& error) {
    if (!error.matches(nb::module_::import_("treeattn._core").attr("LostRanks"))) throw;
    throw LostInPython(std::current_exception());
  }
}

thread_local const bool* rank_interrupted = nullptr;  // of a rank that is a thread; guarded by Python's lock

// Python's name of the calling thread among those of the ranks, and where it looks for Ctrl-C, while its body runs.
class RunningRank {
 public:
  RunningRank(std::set<unsigned long>& running, const bool& interrupted) : running_(running) {
    const unsigned long thread = PyThread_get_thread_ident();
    running_.insert(thread);
    rank_interrupted = &interrupted;
    if (interrupted) PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);  // before it began
  }
  ~RunningRank() {
    running_.erase(PyThread_get_thread_ident());
    rank_interrupted = nullptr;
  }
  RunningRank(const RunningRank&) = delete;
  RunningRank& operator=(const RunningRank&) = delete;

 private:
  std::set<unsigned long>& running_;
};

// What body returned on each rank. Ctrl-C is raised in the bodies, wherever they are in Python, and then here.
nb::list run_in_threads(int ranks, nb::callable body, double deadline) {
  constexpr std::chrono::milliseconds kLookForSignals{100};
  // Whoever holds Python's lock may change these.
  std::map<int, nb::object> results;  // by rank
  std::set<unsigned long> running;
  bool interrupted = false;
  {
    const nb::gil_scoped_release ranks_take_it;
    std::future<void> all = std::async(std::launch::async, [&] {
      run_ranks(
          ranks,
          [&](World world) {
            const int rank = world->rank();
            const nb::gil_scoped_acquire hold;
            const RunningRank listed(running, interrupted);
            nb::object result = result_of(body, std::move(world));
            results[rank] = std::move(result);
          },
          rank_options(deadline));
    });
    std::exception_ptr raised;
    while (all.wait_for(kLookForSignals) != std::future_status::ready) {
      if (raised) continue;
      const nb::gil_scoped_acquire hold;
      try {
        raise_signals();
      } catch (const nb::python_error&) {
        raised = std::current_exception();
        interrupted = true;
        for (const unsigned long thread : running) PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
      }
    }
    if (raised) std::rethrow_exception(raised);  // what the ranks have thrown comes of it
    try {
      all.get();
    } catch (const LostInPython& lost) {
      std::rethrow_exception(lost.raised);
    }
  }
  nb::list all;
  for (auto& [rank, result] : results) all.append(std::move(result));
  return all;
}

// Rows of one sequence, on the host or on the cache's GPU.
struct Rows {
  Rows(const nb::object& keys, const nb::object& values, const nb::kwargs& scales)
      : call(Call::of(scales, Call::kScales)), k_array(array_of("k", keys)), v_array(array_of("v", values)) {
    k = kv_view("k", k_array, call.k_scales);
    v = kv_view("v", v_array, call.v_scales);
    on_gpu = gpu_of(call, {&k_array, &v_array}) >= 0;
    stream = stream_of(keys);
  }

  Call call;
  Array k_array, v_array;
  KvView k, v;
  bool on_gpu;
  void* stream;
};

void append(KvCache& cache, SequenceId sequence, const nb::object& k, const nb::object& v, const nb::kwargs& scales) {
  const Rows rows(k, v, scales);
  const Use use({&cache});
  const nb::gil_scoped_release others_go_on;
  if (!rows.on_gpu) return cache.append(sequence, rows.k, rows.v);
  cache.append_from_device(sequence, rows.k, rows.v, rows.stream);
}

void write(KvCache& cache, SequenceId sequence, int layer, std::int64_t first, const nb::object& k, const nb::object& v,
           const nb::kwargs& scales) {
  const Rows rows(k, v, scales);
  const Use use({&cache});
  const nb::gil_scoped_release others_go_on;
  if (!rows.on_gpu) return cache.write(sequence, layer, first, rows.k, rows.v);
  cache.write_from_device(sequence, layer, first, rows.k, rows.v, rows.stream);
}

// Queries in the host's memory, and arrays for what comes of them.
struct Queries {
  Queries(const nb::object& query, const KvCache& cache, const nb::kwargs& given, unsigned parts)
      : call(Call::of(given, parts)), array(array_of("q", query)) {
    if (const int gpu = gpu_of(call, {&array}); gpu >= 0) {
      refuse("q", "on GPU " + std::to_string(gpu), "an array in the host's memory");
    }
    q = query_view(array);
    out = empty_like(query, {q.batch, q.queries, q.heads, cache.config().v_dim});
    lse = empty_like(query, {q.batch, q.queries, q.heads});
    outs = nb::cast<HostFloats>(out);
    lses = nb::cast<HostFloats>(lse);
  }

  Call call;
  Array array;
  QueryView q;
  nb::object out, lse;
  HostFloats outs, lses;
};

nb::object decode(ParallelAttention& attention, const KvCache& cache, int layer,
                  const std::vector<SequenceId>& sequences, const nb::object& q, const nb::kwargs& options) {
  Queries queries(q, cache, options, Call::kOptions | Call::kFirstQuery);
  {
    const Use use({&attention, &cache});
    const nb::gil_scoped_release others_go_on;
    attention.decode(cache, layer, sequences, queries.q, queries.call.options(), span_of(queries.outs),
                     span_of(queries.lses), default_pool(), Result::kReplicated, queries.call.first_query);
  }
  return nb::make_tuple(queries.out, queries.lse);
}

nb::object prefill(ParallelAttention& attention, const KvCache& cache, int layer, SequenceId sequence,
                   std::int64_t first, std::int64_t count, const nb::object& q, const nb::kwargs& options) {
  Queries queries(q, cache, options, Call::kOptions);
  {
    const Use use({&attention, &cache});
    const nb::gil_scoped_release others_go_on;
    attention.prefill(cache, layer, sequence, first, count, queries.q, queries.call.options(), span_of(queries.outs),
                      span_of(queries.lses), default_pool());
  }
  return nb::make_tuple(queries.out, queries.lse);
}

std::vector<std::pair<std::int64_t, std::int64_t>> ranges_of(const std::vector<TokenRange>& tokens) {
  std::vector<std::pair<std::int64_t, std::int64_t>> out;
  for (const TokenRange& range : tokens) out.emplace_back(range.first, range.count);
  return out;
}

}  // namespace

void raise_signals() {
  if (rank_interrupted && *rank_interrupted) {
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), nullptr);  // else it is raised once more
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw nb::python_error();
  }
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void add_ranks(nb::module_& module) {
  using Free = nb::call_guard<nb::gil_scoped_release>;  // for what may wait for other ranks
  nb::class_<Communicator>(module, "Communicator")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("nodes", &Communicator::nodes)
      .def_prop_ro("transport", [](const Communicator& world) { return std::string(world.transport()); })
      .def_prop_ro("lost", &Communicator::lost)
      .def(
          "barrier", [](Communicator& world) { world.barrier(); }, Free())
      .def("shrink", &Communicator::shrink, Free());
  module.def("self_communicator", &self_communicator);
  module.def(
      "mpi_communicator",
      [](std::optional<int> fortran_handle, double deadline) {
        return with_own_cores(fortran_handle ? mpi_communicator(*fortran_handle, rank_options(deadline))
                                             : mpi_communicator(rank_options(deadline)));
      },
      nb::arg("fortran_handle") = nb::none(), nb::arg("deadline") = kDefaultDeadline.count(), Free());
  module.def(
      "tcp_communicator", [](double deadline) { return with_own_cores(tcp_communicator(rank_options(deadline))); },
      nb::arg("deadline") = kDefaultDeadline.count(), Free());
  module.def("run_ranks", &run_in_threads, nb::arg("ranks"), nb::arg("body"),
             nb::arg("deadline") = kDefaultDeadline.count(), kRunRanks);

  nb::class_<KvCache>(module, "KvCache")
      .def(
          "__init__",
          [](KvCache* place, World world, std::int64_t kv_heads, std::int64_t k_dim, std::int64_t v_dim, int layers,
             const std::string& k_type, const std::string& v_type, std::int64_t chunk_tokens, int branches,
             const std::vector<double>& weights, int gpu) {
            new (place) KvCache(std::move(world),
                                {.layers = layers,
                                 .kv_heads = kv_heads,
                                 .k_dim = k_dim,
                                 .v_dim = v_dim,
                                 .k_type = parse_dtype(k_type),
                                 .v_type = parse_dtype(v_type),
                                 .order = {.chunk_tokens = chunk_tokens, .branches = branches}},
                                weights, gpu);
          },
          nb::arg("world"), nb::kw_only(), nb::arg("kv_heads"), nb::arg("k_dim"), nb::arg("v_dim"),
          nb::arg("layers") = 1, nb::arg("k_type") = "bfloat16", nb::arg("v_type") = "bfloat16",
          nb::arg("chunk_tokens") = ReductionOrder{}.chunk_tokens, nb::arg("branches") = ReductionOrder{}.branches,
          nb::arg("weights") = std::vector<double>(), nb::arg("gpu") = KvCache::kHost)
      .def_prop_ro("gpu", &KvCache::gpu)
      .def("add_sequence", held(&KvCache::add_sequence))
      .def("fork", held(&KvCache::fork), nb::arg("sequence"))
      .def("truncate", held(&KvCache::truncate), nb::arg("sequence"), nb::arg("length"))
      .def("drop", held(&KvCache::drop), nb::arg("sequence"))
      .def("length", held(&KvCache::length), nb::arg("sequence"))
      .def("sequences", held(&KvCache::sequences))
      .def("extend", held(&KvCache::extend), nb::arg("sequence"), nb::arg("tokens"))
      .def("append", &append, nb::arg("sequence"), nb::arg("k"), nb::arg("v"), nb::arg("scales"))
      .def("write", &write, nb::arg("sequence"), nb::arg("layer"), nb::arg("first"), nb::arg("k"), nb::arg("v"),
           nb::arg("scales"))
      .def(
          "carried",
          [](const KvCache& cache, SequenceId sequence, std::int64_t first, std::int64_t count) {
            const Use use({&cache});
            return ranges_of(cache.carried(sequence, first, count));
          },
          nb::arg("sequence"), nb::arg("first"), nb::arg("count"))
      .def_prop_ro("allocated_bytes", held(&KvCache::allocated_bytes))
      .def(
          "rebalance",
          [](KvCache& cache, const std::vector<double>& weights) {
            const Use use({&cache});
            const nb::gil_scoped_release others_go_on;
            cache.rebalance(weights);
          },
          nb::arg("weights"))
      .def(
          "save",
          [](const KvCache& cache, const std::filesystem::path& directory) {
            const Use use({&cache});
            const nb::gil_scoped_release others_go_on;
            cache.save(directory);
          },
          nb::arg("directory"))
      .def_static(
          "load",
          [](World world, const std::filesystem::path& directory, int gpu) {
            return KvCache::load(std::move(world), directory, {}, gpu);
          },
          nb::arg("world"), nb::arg("directory"), nb::arg("gpu") = KvCache::kHost, Free());

  nb::class_<ParallelAttention>(module, "ParallelAttention")
      .def(
          "__init__",
          [](ParallelAttention* place, World world, const std::string& strategy, bool canonical) {
            new (place)
                ParallelAttention(std::move(world), {.strategy = parse_strategy(strategy), .canonical = canonical});
          },
          nb::arg("world"), nb::arg("strategy") = "auto", nb::arg("canonical") = true)
      .def("decode", &decode, nb::arg("cache"), nb::arg("layer"), nb::arg("sequences"), nb::arg("q"),
           nb::arg("options"), kDecode)
      .def("prefill", &prefill, nb::arg("cache"), nb::arg("layer"), nb::arg("sequence"), nb::arg("first"),
           nb::arg("count"), nb::arg("q"), nb::arg("options"), kPrefill)
      .def_prop_ro("bytes_sent",
                   [](const ParallelAttention& attention) {
                     const Use use({&attention});
                     return attention.report().traffic.bytes;
                   })
      .def_prop_ro("strategy",
                   [](const ParallelAttention& attention) {
                     const Use use({&attention});
                     return std::string(strategy_name(attention.report().strategy));
                   })
      .def("why", held(&ParallelAttention::why));
}

}  // namespace treeattn::python
