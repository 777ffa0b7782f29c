// SPDX-License-Identifier: Apache-2.0
// Everything at once.
#pragma once

#include "treeattn/attention.h"
#include "treeattn/communicator.h"
#include "treeattn/cuda.h"
#include "treeattn/cuda_states.h"
#include "treeattn/dtype.h"
#include "treeattn/energy.h"
#include "treeattn/error.h"
#include "treeattn/kv_cache.h"
#include "treeattn/llama.h"
#include "treeattn/order.h"
#include "treeattn/parallel_attention.h"
#include "treeattn/state.h"
#include "treeattn/strategy.h"
#include "treeattn/thread_pool.h"
#include "treeattn/version.h"
#include "treeattn/views.h"
