// SPDX-License-Identifier: Apache-2.0
// Attention calls that follow one another, as decoding makes them: tables, split and workspace are kept on the GPU, and
// only what has changed is sent.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/pinned_buffer.h"
#include "kernels/cuda/plan_parts.h"

namespace treeattn::kernels::cuda {

// One stream, one GPU, which must be the current one in every call.
class NodePlan {
 public:
  NodePlan(int multiprocessors, cudaStream_t stream);
  ~NodePlan();
  NodePlan(const NodePlan&) = delete;
  NodePlan& operator=(const NodePlan&) = delete;

  // States [problem.nodes, rows, v_dim + 2] of K and V on the GPU and q in the host's memory, put on the stream. Valid
  // until the next call.
  float* run(Problem problem);
  // The same into memory of the caller's. q_on_gpu: q is there, too, and the host need not wait before the next call.
  void run_into(Problem problem, float* states, bool q_on_gpu);
  // The finished result of the whole tree, with q on the GPU too and out [batch, queries, heads, v_dim] there. Several
  // sequences whose states on their way would take more than 1 GiB are cut into calls of half as many.
  void run(Problem problem, float* out);

  // The same for calls that are alike but for K and V, the layers of a step, on a stream of the caller's: tables first,
  // then a copy of them, then the layers. What is put on the stream may be recorded and repeated as long as
  // prepare_step returns the same. The stream must have done its work when the next step is prepared, and must wait
  // for this one's before it begins.
  std::vector<std::int64_t> prepare_step(Problem problem);
  void send_step(cudaStream_t stream);
  // The result of the whole tree into out, and rounded to bfloat16 into rounded_out unless that is null; or states of
  // the nodes, as run() makes them.
  void step(const KvView& k, const KvView& v, float* out, std::uint16_t* rounded_out, bool early, cudaStream_t stream);
  void step_into(const KvView& k, const KvView& v, float* states, bool early, cudaStream_t stream);
  const AttentionParams& step_params() const { return step_params_; }
  // Memory for q of a step; valid until more is asked for.
  void* step_queries(std::size_t bytes);

  // The one that ran last.
  const char* kernel() const { return kernel_; }

 private:
  // A buffer of the host and its copy on the GPU, filled part by part.
  struct Tables {
    PinnedBuffer host;
    DeviceBuffer device;
    std::size_t used = 0;
  };
  // What the split depends on; equal keys, equal split.
  using SplitKey = std::vector<std::int64_t>;
  static SplitKey split_key(const Problem& problem);

  void begin(Tables& tables, std::size_t bytes);
  template <class T>
  T* put(Tables& tables, const T* from, std::size_t count);
  void send(const Tables& tables, bool record = true);
  AttentionParams step_params(const KvView& k, const KvView& v) const;
  AttentionParams put_step(Problem& problem, bool q_on_gpu);
  static constexpr std::size_t kAny = ~std::size_t{0};
  Launch prepare(const Problem& problem, AttentionParams& params, std::size_t most = kAny);
  bool update_split(const Problem& problem, const Launch& launch, std::size_t most);
  const std::byte* put_queries(const QueryView& q);
  void grow(DeviceBuffer& buffer, std::size_t bytes, bool zero);

  int multiprocessors_;
  cudaStream_t stream_;
  cudaEvent_t sent_ = nullptr;  // the last copy out of the host's buffers
  bool recorded_ = true;        // if not, all that is on the stream has to be waited for: one call of the driver less
  Tables step_;                 // what changes from call to call
  Tables split_;                // what does not, mostly
  SplitKey key_;
  Work work_;
  const char* kernel_ = "";
  const WorkItem* items_ = nullptr;
  DeviceBuffer workspace_, arrived_, states_, step_queries_;
  SplitKey step_key_;
  AttentionParams step_params_;
  Launch step_launch_;
  std::int64_t growth_ = 0;  // of any memory: what was recorded holds its address
};

}  // namespace treeattn::kernels::cuda
