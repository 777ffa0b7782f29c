// SPDX-License-Identifier: Apache-2.0
// Objects of the library that are one thread's at a time, in Python, whose threads go on while a call works.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <utility>
#include <vector>

namespace treeattn::python {

namespace nb = nanobind;

// Held by a call while it uses them: with another thread in one of them it throws Error. The same thread may come back,
// as callbacks do. Made and ended with Python's lock held, which also guards what is noted here.
class Use {
 public:
  explicit Use(std::initializer_list<const void*> objects);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  std::vector<const void*> objects_;
};

// A method as a function that holds its object.
template <class T, class R, class... Args>
auto held(R (T::*method)(Args...)) {
  return [method](T& self, Args... args) -> R {
    const Use use({&self});
    return (self.*method)(std::forward<Args>(args)...);
  };
}
template <class T, class R, class... Args>
auto held(R (T::*method)(Args...) const) {
  return [method](const T& self, Args... args) -> R {
    const Use use({&self});
    return (self.*method)(std::forward<Args>(args)...);
  };
}

// For long calls, with Python's lock held: throws what Ctrl-C, or the handler of another signal, has raised. Python
// tells only its main thread; run_ranks() passes it on to ranks that are threads.
void raise_signals();

}  // namespace treeattn::python
