// SPDX-License-Identifier: Apache-2.0
#include "use.h"

#include <map>
#include <thread>

#include "treeattn/error.h"

namespace treeattn::python {

namespace {

struct Holder {
  std::thread::id thread{};
  int calls = 0;
};

std::map<const void*, Holder>& holders() {
  static std::map<const void*, Holder> all;
  return all;
}

}  // namespace

Use::Use(std::initializer_list<const void*> objects) : objects_(objects) {
  const auto me = std::this_thread::get_id();
  for (const void* object : objects_) {
    const auto found = holders().find(object);
    if (found == holders().end() || found->second.thread == me) continue;
    throw Error("an object that another thread is using; accepted: calls after that one has returned");
  }
  for (const void* object : objects_) {
    Holder& holder = holders()[object];
    holder.thread = me;
    ++holder.calls;
  }
}

Use::~Use() {
  for (const void* object : objects_) {
    const auto found = holders().find(object);
    if (--found->second.calls == 0) holders().erase(found);
  }
}

}  // namespace treeattn::python
