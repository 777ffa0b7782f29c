// SPDX-License-Identifier: Apache-2.0
#include <cublasLt.h>
#include <fmt/format.h>

#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/model/matrix_product.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {
namespace {

constexpr std::int64_t kNominalRows = 2048;

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Unavailable(fmt::format("{}: cuBLASLt error {}", what, static_cast<int>(status)));
}

// One of cuBLASLt's descriptions, destroyed with its owner.
template <class Handle, cublasStatus_t (*kDestroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (handle != nullptr) kDestroy(handle);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Handle handle = nullptr;
};
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// To cuBLASLt a matrix is column by column: y^T [outputs, rows] = w x^T, where w is stored transposed.
struct Call {
  Call(std::int64_t rows, std::int64_t outputs, std::int64_t inputs) {
    const auto k = static_cast<std::uint64_t>(inputs), m = static_cast<std::uint64_t>(outputs),
               n = static_cast<std::uint64_t>(rows);
    check(cublasLtMatmulDescCreate(&product.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(cublasLtMatmulDescSetAttribute(product.handle, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
          "product");
    check(cublasLtMatrixLayoutCreate(&w.handle, CUDA_R_16BF, k, m, inputs), "layout");
    check(cublasLtMatrixLayoutCreate(&x.handle, CUDA_R_16BF, k, n, inputs), "layout");
    check(cublasLtMatrixLayoutCreate(&y.handle, CUDA_R_32F, m, n, outputs), "layout");
  }
  Description product;
  Layout w, x, y;
};

// Whether every sum is computed by one block of threads.
bool in_one_piece(const cublasLtMatmulAlgo_t& algorithm) {
  std::int32_t pieces = 1;
  std::uint32_t scheme = 0;
  std::size_t written = 0;
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &pieces, sizeof pieces, &written);
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme,
                                       &written);
  return pieces <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

cublasLtMatmulAlgo_t choose(cublasLtHandle_t handle, std::int64_t outputs, std::int64_t inputs) {
  const Call call(kNominalRows, outputs, inputs);
  Preference preference;
  check(cublasLtMatmulPreferenceCreate(&preference.handle), "preference");
  const std::size_t workspace = 0;
  check(cublasLtMatmulPreferenceSetAttribute(preference.handle, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                             sizeof workspace),
        "preference");
  constexpr int kMost = 16;
  cublasLtMatmulHeuristicResult_t found[kMost] = {};
  int count = 0;
  check(cublasLtMatmulAlgoGetHeuristic(handle, call.product.handle, call.w.handle, call.x.handle, call.y.handle,
                                       call.y.handle, preference.handle, kMost, found, &count),
        "choice of an algorithm");
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS && in_one_piece(found[i].algo)) return found[i].algo;
  }
  throw Unavailable(fmt::format("cuBLASLt has no algorithm for a matrix of [{}, {}]", outputs, inputs));
}

}  // namespace

struct MatrixProduct::Impl {
  // By GPU, outputs and inputs: ranks that are threads must take the same.
  using Key = std::tuple<int, std::int64_t, std::int64_t>;

  const cublasLtMatmulAlgo_t& algorithm(std::int64_t outputs, std::int64_t inputs) {
    static std::mutex mutex;
    static std::map<Key, cublasLtMatmulAlgo_t> chosen;
    const std::lock_guard lock(mutex);
    const Key key{gpu, outputs, inputs};
    auto at = chosen.find(key);
    if (at == chosen.end()) at = chosen.emplace(key, choose(handle, outputs, inputs)).first;
    return at->second;
  }

  int gpu = 0;
  cublasLtHandle_t handle = nullptr;
};

MatrixProduct::MatrixProduct(int gpu) : impl_(std::make_unique<Impl>()) {
  impl_->gpu = gpu;
  const UseDevice use(gpu);
  check(cublasLtCreate(&impl_->handle), "cuBLASLt");
}

MatrixProduct::~MatrixProduct() { cublasLtDestroy(impl_->handle); }

void MatrixProduct::multiply(const std::uint16_t* w, const std::uint16_t* x, std::int64_t rows, std::int64_t outputs,
                             std::int64_t inputs, float* y, bool add, cudaStream_t stream) {
  if (rows == 0) return;
  const cublasLtMatmulAlgo_t& algorithm = impl_->algorithm(outputs, inputs);
  const Call call(rows, outputs, inputs);
  const float one = 1.0f, beta = add ? 1.0f : 0.0f;
  check(cublasLtMatmul(impl_->handle, call.product.handle, &one, w, call.w.handle, x, call.x.handle, &beta, y,
                       call.y.handle, y, call.y.handle, &algorithm, nullptr, 0, stream),
        "product of matrices");
}

}  // namespace treeattn::kernels::cuda
