// What the compiled ask (near_ask.cpp) and the compiled visit (near_visit.cpp) know in common.
//
// In a process that computes everything and counts visits there is no gate, no other stage, no
// number that another rank must agree with: most rules of interleave/asks.py and
// interleave/interleaver.py say nothing there. What is left of an ask and of
// a visit is done here: a block's `layer.output` goes from the attribute to the switch, and the
// value from the serve point to the block, without Python. Whatever is out of the ordinary (a late
// ask, the result, a skip, a lens, another rank, an error) is handed to those two files, which say
// what must be done and would also do what is done here, in more steps.
// tests/unit/interleave/test_nearby.py runs the same blocks on both ways.

#pragma once

#include "slots.hpp"

#include <greenlet.h>

namespace nnsight_pp {

// The classes that an ask and a visit are made of, by their slots.
enum WorkerSlot {
  kAsk, kAsked, kClosedEarly, kCut, kError, kGreenlet, kHasEnded, kIsCalling, kIsRelaxed, kLoopDepth,
  kMemo, kNear, kRandomness, kSeat, kSlot, kStep, kTimeline, kTurns, kVisit, kWorkerSlots
};
inline Slots<kWorkerSlots> workers{{"ask", "asked", "closed_early", "cut", "error", "greenlet",
                             "has_ended", "is_calling", "is_relaxed", "loop_depth", "memo", "near",
                             "randomness", "seat", "slot", "step", "timeline", "turns", "visit"}};
enum AskSlot { kNumber, kLocation, kTarget, kSeen, kReadSlots };
inline Slots<kReadSlots> reads{{"number", "location", "visit", "seen"}};
enum VisitSlot {
  kVisitCut, kIsAssigned, kIsGiven, kMarks, kRaw, kServed, kViews, kWatched, kHanded, kVisitSlots
};
inline Slots<kVisitSlots> visits{{"_cut", "_is_assigned", "_is_given", "_marks", "_raw", "_served",
                           "_views", "_watched", "handed"}};
enum HandedSlot { kIsOver, kValue, kShared, kHandedSlots };
inline Slots<kHandedSlots> handed_values{{"is_over", "value", "visits"}};
inline Slots<1> shells{{"worker"}};
enum BatchCutSlot { kRows, kSpan, kBatchCutSlots };
inline Slots<kBatchCutSlots> batch_cuts{{"rows", "span"}};

// Classes known by their identity, and what Python does in the rarer cases.
inline PyTypeObject *memo_type, *whole_cut, *replacement, *tensor_type;
// The first size of a tensor, 0 where it has none: `Tensor.__len__` is written in Python, what it
// overrides is not.
inline lenfunc length_of_tensor;
inline PyObject* after_turn;

inline bool is_type(PyObject* object, PyTypeObject* type) {
  return object != nullptr && Py_TYPE(object) == type;
}

inline PyObject* interned(const char* text) {
  PyObject* name = PyUnicode_InternFromString(text);
  if (name == nullptr) Py_FatalError("out of memory");
  return name;
}
#define NAME(text) ([] { static PyObject* const name = interned(text); return name; }())

// What a `Near` is in Python: who waits where, and how many visits of each location are over.
struct Near {
  PyObject *counts, *waiting, *park;
  // `state` is a tuple made by `interleave.nearby`; its parts are borrowed.
  explicit Near(PyObject* state)
      : counts(PyTuple_GET_ITEM(state, 0)),
        waiting(PyTuple_GET_ITEM(state, 1)),
        park(PyTuple_GET_ITEM(state, 2)) {}

  // How many visits of `location` are over; -1 with an error set.
  long passed(PyObject* location) const {
    PyObject* count = PyDict_GetItemWithError(counts, location);
    if (count == nullptr) return PyErr_Occurred() ? -1 : 0;
    return PyLong_AsLong(count);
  }
};

inline bool is_current(PyObject* greenlet) {
  Kept current(reinterpret_cast<PyObject*>(PyGreenlet_GetCurrent()));
  return current.get() == greenlet;
}

// Whether this thread has a trace function. Coverage's notes at calls and returns alone which greenlet
// runs, so with one Python functions must return behind a switch on both sides: none do on the short
// way, and the lines that come next would be counted for another file.
inline bool is_traced() { return PyThreadState_Get()->c_tracefunc != nullptr; }

template <class Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// ---------------------------------------------------------------------------------------------
// What is called from other files

// Add one to what `counts`, a dictionary or null, has for `location`.
bool count_visit(PyObject* counts, PyObject* location);

// Do what `OpenVisit.commit` does, in the usual cases; whether it is done.
bool is_committed(PyObject* visit);

PyObject* near_classes(PyObject* module, PyObject* args);
PyObject* near_read(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* near_setter(PyObject* module, PyObject* args);
PyObject* near_getter(PyObject* module, PyObject* args);
PyObject* near_serve(PyObject* module, PyObject* args);

}  // namespace nnsight_pp
