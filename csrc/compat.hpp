// What differs between versions of torch and CPython, and what torch keeps but has no header for.
//
// Only this file knows versions. Where the language can ask ("does AutogradState have this
// getter?") it asks, so that a newer or older torch needs no number here. Functions that are
// exported by libtorch_cpu but stand in headers that pull in all operators (4 s of compile time)
// are declared by hand; a changed signature fails to link at import, which load() reports.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/ThreadLocalState.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/version.h>
#endif

#if __has_include(<ATen/DTensorState.h>)
#include <ATen/DTensorState.h>
#define NNSIGHT_PP_HAS_DTENSOR_STATE 1
#else
#define NNSIGHT_PP_HAS_DTENSOR_STATE 0
#endif

#if __has_include(<ATen/NodeCreationHooks.h>)
#include <ATen/NodeCreationHooks.h>
#define NNSIGHT_PP_HAS_NODE_HOOKS 1
#else
#define NNSIGHT_PP_HAS_NODE_HOOKS 0
#endif

// Declared by hand: ATen/autocast_mode.h and ATen/FunctionalTensorWrapper.h include ATen/ATen.h.
namespace at::autocast {
TORCH_API c10::ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API void set_autocast_dtype(c10::DeviceType device_type, c10::ScalarType dtype);
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
}  // namespace at::autocast
namespace at::functionalization::impl {
TORCH_API bool getFunctionalizationReapplyViewsTLS();
TORCH_API void setFunctionalizationReapplyViewsTLS(bool reapply_views);
}  // namespace at::functionalization::impl

namespace nnsight_pp::compat {

// Devices that have an autocast dtype; the same bound as ThreadLocalState's own array.
inline constexpr int kNumDevices = static_cast<int>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

// The torch versions whose every per-thread field thread_state.cpp has been checked to exchange,
// with the size of at::ThreadLocalState there. Under any other, full snapshots are taken at every
// switch, which is slower (csrc/README.md) and covers what that version's own class covers. To add
// one: read its ATen/ThreadLocalState.h, extend Words or Held if needed, run the tests.
struct CheckedVersion {
  int major, minor;
  std::size_t state_bytes;
};
inline constexpr std::array<CheckedVersion, 2> kCheckedVersions = {{{2, 13, 464}, {2, 14, 496}}};
inline constexpr bool state_is_known() {
  for (const CheckedVersion& checked : kCheckedVersions) {
    if (checked.major == TORCH_VERSION_MAJOR && checked.minor == TORCH_VERSION_MINOR &&
        checked.state_bytes == sizeof(at::ThreadLocalState)) {
      return true;
    }
  }
  return false;
}

// AutogradState as bits. Fields that this torch lacks read as 0 and are not written.
template <class State>
std::uint16_t autograd_bits(const State& state) {
  unsigned bits = 0;
  if (state.get_grad_mode()) bits |= 1U;
  if (state.get_inference_mode()) bits |= 2U;
  if (state.get_fw_grad_mode()) bits |= 4U;
  if (state.get_multithreading_enabled()) bits |= 8U;
  if (state.get_view_replay_enabled()) bits |= 16U;
  if constexpr (requires { state.get_grad_layout_enforcement_enabled(); }) {
    if (state.get_grad_layout_enforcement_enabled()) bits |= 32U;
  }
  return static_cast<std::uint16_t>(bits);
}

template <class State>
void set_autograd_bits(State& state, unsigned bits) {
  state.set_grad_mode((bits & 1U) != 0);
  state.set_inference_mode((bits & 2U) != 0);
  state.set_fw_grad_mode((bits & 4U) != 0);
  state.set_multithreading_enabled((bits & 8U) != 0);
  state.set_view_replay_enabled((bits & 16U) != 0);
  if constexpr (requires { state.set_grad_layout_enforcement_enabled(true); }) {
    state.set_grad_layout_enforcement_enabled((bits & 32U) != 0);
  }
}

template <class State>
bool has_exec_group(const State& state) {
  if constexpr (requires { state.get_graph_exec_group(); }) {
    return state.get_graph_exec_group().has_value();
  } else {
    return false;
  }
}

template <class State>
std::optional<c10::SafePyObject> take_exec_group(State& state) {
  if constexpr (requires { state.get_graph_exec_group(); }) {
    std::optional<c10::SafePyObject> group = state.get_graph_exec_group();
    state.set_graph_exec_group(std::nullopt);
    return group;
  } else {
    return std::nullopt;
  }
}

template <class State>
void put_exec_group(State& state, std::optional<c10::SafePyObject> group) {
  if constexpr (requires { state.set_graph_exec_group(std::move(group)); }) {
    state.set_graph_exec_group(std::move(group));
  }
}

// `skip_next` of __torch_function__ came after the rest of its state.
template <class Function = at::impl::PythonTorchFunctionTLS>
bool peek_skip_next() {
  if constexpr (requires { Function::peek_skip_next(); }) return Function::peek_skip_next();
  return false;
}
template <class Function = at::impl::PythonTorchFunctionTLS>
void set_skip_next(bool skip) {
  if constexpr (requires { Function::exchange_skip_next(skip); }) {
    Function::exchange_skip_next(skip);
  }
}

inline bool dtensor_replication() {
#if NNSIGHT_PP_HAS_DTENSOR_STATE
  return at::get_dtensor_allow_implicit_replication();
#else
  return false;
#endif
}
inline void set_dtensor_replication([[maybe_unused]] bool allowed) {
#if NNSIGHT_PP_HAS_DTENSOR_STATE
  at::set_dtensor_allow_implicit_replication(allowed);
#endif
}

// Hooks on the creation of autograd nodes: since 2.14.
struct NodeHooks {
#if NNSIGHT_PP_HAS_NODE_HOOKS
  using State = at::impl::NodeCreationHooksTLS;
  static State& state() { return const_cast<State&>(at::impl::NodeCreationHooks::get_tls_state()); }
  static bool is_empty() { return state().stack.empty() && !state().is_firing; }
  static State take() { return std::exchange(state(), State{}); }
  static void put(State hooks) { state() = std::move(hooks); }
#else
  struct State {};
  static bool is_empty() { return true; }
  static State take() { return {}; }
  static void put(State) {}
#endif
};

// The one member of ThreadLocalPythonObjects is private and has no size(); the class is its map.
inline bool has_python_objects(const at::impl::ThreadLocalPythonObjects& objects) {
  using Map = std::unordered_map<std::string, std::shared_ptr<c10::SafePyObject>>;
  static_assert(sizeof(Map) == sizeof(at::impl::ThreadLocalPythonObjects));
  return !reinterpret_cast<const Map&>(objects).empty();
}

// PEP 523. Dynamo replaces the evaluator only while some thread has a callback.
inline bool evaluator_is_replaced() {
  return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault;
}

}  // namespace nnsight_pp::compat
