// `Lane` and `PlainTensors` (lane.hpp, plain_tensors.hpp) as Python sees them.

#include "lane_types.hpp"

#if !__has_include(<torch/csrc/distributed/c10d/GroupRegistry.hpp>)

namespace nnsight_pp {
bool add_lane(PyObject*) { return true; }
}  // namespace nnsight_pp

#else

#include "lane.hpp"
#include "slots.hpp"

namespace nnsight_pp {
namespace {

// Hand the GIL back until the end of the scope.
struct WithoutGil {
  PyThreadState* saved = PyEval_SaveThread();
  // A thread that asks for it while Python ends is ended there, by unwinding.
  ~WithoutGil() noexcept(false) { PyEval_RestoreThread(saved); }
};

// Run `body` without the GIL; what it throws is a RuntimeError, and the result then null.
template <typename Body>
PyObject* run_without_gil(Body body) {
  std::string failure;
  {
    const WithoutGil without;
    try {
      body();
      failure.clear();
    } catch (const std::exception& error) {
      failure = error.what();
      if (failure.empty()) failure = "unknown";
    }
  }
  if (failure.empty()) return Py_NewRef(Py_None);
  PyErr_SetString(PyExc_RuntimeError, failure.c_str());
  return nullptr;
}

template <typename Inner>
struct Object {
  PyObject_HEAD
  Inner* inner;
};

template <typename Inner>
Inner& inner(PyObject* self) {
  return *reinterpret_cast<Object<Inner>*>(self)->inner;
}

template <typename Inner>
void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object<Inner>*>(self)->inner;
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Inner>
PyObject* made(PyTypeObject* type, std::unique_ptr<Inner> inner) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) reinterpret_cast<Object<Inner>*>(self)->inner = inner.release();
  return self;
}

PyTypeObject *memory_type, *lane_type;  // never given back

// What an answer lies in: (tensor, length).
using Memory = std::pair<at::Tensor, std::size_t>;

int memory_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Memory& own = inner<Memory>(self);
  return PyBuffer_FillInfo(view, self, data(own.first), static_cast<Py_ssize_t>(own.second), 0,
                           flags);
}

PyObject* lane_ask(PyObject* self, PyObject* args) {
  unsigned long long ticket;
  long long step;
  unsigned char what;
  const char *picks, *key;
  Py_ssize_t picks_length, length;
  if (!PyArg_ParseTuple(args, "KLby#s#", &ticket, &step, &what, &picks, &picks_length, &key,
                        &length)) {
    return nullptr;
  }
  return run_without_gil([&] {
    inner<Lane>(self).ask(ticket, step, what, {picks, static_cast<std::size_t>(picks_length)},
                          {key, static_cast<std::size_t>(length)});
  });
}

PyObject* lane_wait(PyObject* self, PyObject* args) {
  unsigned long long ticket;
  double bound_s;
  if (!PyArg_ParseTuple(args, "Kd", &ticket, &bound_s)) return nullptr;
  Lane& lane = inner<Lane>(self);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(std::min(bound_s, 1e8)));
  for (bool is_over = false; !is_over;) {
    // In pieces, so that Python's handlers of signals run meanwhile.
    const auto piece = std::min(end, Clock::now() + std::chrono::milliseconds(50));
    {
      const WithoutGil without;
      is_over = lane.wait(ticket, piece) || piece == end;
    }
    if (!is_over && PyErr_CheckSignals() < 0) return nullptr;
  }
  Coming answer;
  if (!lane.take(ticket, answer)) Py_RETURN_NONE;
  Kept sizes(PyTuple_New(static_cast<Py_ssize_t>(answer.sizes.size())));
  if (!sizes) return nullptr;
  for (std::size_t at = 0; at < answer.sizes.size(); ++at) {
    PyObject* size = PyLong_FromLongLong(answer.sizes[at]);
    if (size == nullptr) return nullptr;
    PyTuple_SET_ITEM(sizes.get(), static_cast<Py_ssize_t>(at), size);
  }
  Kept body(made(memory_type, std::make_unique<Memory>(std::move(answer.body), answer.size)));
  if (!body) return nullptr;
  return Py_BuildValue("iOOn", answer.dtype, sizes.get(), body.get(),
                       static_cast<Py_ssize_t>(answer.size));
}

template <void (Lane::*Method)()>
PyObject* lane_run(PyObject* self, PyObject*) {
  return run_without_gil([&] { (inner<Lane>(self).*Method)(); });
}

template <void (Lane::*Method)(uint64_t)>
PyObject* lane_of_ticket(PyObject* self, PyObject* ticket) {
  const auto number = PyLong_AsUnsignedLongLong(ticket);
  if (PyErr_Occurred()) return nullptr;
  (inner<Lane>(self).*Method)(number);
  Py_RETURN_NONE;
}

PyObject* lane_traffic(PyObject* self, PyObject*) {
  Lane& lane = inner<Lane>(self);
  return Py_BuildValue("KKn", static_cast<unsigned long long>(lane.bytes_received),
                       static_cast<unsigned long long>(lane.bytes_sent),
                       static_cast<Py_ssize_t>(lane.num_coming()));
}

PyMethodDef lane_methods[] = {
    {"ask", lane_ask, METH_VARARGS, "ask(ticket, step, what, picks, key): post a question."},
    {"wait", lane_wait, METH_VARARGS,
     "wait(ticket, bound_s): (dtype, sizes, memory, bytes), or None where it was forgotten or "
     "has not come."},
    {"expect", lane_of_ticket<&Lane::expect>, METH_O, "expect(ticket): keep its answer."},
    {"forget", lane_of_ticket<&Lane::forget>, METH_O, "forget(ticket): let who waits go on."},
    {"receive", lane_run<&Lane::receive>, METH_NOARGS, "Return when the frame is for Python."},
    {"sweep", lane_run<&Lane::sweep>, METH_NOARGS, "Wait for what was posted, until `stop`."},
    {"stop", lane_run<&Lane::stop>, METH_NOARGS, "Let `sweep` end."},
    {"traffic", lane_traffic, METH_NOARGS, "(bytes received, bytes sent, answers waited for)."},
    {nullptr, nullptr, 0, nullptr}};

using Shared = std::shared_ptr<Table>;

PyObject* table_new(PyTypeObject* type, PyObject*, PyObject*) {
  return made(type, std::make_unique<Shared>(std::make_shared<Table>()));
}

PyObject* table_put(PyObject* self, PyObject* args) {
  const char* key;
  Py_ssize_t length;
  long long place;
  Py_ssize_t address;
  unsigned char dtype;
  if (!PyArg_ParseTuple(args, "s#Lnb", &key, &length, &place, &address, &dtype)) return nullptr;
  const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(
      reinterpret_cast<c10::TensorImpl*>(address)));
  const bool is_plain = tensor.layout() == at::kStrided && tensor.is_cpu() &&
                        tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
                        tensor.numel() > 0 && tensor.sizes().size() <= most_sizes;
  if (is_plain) {
    inner<Shared>(self)->put({key, static_cast<std::size_t>(length)}, place, tensor, dtype);
  }
  Py_RETURN_NONE;
}

PyObject* table_drop(PyObject* self, PyObject* key) {
  Py_ssize_t length;
  const char* text = PyUnicode_AsUTF8AndSize(key, &length);
  if (text == nullptr) return nullptr;
  inner<Shared>(self)->drop({text, static_cast<std::size_t>(length)});
  Py_RETURN_NONE;
}

PyObject* table_lane(PyObject* self, PyObject* args) {
  const char* group;
  int rank;
  Py_ssize_t frame;
  unsigned char ask, answer;
  unsigned long long most_bytes;
  if (!PyArg_ParseTuple(args, "sinbbK", &group, &rank, &frame, &ask, &answer, &most_bytes)) {
    return nullptr;
  }
  try {
    return made(lane_type, std::make_unique<Lane>(inner<Shared>(self), group, rank,
                                                  reinterpret_cast<char*>(frame), ask, answer,
                                                  most_bytes));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* table_count(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(inner<Shared>(self)->size());
}

PyMethodDef table_methods[] = {
    {"put", table_put, METH_VARARGS,
     "put(key, place, address of the TensorImpl, dtype): take a tensor that lies as it is sent."},
    {"drop", table_drop, METH_O, "drop(key)"},
    {"lane", table_lane, METH_VARARGS,
     "lane(group name, rank in it, address of the frame, kinds of ask and answer, most bytes)"},
    {"count", table_count, METH_NOARGS, "How many publications are in it."},
    {nullptr, nullptr, 0, nullptr}};

template <typename Inner>
PyTypeObject* new_type(const char* name, std::vector<PyType_Slot> slots, unsigned flags) {
  slots.push_back({Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Inner>)});
  slots.push_back({0, nullptr});
  PyType_Spec spec{name, sizeof(Object<Inner>), 0, static_cast<unsigned>(Py_TPFLAGS_DEFAULT | flags),
                   slots.data()};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace

bool add_lane(PyObject* module) {
  memory_type = new_type<Memory>(
      "nnsight_pp_thread_state.Memory",
      {{Py_bf_getbuffer, reinterpret_cast<void*>(memory_buffer)}},
      Py_TPFLAGS_DISALLOW_INSTANTIATION);
  lane_type = new_type<Lane>("nnsight_pp_thread_state.Lane", {{Py_tp_methods, lane_methods}},
                             Py_TPFLAGS_DISALLOW_INSTANTIATION);
  PyTypeObject* table_type = new_type<Shared>(
      "nnsight_pp_thread_state.PlainTensors",
      {{Py_tp_new, reinterpret_cast<void*>(table_new)}, {Py_tp_methods, table_methods}}, 0);
  return memory_type != nullptr && lane_type != nullptr && table_type != nullptr &&
         PyModule_AddType(module, table_type) == 0;
}

}  // namespace nnsight_pp

#endif
