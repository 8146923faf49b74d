// Published tensors, asked for and answered without the interpreter: see lane.hpp.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace nnsight_pp {

// Add `PlainTensors` to the module, where this torch has c10d; false with an error set.
bool add_lane(PyObject* module);

}  // namespace nnsight_pp
