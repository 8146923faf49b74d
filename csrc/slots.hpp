// Python objects seen from C++: references that are given back, and slots found by their names.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <structmember.h>

#include <array>
#include <utility>

namespace nnsight_pp {

// A reference that is given back when it goes out of scope.
class Kept {
 public:
  Kept() = default;
  // Takes over a new reference, or null.
  explicit Kept(PyObject* owned) : object_(owned) {}
  static Kept borrowed(PyObject* object) { return Kept(Py_XNewRef(object)); }
  Kept(Kept&& other) noexcept : object_(other.release()) {}
  Kept& operator=(Kept&& other) noexcept {
    PyObject* before = std::exchange(object_, other.release());
    Py_XDECREF(before);
    return *this;
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The slots of one Python class, in the order of their names.
template <std::size_t Count>
class Slots {
 public:
  explicit constexpr Slots(std::array<const char*, Count> names) : names_(names) {}

  // Find them in `type`; false with an error set.
  bool find(PyObject* type) {
    for (std::size_t at = 0; at < Count; ++at) {
      Kept member(PyObject_GetAttrString(type, names_[at]));
      if (!member) return false;
      if (Py_TYPE(member.get()) != &PyMemberDescr_Type) {
        PyErr_Format(PyExc_TypeError, "%s is no slot", names_[at]);
        return false;
      }
      offsets_[at] = reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member->offset;
    }
    Kept before(std::exchange(type_, Py_NewRef(type)));
    return true;
  }

  bool is_of(PyObject* object) const {
    return object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) == type_;
  }

  // What is in a slot (borrowed), or null where it is None or empty.
  PyObject* at(PyObject* object, std::size_t slot) const {
    PyObject* value = place(object, slot);
    return value == Py_None ? nullptr : value;
  }
  bool is_true(PyObject* object, std::size_t slot) const { return place(object, slot) == Py_True; }

  void set(PyObject* object, std::size_t slot, PyObject* value) const {
    Kept before(std::exchange(place(object, slot), Py_NewRef(value)));
  }

  // Return a new object with `values` in its slots, or null with an error set. Every slot is
  // filled, as its `__init__` does.
  PyObject* make(const std::array<PyObject*, Count>& values) const {
    auto* type = reinterpret_cast<PyTypeObject*>(type_);
    PyObject* object = type->tp_alloc(type, 0);
    if (object == nullptr) return nullptr;
    for (std::size_t at = 0; at < Count; ++at) place(object, at) = Py_NewRef(values[at]);
    return object;
  }

 private:
  PyObject*& place(PyObject* object, std::size_t slot) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets_[slot]);
  }

  std::array<const char*, Count> names_;
  std::array<Py_ssize_t, Count> offsets_{};
  PyObject* type_ = nullptr;  // never given back: torch and Python may be gone by then
};

}  // namespace nnsight_pp
