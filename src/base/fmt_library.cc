// SPDX-License-Identifier: Apache-2.0
// The functions of fmt, compiled once for everybody. In its header-only mode every file that formats a message compiles
// them again, which took longer than the rest of the file. Weak, so that a program which links a libfmt of its own has
// no function twice. For fmt 9; of other versions cmake/treeattn_target.cmake takes the header-only mode.
#ifndef FMT_HEADER_ONLY
#define FMT_API __attribute__((weak))
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
namespace detail {

template FMT_API auto dragonbox::to_decimal(float) noexcept -> dragonbox::decimal_fp<float>;
template FMT_API auto dragonbox::to_decimal(double) noexcept -> dragonbox::decimal_fp<double>;
template FMT_API auto thousands_sep_impl(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto thousands_sep_impl(locale_ref) -> thousands_sep_result<wchar_t>;
template FMT_API auto decimal_point_impl(locale_ref) -> char;
template FMT_API auto decimal_point_impl(locale_ref) -> wchar_t;

}  // namespace detail
FMT_END_NAMESPACE
#endif
