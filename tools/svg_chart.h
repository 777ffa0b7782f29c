// SPDX-License-Identifier: Apache-2.0
// Line charts as SVG. Colours are CSS variables, so one drawing serves light pages, dark ones and paper.
//
// Every drawing says what is in it: data-figure (its id), data-series and data-points (how many lines and marks there
// must be). Lines have the class ta-line, marks ta-mark.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "outcome.h"

namespace treeattn::tools {

std::string escape_xml(std::string_view text);

// One drawing, as wide as all are: what is in it, and the counts of lines and marks that there must be.
inline constexpr double kDrawingWidth = 640;
std::string svg_drawing(std::string_view id, std::string_view title, double height, std::size_t lines,
                        std::size_t marks, std::string_view body);

// The colours and strokes of all drawings: for a page that holds some.
std::string_view chart_style();

// <svg>...</svg> for a page. Values that a logarithmic axis cannot show, and those that are not finite, are left out.
std::string draw_chart(const Figure& figure);

// The same drawing as a file of its own: with the style inside.
std::string standalone_svg(std::string_view drawing);

// 5120000 -> "5.12M", 0.001 -> "0.001": for labels.
std::string short_number(double value);

}  // namespace treeattn::tools
