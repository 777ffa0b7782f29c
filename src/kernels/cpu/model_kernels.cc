// SPDX-License-Identifier: Apache-2.0
// Compiles the operations of a decoder layer once per instruction set Highway knows here. targets.cc lists them.
#include "kernels/cpu/model_kernels.h"

#include "kernels/cpu/disabled_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/model_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
#include "hwy/highway.h"
#include "kernels/cpu/linear-inl.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

extern const ModelKernels kModelKernels;
const ModelKernels kModelKernels = {
    {float_linear<float>(), float_linear<hwy::float16_t>(), float_linear<hwy::bfloat16_t>(), int8_linear()},
    {quantize<float>, quantize<hwy::float16_t>, quantize<hwy::bfloat16_t>},
    rms_norm,
    swiglu,
    rotate};

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();
