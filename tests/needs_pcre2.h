// SPDX-License-Identifier: Apache-2.0
// Skips a test of a tokenizer in a build that has none.
#pragma once

#include <gtest/gtest.h>

#include "model/splitter.h"

#define NEEDS_PCRE2() \
  if (!treeattn::model::splitter_available()) GTEST_SKIP() << "this build has no PCRE2"
