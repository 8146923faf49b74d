// A visit of a location, in the model's thread that comes to it: see near.hpp.

#include "near.hpp"

#include <vector>

namespace nnsight_pp {
namespace {

// What `make_serve` was given, in its order; all borrowed.
struct Run {
  PyObject *state, *turns, *driver, *foreign, *abandoned, *switch_to, *released, *observers, *held;
  explicit Run(PyObject* self) {
    PyObject** const parts[] = {&state,     &turns,    &driver,    &foreign, &abandoned,
                                &switch_to, &released, &observers, &held};
    Py_ssize_t at = 0;
    for (PyObject** part : parts) *part = PyTuple_GET_ITEM(self, at++);
  }
};
constexpr Py_ssize_t kRunParts = 9;

enum class Stand { kNow, kLater, kOther, kError };

// How `worker`, which is parked where visit `number` is going on, takes part in it.
Stand stand_of(PyObject* worker, long number) {
  if (!workers.is_of(worker)) return Stand::kOther;
  PyObject* ask = workers.at(worker, kAsk);
  if (!reads.is_of(ask) || reads.at(ask, kSeen) != nullptr ||
      workers.at(worker, kCut) == nullptr || workers.at(worker, kRandomness) != nullptr ||
      workers.at(worker, kTimeline) != nullptr) {
    return Stand::kOther;
  }
  const long target = PyLong_AsLong(reads.at(ask, kTarget));
  if (target == -1 && PyErr_Occurred()) return Stand::kError;
  return target == number ? Stand::kNow : Stand::kLater;
}

// As `BatchCut.give`: this request's rows of `value`.
Kept rows_of(PyObject* cut, PyObject* value) {
  PyObject* rows = batch_cuts.at(cut, kRows);
  PyObject* span = batch_cuts.at(cut, kSpan);
  if (is_type(value, tensor_type) && span != nullptr && rows != nullptr && PyTuple_Check(rows)) {
    Kept is_in_graph(PyObject_GetAttr(value, NAME("requires_grad")));
    if (!is_in_graph) return Kept();
    const Py_ssize_t total = PyLong_AsSsize_t(PyTuple_GET_ITEM(rows, 2));
    // Of a view in a graph the cut remembers the base.
    if (is_in_graph.get() == Py_False && total > 0) {
      const Py_ssize_t length = length_of_tensor(value);
      if (length < 0) return Kept();
      return length == total ? Kept(PyObject_GetItem(value, span)) : Kept::borrowed(value);
    }
  }
  return Kept(PyObject_CallMethodOneArg(cut, NAME("give"), value));
}

// Open a visit of `handed` for `worker`; null, perhaps with an error set, where its cut refuses.
// `share` becomes what the worker is given.
Kept opened(PyObject* worker, PyObject* handed, Kept& share) {
  PyObject* cut = workers.at(worker, kCut);
  PyObject* value = handed_values.at(handed, kValue);
  if (value == nullptr) value = Py_None;
  Kept marks = Kept::borrowed(Py_None);
  if (is_type(cut, whole_cut)) {
    share = Kept::borrowed(value);
  } else {
    const bool is_batch = batch_cuts.is_of(cut);
    share = is_batch ? rows_of(cut, value)
                     : Kept(PyObject_CallMethodOneArg(cut, NAME("give"), value));
    if (!share) return Kept();
    if (is_batch && is_type(share.get(), tensor_type)) {
      marks = Kept(PyList_New(1));
      if (marks) PyList_SET_ITEM(marks.get(), 0, Py_NewRef(share.get()));
    } else {
      marks = Kept(PyObject_CallMethodOneArg(cut, NAME("marks"), share.get()));
    }
    if (!marks) return Kept();
  }
  return Kept(visits.make({cut, Py_False, Py_True, marks.get(), Py_None, share.get(), Py_None,
                           Py_None, handed}));
}

// As `Parked.remove`.
bool unpark(PyObject* waiting, PyObject* location, PyObject* worker) {
  PyObject* list = PyDict_GetItemWithError(waiting, location);
  if (list == nullptr) return !PyErr_Occurred();
  if (PyList_GET_SIZE(list) == 1) return PyDict_DelItem(waiting, location) == 0;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); ++at) {
    if (PyList_GET_ITEM(list, at) == worker) return PyList_SetSlice(list, at, at + 1, nullptr) == 0;
  }
  return true;
}

// As `commit_last` in `interleave.kept_open`, which does what is left over here.
void commit_last(PyObject* worker) {
  Kept visit = Kept::borrowed(workers.at(worker, kVisit));
  if (!visits.is_of(visit.get()) || workers.at(worker, kError) != nullptr ||
      workers.at(worker, kTimeline) != nullptr) {
    return;
  }
  PyObject* handed = visits.at(visit.get(), kHanded);
  const bool is_over = handed_values.is_true(handed, kIsOver);
  if (is_over || is_committed(visit.get())) workers.set(worker, kVisit, Py_None);
}

// Give `worker` the turn with what it asked for, and then whom it let through.
bool take_turn(const Run& run, PyObject* worker, PyObject* share) {
  Kept greenlet = Kept::borrowed(workers.at(worker, kGreenlet));
  Kept slot = Kept::borrowed(workers.at(worker, kSlot));
  auto* const inner = reinterpret_cast<PyGreenlet*>(greenlet.get());
  Kept parent(reinterpret_cast<PyObject*>(PyGreenlet_GetParent(inner)));
  auto* const driver = reinterpret_cast<PyGreenlet*>(run.driver);
  if (parent.get() != run.driver && PyGreenlet_SetParent(inner, driver) < 0) return false;
  Kept given(PyTuple_Pack(1, share));
  if (!given) return false;
  PyObject* const arguments[] = {slot.get(), greenlet.get(), given.get()};
  if (!Kept(PyObject_Vectorcall(run.switch_to, arguments, 3, nullptr))) return false;
  const bool is_over = workers.is_true(worker, kHasEnded);
  if (is_over) commit_last(worker);
  if (!is_over && PyList_GET_SIZE(run.released) == 0) return true;
  return static_cast<bool>(Kept(PyObject_CallFunctionObjArgs(after_turn, run.turns, worker, nullptr)));
}

// Let Python serve `rest`, who are parked at `location`, and what is then left.
Kept serve_rest(const Run& run, PyObject* location, PyObject* handed, PyObject* rest) {
  Kept those(PySequence_Tuple(rest));
  if (!those) return Kept();
  return Kept(PyObject_CallMethodObjArgs(run.turns, NAME("serve_all"), location, handed,
                                         those.get(), nullptr));
}

// Hand `value` to those parked at `location`; return what the model goes on with. `list` is theirs.
Kept serve_parked(const Run& run, const Near& near, PyObject* location, PyObject* value,
                  PyObject* list, long number) {
  Kept shared(PyList_New(0));
  Kept handed(shared ? handed_values.make({Py_False, value, shared.get()}) : nullptr);
  Kept those(PySequence_Tuple(list));
  if (!handed || !those) return Kept();
  const Py_ssize_t count = PyTuple_GET_SIZE(those.get());
  std::vector<Kept> asks;
  for (Py_ssize_t at = 0; at < count; ++at) {
    asks.push_back(Kept::borrowed(workers.at(PyTuple_GET_ITEM(those.get(), at), kAsk)));
  }
  for (Py_ssize_t at = 0; at < count; ++at) {
    PyObject* worker = PyTuple_GET_ITEM(those.get(), at);
    // Another one's turn may have changed what this one waits for, or made the visit.
    bool is_plain = workers.at(worker, kAsk) == asks[at].get() &&
                    (at == 0 || near.passed(location) == number);
    if (is_plain && stand_of(worker, number) == Stand::kLater) continue;
    Kept share;
    Kept visit = is_plain ? opened(worker, handed.get(), share) : Kept();
    if (!visit) {
      PyErr_Clear();  // Python asks the cut again, where the error can be raised in the block
      Kept rest(PyTuple_GetSlice(those.get(), at, count));
      return rest ? serve_rest(run, location, handed.get(), rest.get()) : Kept();
    }
    PyObject* loops = workers.at(worker, kLoopDepth);
    if (number > 0 && loops != nullptr && PyObject_IsTrue(loops) == 1) {
      workers.set(worker, kIsRelaxed, Py_True);
    }
    workers.set(worker, kVisit, visit.get());
    workers.set(worker, kAsk, Py_None);
    if (!unpark(near.waiting, location, worker)) return Kept();
    if (!take_turn(run, worker, share.get())) return Kept();
  }
  // Some may have come here meanwhile: again for another visit, or by a barrier.
  PyObject* left = PyDict_GetItemWithError(near.waiting, location);
  for (Py_ssize_t at = 0; left != nullptr && at < PyList_GET_SIZE(left); ++at) {
    if (stand_of(PyList_GET_ITEM(left, at), number) != Stand::kLater) {
      return serve_rest(run, location, handed.get(), left);
    }
  }
  if (PyErr_Occurred()) return Kept();
  handed_values.set(handed.get(), kIsOver, Py_True);
  PyObject* leaving = handed_values.at(handed.get(), kValue);
  return Kept::borrowed(leaving == nullptr ? Py_None : leaving);
}

bool are_plain(PyObject* list, long number) {
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); ++at) {
    const Stand stand = stand_of(PyList_GET_ITEM(list, at), number);
    if (stand != Stand::kNow && stand != Stand::kLater) return false;
  }
  return true;
}

// Let those who observe `location` see `value`.
bool show(PyObject* observers, PyObject* location, PyObject* value) {
  if (PyDict_GET_SIZE(observers) == 0) return true;
  Kept calls = Kept::borrowed(PyDict_GetItemWithError(observers, location));
  if (!calls) return !PyErr_Occurred();
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(calls.get()); ++at) {
    Kept call = Kept::borrowed(PyTuple_GET_ITEM(PyList_GET_ITEM(calls.get(), at), 1));
    if (!Kept(PyObject_CallOneArg(call.get(), value))) return false;
  }
  return true;
}

// `serve(location, value)` of a gate: as `Interleaver.serve`, and as what it was made with for a
// call that is not part of the run.
PyObject* serve(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "serve(location, value)");
    return nullptr;
  }
  Kept kept_self = Kept::borrowed(self);
  const Run run(self);
  const Near near(run.state);
  Kept location = Kept::borrowed(args[0]), value = Kept::borrowed(args[1]);
  if (!is_current(run.driver) || is_traced()) {
    return PyObject_CallFunctionObjArgs(run.foreign, location.get(), value.get(), nullptr);
  }
  Kept list = Kept::borrowed(PyDict_GetItemWithError(near.waiting, location.get()));
  if (!list && PyErr_Occurred()) return nullptr;
  if (list) {
    const long number = near.passed(location.get());
    if (number < 0) return nullptr;
    if (PyList_GET_SIZE(run.held) != 0 || !are_plain(list.get(), number)) {
      PyErr_Clear();
      return PyObject_CallFunctionObjArgs(run.foreign, location.get(), value.get(), nullptr);
    }
    value = serve_parked(run, near, location.get(), value.get(), list.get(), number);
    if (!value) return nullptr;
  }
  if (!show(run.observers, location.get(), value.get())) return nullptr;
  if (!count_visit(near.counts, location.get())) return nullptr;
  if (list) {
    Kept failed(PyObject_GetAttr(run.turns, NAME("failed")));
    if (!failed) return nullptr;
    if (failed.get() != Py_None) {
      PyErr_SetNone(run.abandoned);
      return nullptr;
    }
  }
  return value.release();
}

PyMethodDef serve_method = {"serve", as_method(serve), METH_FASTCALL,
                            "serve(location, value): return what the model goes on with."};

}  // namespace

bool count_visit(PyObject* counts, PyObject* location) {
  static PyObject* const one = PyLong_FromLong(1);
  if (counts == nullptr) return true;
  PyObject* before = PyDict_GetItemWithError(counts, location);
  if (before == nullptr) return !PyErr_Occurred() && PyDict_SetItem(counts, location, one) == 0;
  Kept after(PyNumber_Add(before, one));
  return after && PyDict_SetItem(counts, location, after.get()) == 0;
}

PyObject* near_serve(PyObject*, PyObject* args) {
  if (PyTuple_GET_SIZE(args) != kRunParts) {
    PyErr_SetString(PyExc_TypeError, "near_serve takes the parts of a run");
    return nullptr;
  }
  if (_PyGreenlet_API == nullptr) PyGreenlet_Import();  // each file has its own
  if (_PyGreenlet_API == nullptr) return nullptr;
  return PyCFunction_New(&serve_method, args);
}

}  // namespace nnsight_pp
