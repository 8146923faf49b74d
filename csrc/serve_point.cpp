// A serve point's visit without Python, where nobody waits for what the module takes or gives.
//
// The Python class `ServePoint` (envoys/serve_point.py) says what a visit is, and its `_served` runs
// every visit that anybody wants. This file is its `__call__` for the others, which are nearly all:
// it looks whether a gate is open, whether a worker is parked at the module's input or output, and
// counts the visit. It knows the two classes by the offsets of their slots.

#include "serve_point.hpp"

#include "near.hpp"
#include "slots.hpp"

#include <greenlet.h>

namespace nnsight_pp {
namespace {

// The slots of the two classes, in the order of their names.
enum PointSlot { kFunction, kModule, kOther, kQuick, kBody, kPointSlots };
Slots<kPointSlots> points{{"_function", "_module", "_other", "_quick", "body"}};
enum GateSlot { kServe, kIsSkipping, kParked, kCounts, kObservers, kDriver, kRunning, kGateSlots };
Slots<kGateSlots> gates{
    {"serve", "is_skipping", "parked", "counts", "observers", "driver", "running"}};
// What stands in an entry of `ServePoint._quick`.
enum EntryItem { kView, kInto, kOut, kHeldAs, kByParent };

PyObject* served_name = nullptr;

// What a weak reference refers to (a new reference), or null without an error.
PyObject* referent(PyObject* reference) {
  if (reference == nullptr || !PyWeakref_Check(reference)) return nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(reference, &object) < 0) PyErr_Clear();
  return object;
#else
  PyObject* object = PyWeakref_GetObject(reference);
  return object == nullptr || object == Py_None ? nullptr : Py_NewRef(object);
#endif
}

// Call the module's own forward.
PyObject* call_forward(PyObject* point, PyObject* const* args, Py_ssize_t count,
                       PyObject* names) {
  Kept function = Kept::borrowed(points.at(point, kFunction));
  if (function.get() == nullptr) {
    Kept other = Kept::borrowed(points.at(point, kOther));
    if (other.get() == nullptr) {
      PyErr_SetString(PyExc_ReferenceError, "this forward was never put on a module");
      return nullptr;
    }
    return PyObject_Vectorcall(other.get(), args, count, names);
  }
  PyObject* module = referent(points.at(point, kModule));
  if (module == nullptr) {
    PyErr_SetString(PyExc_ReferenceError, "the module of this forward was dropped");
    return nullptr;
  }
  constexpr Py_ssize_t kFew = 12;
  const Py_ssize_t total = count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  PyObject* few[kFew + 1];
  PyObject** stack = few;
  if (total > kFew) {
    stack = static_cast<PyObject**>(PyMem_Malloc((total + 1) * sizeof(PyObject*)));
    if (stack == nullptr) {
      Py_DECREF(module);
      return PyErr_NoMemory();
    }
  }
  stack[0] = module;
  std::copy(args, args + total, stack + 1);
  PyObject* value = PyObject_Vectorcall(function.get(), stack, count + 1, names);
  if (stack != few) PyMem_Free(stack);
  Py_DECREF(module);
  return value;
}

// Let Python run the whole visit.
PyObject* call_served(PyObject* point, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* given = PyTuple_New(count);
  PyObject* named = PyDict_New();
  if (given == nullptr || named == nullptr) {
    Py_XDECREF(given);
    Py_XDECREF(named);
    return nullptr;
  }
  for (Py_ssize_t at = 0; at < count; ++at) PyTuple_SET_ITEM(given, at, Py_NewRef(args[at]));
  const Py_ssize_t num_names = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  bool is_whole = true;
  for (Py_ssize_t at = 0; at < num_names; ++at) {
    is_whole = is_whole && PyDict_SetItem(named, PyTuple_GET_ITEM(names, at), args[count + at]) == 0;
  }
  PyObject* value = nullptr;
  if (is_whole) value = PyObject_CallMethodObjArgs(point, served_name, given, named, nullptr);
  Py_DECREF(given);
  Py_DECREF(named);
  return value;
}

// Whether ``places``, a dictionary or null, has ``location``; -1 with an error set.
int has(PyObject* places, PyObject* location) {
  return places == nullptr || PyDict_GET_SIZE(places) == 0 ? 0
                                                           : PyDict_Contains(places, location);
}

// Whether the caller's greenlet is the one that the run belongs to.
bool is_driving(PyObject* driver) {
  if (driver == nullptr) return true;
  PyGreenlet* current = PyGreenlet_GetCurrent();
  const bool is_it = reinterpret_cast<PyObject*>(current) == driver;
  Py_XDECREF(current);
  PyErr_Clear();
  return is_it;
}

// The one open gate that looks on; what it was when the visit began.
struct Visit {
  Kept gate, serve, parked, counts, observers, driver, running, into, out, held_as;
  Visit(PyObject* looking, PyObject* entry)
      : gate(Kept::borrowed(looking)),
        serve(Kept::borrowed(gates.at(looking, kServe))),
        parked(Kept::borrowed(gates.at(looking, kParked))),
        counts(Kept::borrowed(gates.at(looking, kCounts))),
        observers(Kept::borrowed(gates.at(looking, kObservers))),
        driver(Kept::borrowed(gates.at(looking, kDriver))),
        running(Kept::borrowed(gates.at(looking, kRunning))),
        into(Kept::borrowed(PyTuple_GET_ITEM(entry, kInto))),
        out(Kept::borrowed(PyTuple_GET_ITEM(entry, kOut))),
        held_as(Kept::borrowed(PyTuple_GET_ITEM(entry, kHeldAs))) {}

  // Find the locations of a shared module as `_View.enter` does; false with an error set.
  bool look_for_caller(PyObject* by_parent) {
    if (by_parent == Py_None) return true;
    for (Py_ssize_t at = PyList_GET_SIZE(running.get()); at-- > 0;) {
      Kept above = Kept::borrowed(PyList_GET_ITEM(running.get(), at));
      PyObject* pair = PyDict_GetItemWithError(by_parent, above.get());
      if (pair != nullptr) {
        into = Kept::borrowed(PyTuple_GET_ITEM(pair, 0));
        out = Kept::borrowed(PyTuple_GET_ITEM(pair, 1));
        return true;
      }
      if (PyErr_Occurred()) return false;
    }
    return true;
  }

  // Note that a module which holds shared ones runs; false with an error set.
  bool enter() const {
    return held_as.get() == Py_None || PyList_Append(running.get(), held_as.get()) == 0;
  }

  // Note that its call is over. An error that is set stays.
  void leave() const {
    if (held_as.get() == Py_None) return;
    PyObject *kind = nullptr, *error = nullptr, *trace = nullptr;
    PyErr_Fetch(&kind, &error, &trace);
    const Py_ssize_t size = PyList_GET_SIZE(running.get());
    if (size > 0 && PyList_SetSlice(running.get(), size - 1, size, nullptr) < 0) PyErr_Clear();
    PyErr_Restore(kind, error, trace);
  }

  // Whether somebody waits for ``location``; -1 with an error set.
  int wants(PyObject* location) const {
    const int parks = has(parked.get(), location);
    return parks != 0 ? parks : has(observers.get(), location);
  }
};

PyObject* visit_module(PyObject* point, const Visit& visit, PyObject* const* args,
                       Py_ssize_t count, PyObject* names) {
  const int wanted = visit.wants(visit.into.get());
  if (wanted < 0) return nullptr;
  if (wanted || !is_driving(visit.driver.get())) return call_served(point, args, count, names);
  if (!count_visit(visit.counts.get(), visit.into.get())) return nullptr;
  if (!visit.enter()) return nullptr;
  PyObject* value = call_forward(point, args, count, names);
  visit.leave();
  if (value == nullptr) return nullptr;
  const int is_read = visit.wants(visit.out.get());
  PyObject* served = nullptr;
  if (is_read == 0) {
    if (count_visit(visit.counts.get(), visit.out.get())) return value;
  } else if (is_read > 0) {
    PyObject* const given[] = {visit.out.get(), value};
    served = PyObject_Vectorcall(visit.serve.get(), given, 2, nullptr);
  }
  Py_DECREF(value);
  return served;
}

// `ServePoint.__call__`.
PyObject* point_call(PyObject* point, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Kept quick = Kept::borrowed(points.at(point, kQuick));
  PyObject* looking = nullptr;  // a new reference
  PyObject* entry = nullptr;
  bool are_many = false;
  const Py_ssize_t num_views = quick.get() == nullptr ? 0 : PyTuple_GET_SIZE(quick.get());
  for (Py_ssize_t at = 0; at < num_views; ++at) {
    PyObject* view = PyTuple_GET_ITEM(quick.get(), at);
    PyObject* gate = referent(PyTuple_GET_ITEM(view, kView));
    if (gate == nullptr) continue;
    if (!gates.is_of(gate) || gates.at(gate, kServe) == nullptr) {
      Py_DECREF(gate);
      continue;
    }
    are_many = looking != nullptr;
    Py_XSETREF(looking, gate);
    entry = view;
    if (are_many) break;
  }
  if (looking == nullptr) return call_forward(point, args, count, names);
  PyObject* value = nullptr;
  const bool is_plain = !are_many && points.at(point, kBody) == nullptr &&
                        !gates.is_true(looking, kIsSkipping) &&
                        gates.at(looking, kParked) != nullptr;
  if (is_plain) {
    Visit visit(looking, entry);
    if (visit.look_for_caller(PyTuple_GET_ITEM(entry, kByParent))) {
      value = visit_module(point, visit, args, count, names);
    }
  } else {
    value = call_served(point, args, count, names);
  }
  Py_DECREF(looking);
  return value;
}

PyMethodDef point_method = {
    "__call__",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(point_call)),
    METH_FASTCALL | METH_KEYWORDS, "Run the module, and serve what it takes and gives."};

}  // namespace

PyObject* make_point_call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyType_Check(args[0]) || !PyType_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "point_call(ServePoint, Gate) takes two classes");
    return nullptr;
  }
  if (!points.find(args[0]) || !gates.find(args[1])) return nullptr;
  PyGreenlet_Import();
  if (_PyGreenlet_API == nullptr) return nullptr;
  if (served_name == nullptr) served_name = PyUnicode_InternFromString("_served");
  if (served_name == nullptr) return nullptr;
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(args[0]), &point_method);
}

}  // namespace nnsight_pp
