// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include "model/splitter.h"

#define NEEDS_PCRE2() \
  if (!treeattn::model::splitter_available()) GTEST_SKIP() << "this build has no PCRE2"
