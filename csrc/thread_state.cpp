// Exchange torch's thread-local state at every greenlet switch.
//
// A worker is a greenlet. It may park inside a torch call, where torch's C++ frames are live on
// its stack and the thread-local state that they installed is in force: the warning handler is
// even a pointer into that stack, which the switch then moves away. `switch` and `throw` run on
// the driver's side: they install the worker's state, switch, keep what the worker left behind
// in its Slot, and put back the driver's, whatever way the worker came back.
//
// What torch 2.13.0 and 2.14.1 keep per thread (read from their headers and symbol tables):
//
//   state                                     in at::ThreadLocalState   here
//   dispatch key sets (autocast on, vmap ...) yes                       Words
//   AutogradState: grad, inference, forward   yes                       Words
//     grad, multithreading, view replay, ...; execution group           Held
//   __torch_function__: disabled, skip next   yes                       Words; mode stack: Held
//   __torch_dispatch__ modes, infra modes     yes                       Held
//   python dispatcher, reapply views, DTensor yes                       Words
//   autocast dtypes                           yes                       Words
//   saved-tensor hooks, python objects        yes                       Held
//   debug info, RecordFunction callbacks      yes                       Held
//   node-creation hooks (2.14)                yes                       Held
//   functorch layers                          yes, as a deep copy       Held, moved: the frames of
//                                                                       a parked vmap refer to it
//   warning handler                           NO                        Words
//   autocast nesting and cache switch         NO                        Words
//   key set on entry to Python dispatch       NO, and no accessor       Words (hidden_tls.hpp)
//   pybind11's frame of the current call      NO, and no accessor       Words (hidden_tls.hpp)
//   jit: numbers count as tensors             NO, and no accessor       Words (hidden_tls.hpp)
//   Dynamo's frame callback                   NO                        set_eval_frame, if in use
//   CUDA device and stream                    NO                        thread_state.py
//   autograd engine: graph task, depth, queue NO, and no accessor       Held (hidden_tls.hpp)
//   jit tracing state, legacy vmap level,     NO                        not exchanged
//     c10d's current group, c10's fake mode
//     (2.14, used by nobody)
//   profiler sub-queues, sequence numbers,    NO                        harmless: caches, counters
//     kernel caches, workspaces
//
// Not per thread at all, so a block that changes them changes the model: default dtype, random
// generators, backend flags, deterministic mode, number of threads.
//
// Words and Held are in bundle.hpp: plain data, and objects that own something. Mostly nothing
// differs and nothing is written. Under a torch version that compat.hpp does not list, full
// snapshots are taken around all this (also on request: `set_full_snapshots`).
//
// Over 400 lines, as this table stands beside the switch that has to keep it.

#include "bundle.hpp"
#include "lane_types.hpp"
#include "near.hpp"
#include "serve_point.hpp"
#include "stack.hpp"

#include <frameobject.h>
#include <greenlet.h>

#include <memory>
#include <thread>
#include <utility>

namespace {

namespace compat = nnsight_pp::compat;
using nnsight_pp::as_method;
using nnsight_pp::Held;
using nnsight_pp::HiddenVariable;
using nnsight_pp::places;
using nnsight_pp::Places;
using nnsight_pp::Words;

// ---------------------------------------------------------------------------------------------
// Module state. Never freed: torch's own statics may be gone when the process ends.

Words clean_words;                                  // of a thread that has done nothing
const at::ThreadLocalState* clean_state = nullptr;  // the same, for full snapshots
PyTypeObject* slot_type = nullptr;
PyObject* set_eval_frame = nullptr;  // Dynamo's, or null where this torch has none
bool full_snapshots = !compat::state_is_known();

struct Slot {
  PyObject_HEAD
  Words fresh;                                   // what a new worker starts with
  Words words;                                   // what to install at the next switch
  Held* held;                                    // never null
  std::unique_ptr<at::ThreadLocalState>* state;  // full snapshots only; never null
  PyObject* eval_frame;                          // Dynamo's callback, or null for none
  PyObject* stream;                              // for thread_state.py: CUDA stream left behind
  bool is_running;
};

// Replace Dynamo's frame callback and return the one that was in force (a new reference).
// An exception of the worker may be set; it survives.
PyObject* exchange_eval_frame(PyObject* callback) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* previous =
      PyObject_CallOneArg(set_eval_frame, callback == nullptr ? Py_None : callback);
  if (previous == nullptr) PyErr_WriteUnraisable(set_eval_frame);
  PyErr_Restore(type, value, traceback);
  if (previous == Py_None) {
    Py_DECREF(previous);
    return nullptr;
  }
  return previous;
}

// The driver's state, put back when this goes out of scope.
class DriverState {
 public:
  DriverState(const Places& at, Slot& slot) : at_(at), slot_(slot) {
    read(at_, words_);
    slot_.is_running = true;
  }

  // Out with the driver's, in with the worker's.
  void install_worker() {
    if (set_eval_frame != nullptr &&
        (slot_.eval_frame != nullptr || compat::evaluator_is_replaced())) {
      eval_frame_ = exchange_eval_frame(slot_.eval_frame);
      has_eval_frame_ = true;
      Py_CLEAR(slot_.eval_frame);
    }
    if (!full_snapshots && words_ == slot_.words && words_.held == 0) return;
    if (full_snapshots) state_.emplace();
    if (words_.held != 0) {
      held_ = std::make_unique<Held>();
      held_->take(at_, words_.held);
    }
    if (full_snapshots) {
      at::ThreadLocalState::setThreadLocalState(*slot_.state ? **slot_.state : *clean_state);
      Words now;
      read(at_, now);
      write(at_, now, slot_.words);
    } else {
      write(at_, words_, slot_.words);
    }
    slot_.held->put(at_);
  }

  // Keep what the worker left, or, when it is over, remember to drop it.
  void keep_worker(bool is_alive) {
    Words& left = now_;
    read(at_, left);
    is_known_ = true;
    must_restore_ = state_.has_value() || held_ != nullptr || left.held != 0 || !(left == words_);
    if (state_.has_value()) *slot_.state = std::make_unique<at::ThreadLocalState>();
    if (left.held != 0) slot_.held->take(at_, left.held);
    if (set_eval_frame != nullptr && (has_eval_frame_ || compat::evaluator_is_replaced())) {
      slot_.eval_frame = exchange_eval_frame(eval_frame_);
      has_eval_frame_ = false;
    }
    if (must_restore_ || !(slot_.words == left)) slot_.words = left;
    if (!is_alive) {
      slot_.words = slot_.fresh;
      leftover_state_ = std::move(*slot_.state);
      if (left.held != 0) leftover_.reset(std::exchange(slot_.held, new Held));
      Py_CLEAR(slot_.eval_frame);
      Py_CLEAR(slot_.stream);
    }
  }

  // Ends the process if torch cannot allocate: there is no state to go on with.
  ~DriverState() noexcept {
    if (must_restore_) {
      if (state_.has_value()) at::ThreadLocalState::setThreadLocalState(*state_);
      if (state_.has_value() || !is_known_) read(at_, now_);
      write(at_, now_, words_);
      if (held_ != nullptr) held_->put(at_);
    }
    if (has_eval_frame_) Py_XDECREF(exchange_eval_frame(eval_frame_));
    Py_XDECREF(eval_frame_);
    slot_.is_running = false;
    // leftover_ goes last, with the driver's state in force: it may run Python code.
  }

 private:
  const Places& at_;
  Slot& slot_;
  Words words_;
  Words now_;  // what is in force until the driver's state is back
  bool must_restore_ = true;
  bool is_known_ = false;  // now_ is what the thread has
  bool has_eval_frame_ = false;
  std::unique_ptr<at::ThreadLocalState> leftover_state_;
  std::unique_ptr<Held> leftover_;
  std::unique_ptr<Held> held_;  // the driver's
  std::optional<at::ThreadLocalState> state_;
  PyObject* eval_frame_ = nullptr;
};

template <class Step>
PyObject* exchange(PyObject* slot_object, PyObject* greenlet, Step step) {
  if (Py_TYPE(slot_object) != slot_type) {
    return PyErr_Format(PyExc_TypeError, "expected a Slot, not %R", slot_object);
  }
  if (!PyGreenlet_Check(greenlet)) {
    return PyErr_Format(PyExc_TypeError, "expected a greenlet, not %R", greenlet);
  }
  Slot& slot = *reinterpret_cast<Slot*>(slot_object);
  if (slot.is_running) {
    PyErr_SetString(PyExc_RuntimeError, "this Slot's worker is running already");
    return nullptr;
  }
  auto* worker = reinterpret_cast<PyGreenlet*>(greenlet);
  PyObject* result = nullptr;
  try {
    DriverState driver(places(), slot);
    driver.install_worker();
    result = step(worker);
    driver.keep_worker(PyGreenlet_ACTIVE(worker) != 0);
  } catch (const std::exception& error) {
    Py_CLEAR(result);
    PyErr_Format(PyExc_RuntimeError, "torch's thread state could not be exchanged: %s",
                 error.what());
  }
  return result;
}

// ---------------------------------------------------------------------------------------------
// Python

PyObject* module_switch(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 3 || !PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "switch(slot, greenlet, args_tuple)");
    return nullptr;
  }
  return exchange(args[0], args[1], [&](PyGreenlet* worker) {
    return PyGreenlet_Switch(worker, args[2], nullptr);
  });
}

PyObject* module_throw(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 3 ||
      !(PyExceptionInstance_Check(args[2]) || PyExceptionClass_Check(args[2]))) {
    PyErr_SetString(PyExc_TypeError, "throw(slot, greenlet, exception)");
    return nullptr;
  }
  return exchange(args[0], args[1], [&](PyGreenlet* worker) {
    return PyGreenlet_Throw(worker, args[2], nullptr, nullptr);
  });
}

// The words in force in this thread, for tests and for a person who debugs.
PyObject* module_words(PyObject*, PyObject*) {
  Words w;
  read(places(), w);
  PyObject* dtypes = PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(w.autocast_dtypes), sizeof w.autocast_dtypes);
  if (dtypes == nullptr) return nullptr;
  return Py_BuildValue(
      "{s:K,s:K,s:K,s:K,s:K,s:(iKK),s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:N}",
      "warning_handler", reinterpret_cast<unsigned long long>(w.warning_handler),
      "included", static_cast<unsigned long long>(w.included),
      "excluded", static_cast<unsigned long long>(w.excluded),
      "python_dispatcher", reinterpret_cast<unsigned long long>(w.python_dispatcher),
      "pybind_frame", reinterpret_cast<unsigned long long>(w.pybind_frame),
      "entry_keys", static_cast<int>(w.has_entry_keys),
      static_cast<unsigned long long>(w.entry_included),
      static_cast<unsigned long long>(w.entry_excluded),
      "autocast_nesting", static_cast<int>(w.autocast_nesting),
      "autograd", static_cast<int>(w.autograd),
      "function_state", static_cast<int>(w.function_state),
      "skip_next", static_cast<int>(w.skip_next),
      "numbers_as_tensors", static_cast<int>(w.numbers_as_tensors),
      "reapply_views", static_cast<int>(w.reapply_views),
      "dtensor", static_cast<int>(w.dtensor),
      "autocast_cache", static_cast<int>(w.autocast_cache),
      "held", static_cast<int>(w.held),
      "autocast_dtypes", dtypes);
}

PyObject* module_set_full_snapshots(PyObject*, PyObject* enabled) {
  const int wanted = PyObject_IsTrue(enabled);
  if (wanted < 0) return nullptr;
  const bool previous = full_snapshots;
  full_snapshots = wanted != 0 || !compat::state_is_known();
  return PyBool_FromLong(previous);
}

// The plain exchange, as two calls: what `switch` is measured against and must agree with.
struct Snapshot {
  at::ThreadLocalState state;
  c10::WarningHandler* warning_handler = c10::WarningUtils::get_warning_handler();
};
constexpr const char* kSnapshotName = "nnsight_pp.thread_state_snapshot";

PyObject* module_capture(PyObject*, PyObject*) {
  return PyCapsule_New(new Snapshot, kSnapshotName, [](PyObject* capsule) {
    delete static_cast<Snapshot*>(PyCapsule_GetPointer(capsule, kSnapshotName));
  });
}

PyObject* module_install(PyObject*, PyObject* capsule) {
  auto* snapshot = static_cast<Snapshot*>(PyCapsule_GetPointer(capsule, kSnapshotName));
  if (snapshot == nullptr) return nullptr;
  at::ThreadLocalState::setThreadLocalState(snapshot->state);
  c10::WarningUtils::set_warning_handler(snapshot->warning_handler);
  Py_RETURN_NONE;
}

// Write what a frame shows as its names into the frame; from 3.13 on that happens by itself.
PyObject* module_write_back(PyObject*, [[maybe_unused]] PyObject* frame) {
#if PY_VERSION_HEX < 0x030D0000
  if (!PyFrame_Check(frame)) return PyErr_Format(PyExc_TypeError, "%R is no frame", frame);
  PyFrame_LocalsToFast(reinterpret_cast<PyFrameObject*>(frame), 0);
#endif
  Py_RETURN_NONE;
}

// Warn as a binding does that installs no handler of its own (c10d's are such).
PyObject* module_warn(PyObject*, PyObject* text) {
  const char* message = PyUnicode_AsUTF8(text);
  if (message == nullptr) return nullptr;
  TORCH_WARN(message);
  Py_RETURN_NONE;
}

PyObject* slot_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"grad_enabled", nullptr};
  int grad_enabled = 1;
  if (kwargs == nullptr && PyTuple_GET_SIZE(args) == 1) {  // the usual case
    grad_enabled = PyObject_IsTrue(PyTuple_GET_ITEM(args, 0));
    if (grad_enabled < 0) return nullptr;
  } else if (!PyArg_ParseTupleAndKeywords(args, kwargs, "p:Slot", const_cast<char**>(names),
                                   &grad_enabled)) {
    return nullptr;
  }
  auto* slot = reinterpret_cast<Slot*>(type->tp_alloc(type, 0));
  if (slot == nullptr) return nullptr;
  slot->fresh = clean_words;
  slot->fresh.autograd = static_cast<std::uint16_t>((clean_words.autograd & ~1U) |
                                                    (grad_enabled != 0 ? 1U : 0U));
  slot->words = slot->fresh;
  slot->held = new Held;
  slot->state = new std::unique_ptr<at::ThreadLocalState>;
  return reinterpret_cast<PyObject*>(slot);
}

void slot_dealloc(PyObject* self) {
  auto* slot = reinterpret_cast<Slot*>(self);
  PyTypeObject* type = Py_TYPE(self);
  delete slot->held;
  delete slot->state;
  Py_CLEAR(slot->eval_frame);
  Py_CLEAR(slot->stream);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* slot_is_clean(PyObject* self, void*) {
  const auto* slot = reinterpret_cast<const Slot*>(self);
  return PyBool_FromLong(slot->words == slot->fresh && slot->held->empty() &&
                         slot->eval_frame == nullptr && slot->stream == nullptr);
}

PyObject* slot_get_stream(PyObject* self, void*) {
  PyObject* stream = reinterpret_cast<Slot*>(self)->stream;
  return Py_NewRef(stream == nullptr ? Py_None : stream);
}

int slot_set_stream(PyObject* self, PyObject* stream, void*) {
  auto* slot = reinterpret_cast<Slot*>(self);
  PyObject* previous = std::exchange(
      slot->stream, stream == nullptr || stream == Py_None ? nullptr : Py_NewRef(stream));
  Py_XDECREF(previous);
  return 0;
}

PyGetSetDef slot_properties[] = {
    {"is_clean", slot_is_clean, nullptr, "True while its worker has left nothing behind.", nullptr},
    {"stream", slot_get_stream, slot_set_stream, "CUDA stream that its worker left, or None.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slot_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(slot_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(slot_dealloc)},
    {Py_tp_getset, slot_properties},
    {Py_tp_doc, const_cast<char*>("Slot(grad_enabled): the thread state of one worker.")},
    {0, nullptr}};
PyType_Spec slot_spec = {"nnsight_pp_thread_state.Slot", sizeof(Slot), 0, Py_TPFLAGS_DEFAULT,
                         slot_slots};

PyMethodDef module_methods[] = {
    {"switch", as_method(module_switch), METH_FASTCALL,
     "switch(slot, greenlet, args_tuple): switch to the worker with its own thread state."},
    {"throw", as_method(module_throw), METH_FASTCALL,
     "throw(slot, greenlet, exception): raise in the worker with its own thread state."},
    {"words", module_words, METH_NOARGS, "The plain part of this thread's state, as a dict."},
    {"set_full_snapshots", module_set_full_snapshots, METH_O,
     "Take at::ThreadLocalState snapshots at every switch; returns the previous setting."},
    {"capture", module_capture, METH_NOARGS, "A plain at::ThreadLocalState snapshot."},
    {"install", module_install, METH_O, "Install what capture() returned."},
    {"stack_address", nnsight_pp::stack_address, METH_NOARGS,
     "Where this thread's C stack is now."},
    {"at_bottom", as_method(nnsight_pp::at_bottom), METH_FASTCALL,
     "at_bottom(function, *args): call it as the outermost frame of a new greenlet."},
    {"near_classes", nnsight_pp::near_classes, METH_VARARGS,
     "near_classes(...): the classes that asks and visits are made of (see near.hpp)."},
    {"near_read", as_method(nnsight_pp::near_read), METH_FASTCALL,
     "near_read(worker, location): its value, or NotImplemented."},
    {"near_getter", nnsight_pp::near_getter, METH_VARARGS,
     "near_getter(kept_as, getter): the getter of a property of nodes."},
    {"near_setter", nnsight_pp::near_setter, METH_VARARGS,
     "near_setter(class, properties, setter): a `__setattr__` of nodes."},
    {"near_serve", nnsight_pp::near_serve, METH_VARARGS,
     "near_serve(...): what serves the values of one run."},
    {"point_call", as_method(nnsight_pp::make_point_call), METH_FASTCALL,
     "point_call(ServePoint, Gate): a `__call__` for ServePoint (see serve_point.cpp)."},
    {"write_back", module_write_back, METH_O,
     "write_back(frame): write its `f_locals` into it, nothing being deleted."},
    {"warn", module_warn, METH_O, "Emit a torch warning through the handler in force."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "nnsight_pp_thread_state",
                                 "Greenlet switches that exchange torch's thread-local state.", -1,
                                 module_methods, nullptr, nullptr, nullptr, nullptr};

// Read a clean state where it is certain to be one: in a thread that has done nothing.
void read_clean_state() {
  std::thread([] {
    clean_state = new at::ThreadLocalState;
    Words words;
    read(places(), words);
    nnsight_pp::check_assumptions(words);
    words.held = 0;
    clean_words = words;
  }).join();
}

// The names of those that this torch does not show; a new reference.
PyObject* list_unseen() {
  PyObject* unseen = PyList_New(0);
  if (unseen == nullptr) return nullptr;
  for (const HiddenVariable* variable : nnsight_pp::variables_without_accessor()) {
    if (variable->module_id != 0) continue;
    PyObject* name = PyUnicode_FromString(variable->symbol);
    if (name == nullptr || PyList_Append(unseen, name) < 0) {
      Py_XDECREF(name);
      Py_DECREF(unseen);
      return nullptr;
    }
    Py_DECREF(name);
  }
  return unseen;
}

bool fill(PyObject* module) {
  nnsight_pp::find_hidden_variables();
  read_clean_state();
  PyObject* unseen = list_unseen();
  if (unseen == nullptr || PyModule_AddObjectRef(module, "unseen", unseen) < 0) return false;
  Py_DECREF(unseen);
  if (PyObject* dynamo = PyImport_ImportModule("torch._C._dynamo.eval_frame")) {
    set_eval_frame = PyObject_GetAttrString(dynamo, "set_eval_frame");
    Py_DECREF(dynamo);
  }
  PyErr_Clear();
  slot_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&slot_spec));
  return slot_type != nullptr && PyModule_AddType(module, slot_type) == 0 &&
         nnsight_pp::add_lane(module) &&
         PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION) == 0 &&
         PyModule_AddIntConstant(module, "state_bytes", sizeof(at::ThreadLocalState)) == 0 &&
         PyModule_AddObjectRef(module, "state_is_known",
                               compat::state_is_known() ? Py_True : Py_False) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit_nnsight_pp_thread_state() {
  PyGreenlet_Import();
  if (_PyGreenlet_API == nullptr) return nullptr;
  PyObject* module = PyModule_Create(&module_definition);
  if (module != nullptr && !fill(module)) Py_CLEAR(module);
  return module;
}
