// The one way from thread_state.cpp, which makes the module, to serve_point.cpp.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>

namespace nnsight_pp {

// `point_call(ServePoint, Gate)`: return a `__call__` for the class `ServePoint`.
PyObject* make_point_call(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace nnsight_pp
