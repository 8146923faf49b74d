// A read or a write of a node's value, in the block that makes it: see near.hpp.

#include "near.hpp"

namespace nnsight_pp {
namespace {

Kept running_worker() {
  Kept current(reinterpret_cast<PyObject*>(PyGreenlet_GetCurrent()));
  if (!shells.is_of(current.get())) return Kept();
  return Kept::borrowed(shells.at(current.get(), 0));
}

// As `OpenVisit.commit`.
bool commit(PyObject* visit) {
  return is_committed(visit) || Kept(PyObject_CallMethodNoArgs(visit, NAME("commit")));
}

// As `Parked.add`.
bool park_at(const Near& near, PyObject* location, PyObject* worker) {
  PyObject* list = PyDict_GetItemWithError(near.waiting, location);
  if (list == nullptr) {
    if (PyErr_Occurred()) return false;
    Kept alone(PyList_New(1));
    if (!alone) return false;
    PyList_SET_ITEM(alone.get(), 0, Py_NewRef(worker));
    return PyDict_SetItem(near.waiting, location, alone.get()) == 0;
  }
  PyObject* last = PyList_GET_ITEM(list, PyList_GET_SIZE(list) - 1);
  if (workers.is_of(last)) {
    const int is_behind =
        PyObject_RichCompareBool(workers.at(last, kSeat), workers.at(worker, kSeat), Py_LE);
    if (is_behind < 0) return false;
    if (is_behind) return PyList_Append(list, worker) == 0;
  }
  return static_cast<bool>(
      Kept(PyObject_CallFunctionObjArgs(near.park, location, worker, nullptr)));
}

bool remember(PyObject* worker, PyObject* location, PyObject* value) {
  Kept memo(memo_type->tp_alloc(memo_type, 4));
  if (!memo) return false;
  PyTuple_SET_ITEM(memo.get(), 0, Py_NewRef(location));
  PyTuple_SET_ITEM(memo.get(), 1, Py_NewRef(workers.at(worker, kStep)));
  PyTuple_SET_ITEM(memo.get(), 2, Py_NewRef(value));
  PyTuple_SET_ITEM(memo.get(), 3, Py_NewRef(Py_True));
  workers.set(worker, kMemo, memo.get());
  return true;
}

bool has_no_visits(PyObject* location) {
  PyObject* kind = PyTuple_GET_ITEM(location, 1);
  if (kind == NAME("output") || kind == NAME("input")) return false;
  return !PyUnicode_Check(kind) || PyUnicode_CompareWithASCIIString(kind, "result") == 0 ||
         PyUnicode_CompareWithASCIIString(kind, "skip") == 0;
}

// Return the value of `location`, parking until it is there, or NotImplemented for an ask that is
// left to `Asks.read`. Call it where no value of this location is open or kept.
PyObject* read_value(PyObject* worker, PyObject* location) {
  Kept state = Kept::borrowed(workers.at(worker, kNear));
  if (!state || !PyTuple_Check(location) || has_no_visits(location)) {
    return Py_NewRef(Py_NotImplemented);
  }
  const Near near(state.get());
  const long passed = near.passed(location);
  const bool is_relaxed = workers.is_true(worker, kIsRelaxed);
  Kept target = Kept::borrowed(workers.at(worker, kStep));
  const long visit = target ? PyLong_AsLong(target.get()) : -1;
  Kept number(PyLong_FromLong(PyLong_AsLong(workers.at(worker, kAsked)) + 1));
  if (PyErr_Occurred()) return nullptr;
  PyObject* greenlet = workers.at(worker, kGreenlet);
  // A relaxed ask for another number may mean a visit of a later forward: Python looks.
  if (passed > visit || (is_relaxed && passed != visit) || workers.is_true(worker, kIsCalling) ||
      !is_current(greenlet) || workers.at(worker, kClosedEarly) != nullptr ||
      workers.at(worker, kTimeline) != nullptr) {
    return Py_NewRef(Py_NotImplemented);
  }
  Kept parent(reinterpret_cast<PyObject*>(
      PyGreenlet_GetParent(reinterpret_cast<PyGreenlet*>(greenlet))));
  if (!parent) return Py_NewRef(Py_NotImplemented);
  if (Kept open = Kept::borrowed(workers.at(worker, kVisit))) {
    workers.set(worker, kVisit, Py_None);
    if (!commit(open.get())) return nullptr;
  }
  Kept ask(reads.make({workers.at(worker, kAsked), location, target.get(), Py_None}));
  if (!ask) return nullptr;
  workers.set(worker, kAsked, number.get());
  workers.set(worker, kAsk, ask.get());
  if (!park_at(near, location, worker)) return nullptr;
  Kept value(PyGreenlet_Switch(reinterpret_cast<PyGreenlet*>(parent.get()), nullptr, nullptr));
  if (!value || !remember(worker, location, value.get())) return nullptr;
  return value.release();
}

// Whether `memo` is of what `worker` asks for at `location` now; -1 with an error set.
int is_of(PyObject* memo, PyObject* worker, PyObject* location) {
  if (memo == nullptr) return 0;
  const int is_same = PyObject_RichCompareBool(PyTuple_GET_ITEM(memo, 0), location, Py_EQ);
  if (is_same <= 0) return is_same;
  return PyObject_RichCompareBool(PyTuple_GET_ITEM(memo, 1), workers.at(worker, kStep), Py_EQ);
}

// Return the worker that runs beside the tree of `node`, where it may take the short way.
Kept worker_beside(PyObject* node) {
  Kept worker = running_worker();
  if (!worker || workers.at(worker.get(), kNear) == nullptr) return Kept();
  Kept forest(PyObject_GenericGetAttr(node, NAME("_forest")));
  Kept asks(forest ? PyObject_GetAttr(forest.get(), NAME("open_asks")) : nullptr);
  if (!asks) PyErr_Clear();
  return asks.get() == workers.at(worker.get(), kTurns) ? std::move(worker) : Kept();
}

// As `Values._read`: Python takes an AttributeError of a property for a missing attribute.
void note_raised(PyObject* node) {
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(error, traceback);
  if (PyObject_GenericSetAttr(node, NAME("_raised"), error) < 0) PyErr_Clear();
  PyErr_Restore(type, error, traceback);
}

// The getter of a property of nodes. `self` is where a node keeps the location, the getter in Python,
// and what becomes of a value that is not a plain tensor.
PyObject* get_value(PyObject* self, PyObject* node) {
  Kept worker = is_traced() ? Kept() : worker_beside(node);
  Kept location(worker ? PyObject_GenericGetAttr(node, PyTuple_GET_ITEM(self, 0)) : nullptr);
  PyErr_Clear();
  if (!location) return PyObject_CallOneArg(PyTuple_GET_ITEM(self, 1), node);
  PyObject* memo = workers.at(worker.get(), kMemo);
  const int is_known = is_of(memo, worker.get(), location.get());
  if (is_known < 0) return nullptr;
  Kept value;
  if (is_known) {
    PyObject* open = workers.at(worker.get(), kVisit);
    const bool is_plain =
        open == nullptr || (visits.is_of(open) && visits.at(open, kViews) == nullptr);
    value = Kept::borrowed(is_plain ? PyTuple_GET_ITEM(memo, 2) : Py_NotImplemented);
  } else {
    value = Kept(read_value(worker.get(), location.get()));
  }
  if (!value) {
    note_raised(node);
    return nullptr;
  }
  if (value.get() == Py_NotImplemented) {
    return PyObject_CallOneArg(PyTuple_GET_ITEM(self, 1), node);
  }
  if (is_type(value.get(), tensor_type)) return value.release();
  return PyObject_CallOneArg(PyTuple_GET_ITEM(self, 2), value.get());
}

// Replace the value of `node` that is open in the running block by the tensor `value`. 1 where it
// was done, 0 where it is left to Python, -1 with an error set.
int assign(PyObject* node, PyObject* kept_as, PyObject* value) {
  Kept worker = worker_beside(node);
  Kept location(worker ? PyObject_GenericGetAttr(node, kept_as) : nullptr);
  PyErr_Clear();
  if (!location) return 0;
  PyObject* memo = workers.at(worker.get(), kMemo);
  const int is_known = is_of(memo, worker.get(), location.get());
  if (is_known <= 0) return is_known;
  PyObject* open = workers.at(worker.get(), kVisit);
  if (PyTuple_GET_ITEM(memo, 3) != Py_True || !visits.is_of(open) ||
      !is_type(visits.at(open, kVisitCut), whole_cut)) {
    return 0;
  }
  visits.set(open, kServed, value);
  visits.set(open, kIsGiven, Py_True);
  visits.set(open, kIsAssigned, Py_True);
  return remember(worker.get(), location.get(), value) ? 1 : -1;
}

PyObject *slow_setter, *quick_properties;

// `__setattr__` of a node. `quick_properties` has, by name, a property and where it keeps its
// location; whatever is not a tensor for one of them is left to `slow_setter`.
PyObject* set_attribute(PyObject* node, PyObject* const* args, Py_ssize_t count) {
  if (count == 2 && is_type(args[1], tensor_type)) {
    PyObject* known = PyDict_GetItemWithError(quick_properties, args[0]);
    if (known == nullptr && PyErr_Occurred()) return nullptr;
    if (known != nullptr) {
      Kept own(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(node)), args[0]));
      if (!own) return nullptr;
      const bool is_ours = own.get() == PyTuple_GET_ITEM(known, 0);
      const int is_done = is_ours ? assign(node, PyTuple_GET_ITEM(known, 1), args[1]) : 0;
      if (is_done < 0) return nullptr;
      if (is_done) Py_RETURN_NONE;
    }
  }
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "__setattr__(name, value)");
    return nullptr;
  }
  return PyObject_CallFunctionObjArgs(slow_setter, node, args[0], args[1], nullptr);
}

PyMethodDef getter_method = {"get", get_value, METH_O, "Return a value of a node."};
PyMethodDef setter_method = {"__setattr__", as_method(set_attribute), METH_FASTCALL,
                             "Set a value of a node, or anything else on it."};

}  // namespace

bool is_committed(PyObject* visit) {
  if (!visits.is_of(visit) || visits.at(visit, kViews) != nullptr ||
      visits.at(visit, kRaw) != nullptr) {
    return false;
  }
  if (!visits.is_true(visit, kIsGiven)) return true;
  PyObject* cut = visits.at(visit, kVisitCut);
  PyObject* served = visits.at(visit, kServed);
  PyObject* handed = visits.at(visit, kHanded);
  const bool is_assigned = visits.is_true(visit, kIsAssigned);
  if (is_type(cut, whole_cut)) {
    if (is_assigned) handed_values.set(handed, kValue, served == nullptr ? Py_None : served);
  } else {
    if (!batch_cuts.is_of(cut) || is_assigned || !is_type(served, tensor_type)) return false;
    PyObject* marks = visits.at(visit, kMarks);
    const bool is_unreplaced = marks != nullptr && PyList_CheckExact(marks) &&
                               PyList_GET_SIZE(marks) == 1 && PyList_GET_ITEM(marks, 0) == served;
    if (!is_unreplaced || is_type(handed_values.at(handed, kValue), replacement)) return false;
  }
  visits.set(visit, kIsGiven, Py_False);
  visits.set(visit, kIsAssigned, Py_False);
  return true;
}

PyObject* near_classes(PyObject*, PyObject* args) {
  PyObject *worker, *read, *visit, *handed, *shell, *memo, *whole, *batch, *replaced, *tensor;
  PyObject* turned;
  if (!PyArg_ParseTuple(args, "OOOOOOO!O!O!O!O:near_classes", &worker, &read, &visit, &handed,
                        &shell, &batch, &PyType_Type, &memo, &PyType_Type, &whole, &PyType_Type,
                        &replaced, &PyType_Type, &tensor, &turned)) {
    return nullptr;
  }
  PyGreenlet_Import();
  if (_PyGreenlet_API == nullptr) return nullptr;
  if (!workers.find(worker) || !reads.find(read) || !visits.find(visit) ||
      !handed_values.find(handed) || !shells.find(shell) || !batch_cuts.find(batch)) {
    return nullptr;
  }
  for (auto [place, type] : {std::pair{&memo_type, memo}, {&whole_cut, whole},
                             {&replacement, replaced}, {&tensor_type, tensor}}) {
    *place = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  }
  after_turn = Py_NewRef(turned);
  PyTypeObject* const base = tensor_type->tp_base;
  const PyMappingMethods* const as_mapping = base == nullptr ? nullptr : base->tp_as_mapping;
  if (as_mapping == nullptr || as_mapping->mp_length == nullptr) {
    PyErr_SetString(PyExc_TypeError, "what torch.Tensor is made of has no length");
    return nullptr;
  }
  length_of_tensor = as_mapping->mp_length;
  Py_RETURN_NONE;
}

PyObject* near_read(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !workers.is_of(args[0])) {
    PyErr_SetString(PyExc_TypeError, "near_read(worker, location)");
    return nullptr;
  }
  Kept worker = Kept::borrowed(args[0]), location = Kept::borrowed(args[1]);
  return read_value(worker.get(), location.get());
}

PyObject* near_setter(PyObject*, PyObject* args) {
  PyObject *type, *properties, *slow;
  if (!PyArg_ParseTuple(args, "O!O!O:near_setter", &PyType_Type, &type, &PyDict_Type, &properties,
                        &slow)) {
    return nullptr;
  }
  Kept before(std::exchange(quick_properties, Py_NewRef(properties)));
  Kept other(std::exchange(slow_setter, Py_NewRef(slow)));
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &setter_method);
}

PyObject* near_getter(PyObject*, PyObject* args) {
  if (!PyTuple_Check(args) || PyTuple_GET_SIZE(args) != 3) {
    PyErr_SetString(PyExc_TypeError, "near_getter(kept_as, getter, savable)");
    return nullptr;
  }
  return PyCFunction_New(&getter_method, args);
}

}  // namespace nnsight_pp
