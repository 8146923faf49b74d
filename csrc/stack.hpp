// Where a greenlet's C stack begins and ends.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace nnsight_pp {

// `at_bottom(function, *args)`: call it as the outermost frame of a new greenlet.
PyObject* at_bottom(PyObject* module, PyObject* const* args, Py_ssize_t count);

// Where this thread's C stack is now.
PyObject* stack_address(PyObject* module, PyObject*);

}  // namespace nnsight_pp
