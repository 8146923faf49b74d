#include "stack.hpp"

namespace nnsight_pp {

// CAUTION: the frame below this one is the last that an unwinder may look at. A greenlet's stack
// begins in the middle of its driver's, and what lay there when it began is overwritten once the
// driver goes on; torch fetches a backtrace for every error, and would read it (a segmentation
// fault, now and then). The outermost frame is the one whose return address is undefined.
__attribute__((noinline)) PyObject* at_bottom(PyObject*, PyObject* const* args,
                                              Py_ssize_t count) {
#if defined(__x86_64__)
  asm volatile(".cfi_undefined rip" ::: "memory");
#elif defined(__aarch64__)
  asm volatile(".cfi_undefined x30" ::: "memory");
#endif
  if (count < 1) {
    PyErr_SetString(PyExc_TypeError, "at_bottom needs something to call");
    return nullptr;
  }
  PyObject* result =
      PyObject_Vectorcall(args[0], args + 1, static_cast<std::size_t>(count - 1), nullptr);
  asm volatile("" ::: "memory");  // a jump in place of the call would leave no frame
  return result;
}

PyObject* stack_address(PyObject*, PyObject*) {
  return PyLong_FromVoidPtr(__builtin_frame_address(0));
}

}  // namespace nnsight_pp
