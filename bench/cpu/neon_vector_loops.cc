// SPDX-License-Identifier: Apache-2.0
// aarch64. In assembly, so that what is counted is what runs: 24 chains, enough for four a cycle that take six cycles
// each. All registers hold different numbers: the power that an instruction takes depends on how many bits change from
// one to the next, and where equal numbers are multiplied over and over a processor that limits its power does not.
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/half.h"
#include "cpu/vector_loops.h"
#include "kernels/cpu/cpu_features.h"

namespace treeattn::bench {
namespace {

constexpr int kChains = 24;

// What the registers begin with: sums, four factors a, two factors b and the same with the other sign. Every other
// product takes back what the one before it added, so that sums neither overflow nor stop changing.
struct alignas(16) Registers {
  std::array<std::byte, 32 * 16> bytes{};

  Registers(DType sums, DType factors) {
    std::uint64_t state = 1;
    const auto fill = [&](std::size_t begin, std::size_t end, DType type) {
      for (std::size_t at = 16 * begin; at < 16 * end; at += dtype_size(type)) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const float value = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-30f;  // -2 to 2
        base::store_from_float(&bytes[at], type == DType::kInt8 ? 63 * value : value, type);
      }
    };
    fill(0, kChains, sums);
    fill(kChains, 30, factors);
    for (std::size_t at = 0; at < 32; at += dtype_size(factors)) {
      base::store_from_float(&bytes[16 * 30 + at], -base::load_as_float(&bytes[16 * 28 + at], factors), factors);
    }
  }
};

// line(chain, a, b): numbers of registers.
#define TREEATTN_EACH(line, b, c)                                                                                  \
  line(0, 24, b) line(1, 25, c) line(2, 26, b) line(3, 27, c) line(4, 25, b) line(5, 26, c) line(6, 27, b)         \
      line(7, 24, c) line(8, 26, b) line(9, 27, c) line(10, 24, b) line(11, 25, c) line(12, 27, b) line(13, 24, c) \
          line(14, 25, b) line(15, 26, c) line(16, 24, b) line(17, 25, c) line(18, 26, b) line(19, 27, c)          \
              line(20, 25, b) line(21, 26, c) line(22, 27, b) line(23, 24, c)
#define TREEATTN_LOAD                                                                                      \
  "ldp q0, q1, [%1]\nldp q2, q3, [%1, #32]\nldp q4, q5, [%1, #64]\nldp q6, q7, [%1, #96]\n"                \
  "ldp q8, q9, [%1, #128]\nldp q10, q11, [%1, #160]\nldp q12, q13, [%1, #192]\nldp q14, q15, [%1, #224]\n" \
  "ldp q16, q17, [%1, #256]\nldp q18, q19, [%1, #288]\nldp q20, q21, [%1, #320]\nldp q22, q23, [%1, #352]\n"
#define TREEATTN_LOAD_FACTORS \
  "ldp q24, q25, [%1, #384]\nldp q26, q27, [%1, #416]\nldp q28, q29, [%1, #448]\nldp q30, q31, [%1, #480]\n"
#define TREEATTN_REPEAT "subs %0, %0, #1\nb.ne 0b\n"
#define TREEATTN_CLOBBERS                                                                                             \
  "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",      \
      "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", \
      "v31"

// A loop whose body is the instruction once for each chain with factors a and b, and once with a and -b. The factors
// are loaded in every round, as kernels do; plain loads cost nothing.
#define TREEATTN_LOOP(name, extension, sums, factors, line)                                       \
  double name(long rounds) {                                                                      \
    const Registers registers(sums, factors);                                                     \
    long left = rounds;                                                                           \
    asm volatile(extension TREEATTN_LOAD "0:\n" TREEATTN_LOAD_FACTORS TREEATTN_EACH(line, 28, 29) \
                     TREEATTN_EACH(line, 30, 31) TREEATTN_REPEAT                                  \
                 : "+r"(left)                                                                     \
                 : "r"(&registers)                                                                \
                 : TREEATTN_CLOBBERS);                                                            \
    return 2.0 * kChains * static_cast<double>(rounds);                                           \
  }

#define TREEATTN_FMLA(i, a, b) "fmla v" #i ".4s, v" #a ".4s, v" #b ".4s\n"
TREEATTN_LOOP(fmla_f32, "", DType::kFloat32, DType::kFloat32, TREEATTN_FMLA)

// Without: the sums in registers 8 to 31, the factors in 0 and 1 for the whole burst. See docs/cpu_notes.md.
double fmla_kept(long rounds) {
  const Registers registers(DType::kFloat32, DType::kFloat32);
  long left = rounds;
#define TREEATTN_KEPT(i) "fmla v" #i ".4s, v0.4s, v1.4s\n"
#define TREEATTN_FROM_8(line)                                                                                        \
  line(8) line(9) line(10) line(11) line(12) line(13) line(14) line(15) line(16) line(17) line(18) line(19) line(20) \
      line(21) line(22) line(23) line(24) line(25) line(26) line(27) line(28) line(29) line(30) line(31)
  asm volatile(TREEATTN_LOAD TREEATTN_LOAD_FACTORS "0:\n" TREEATTN_FROM_8(TREEATTN_KEPT) TREEATTN_REPEAT
               : "+r"(left)
               : "r"(&registers)
               : TREEATTN_CLOBBERS);
  return static_cast<double>(kChains) * static_cast<double>(rounds);
}

#define TREEATTN_FMLA_F16(i, a, b) "fmla v" #i ".8h, v" #a ".8h, v" #b ".8h\n"
TREEATTN_LOOP(fmla_f16, ".arch armv8.2-a+fp16\n", DType::kFloat16, DType::kFloat16, TREEATTN_FMLA_F16)

#define TREEATTN_FMLAL(i, a, b) "fmlal v" #i ".4s, v" #a ".4h, v" #b ".4h\n"
TREEATTN_LOOP(fmlal, ".arch armv8.2-a+fp16fml\n", DType::kFloat32, DType::kFloat16, TREEATTN_FMLAL)

#define TREEATTN_FCVTL(i, a, b) "fcvtl v" #i ".4s, v" #a ".4h\n"
TREEATTN_LOOP(fcvtl, "", DType::kFloat32, DType::kFloat16, TREEATTN_FCVTL)

#define TREEATTN_BFDOT(i, a, b) "bfdot v" #i ".4s, v" #a ".8h, v" #b ".8h\n"
TREEATTN_LOOP(bfdot, ".arch armv8.2-a+bf16\n", DType::kFloat32, DType::kBFloat16, TREEATTN_BFDOT)

#define TREEATTN_BFMMLA(i, a, b) "bfmmla v" #i ".4s, v" #a ".8h, v" #b ".8h\n"
TREEATTN_LOOP(bfmmla, ".arch armv8.2-a+bf16\n", DType::kFloat32, DType::kBFloat16, TREEATTN_BFMMLA)

#define TREEATTN_SMMLA(i, a, b) "smmla v" #i ".4s, v" #a ".16b, v" #b ".16b\n"
TREEATTN_LOOP(smmla, ".arch armv8.2-a+i8mm\n", DType::kInt8, DType::kInt8, TREEATTN_SMMLA)

#define TREEATTN_ZIP(i, a, b) "zip1 v" #i ".8h, v" #a ".8h, v" #b ".8h\n"
TREEATTN_LOOP(zip, "", DType::kBFloat16, DType::kBFloat16, TREEATTN_ZIP)

// One cycle each on every core there is.
double chain_of_eors(long rounds) {
  long left = rounds, value = 1;
#define TREEATTN_EOR(i, a, b) "eor %1, %1, %2\n"
  asm volatile("0:\n" TREEATTN_EACH(TREEATTN_EOR, 0, 0) TREEATTN_EACH(TREEATTN_EOR, 0, 0) TREEATTN_REPEAT
               : "+r"(left), "+r"(value)
               : "r"(rounds)
               : "cc");
  return 2.0 * kChains * static_cast<double>(rounds);
}

}  // namespace

std::vector<VectorLoop> vector_loops() {
  const bool neon = kernels::has_neon(), extended = kernels::has_neon_bf16();
  return {
      {"FMLA", neon, fmla_f32},     {"FMLA, kept", neon, fmla_kept}, {"FMLA f16", kernels::has_neon_dot(), fmla_f16},
      {"FMLAL", extended, fmlal},   {"FCVTL", neon, fcvtl},          {"BFDOT", extended, bfdot},
      {"BFMMLA", extended, bfmmla}, {"SMMLA", extended, smmla},      {"ZIP", neon, zip}};
}

ClockBurst clock_burst() { return chain_of_eors; }

std::vector<KernelCount> kernel_counts() {
  if (!kernels::has_neon_bf16()) {
    // neon_dot_widen.cc. Not float16: its FCVTL keep one pipe busy while others multiply, which no sum of times tells.
    return {{DType::kFloat32, 1, {{"FMLA", 1}}, {{"FMLA", 1}}},
            {DType::kFloat32, 4, {{"FMLA", 4}}, {{"FMLA", 4}}},
            {DType::kBFloat16, 1, {{"ZIP", 2}, {"FMLA", 2}}, {{"ZIP", 2}, {"FMLA", 2}}},
            {DType::kBFloat16, 4, {{"ZIP", 2}, {"FMLA", 8}}, {{"ZIP", 2}, {"FMLA", 8}}}};
  }
  return {
      // dot-inl.h and accumulate-inl.h, as Highway makes them for NEON
      {DType::kFloat32, 1, {{"FMLA", 1}}, {{"FMLA", 1}}},
      {DType::kFloat32, 4, {{"FMLA", 4}}, {{"FMLA", 4}}},
      // neon_bf16.cc; weights in two limbs
      {DType::kBFloat16, 1, {{"BFDOT", 1}}, {{"ZIP", 2}, {"BFMMLA", 1}}},
      {DType::kBFloat16, 4, {{"ZIP", 1}, {"BFMMLA", 2}}, {{"ZIP", 2}, {"BFMMLA", 4}}},
      // neon_f16.cc; one row: the low limb of a weight by float16 multiply-adds, widened every eight tokens
      {DType::kFloat16, 1, {{"FMLAL", 2}}, {{"FMLAL", 2.25}, {"FMLA f16", 1}}},
      {DType::kFloat16, 4, {{"FMLAL", 8}}, {{"FCVTL", 2}, {"FMLA", 8}}},
      // neon_int8.cc; queries and weights in two limbs
      {DType::kInt8, 1, {{"ZIP", 1}, {"SMMLA", 1}}, {{"ZIP", 3}, {"SMMLA", 1}}},
      {DType::kInt8, 4, {{"ZIP", 1}, {"SMMLA", 4}}, {{"ZIP", 3}, {"SMMLA", 4}}},
  };
}

}  // namespace treeattn::bench
