// What of torch's thread-local state is exchanged, and how it is read, written and moved.
//
// Words are plain data: read, compared, written field by field. Held are the objects that own
// something: they are moved out of the thread and back into it, never copied, because C++ frames
// of a parked worker may refer to what they hold. thread_state.cpp has the table of what is where.

#pragma once

#include "compat.hpp"
#include "hidden_tls.hpp"

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace nnsight_pp {

using EntryKeys = std::optional<c10::impl::LocalDispatchKeySet>;
static_assert(std::is_trivially_copyable_v<EntryKeys>);

// ---------------------------------------------------------------------------------------------
// Where the state lives

inline HiddenVariable pybind_frame_variable{
    "libtorch_python.so",
    "_ZZN8pybind116detail19loader_life_support17tls_current_frameEvE9frame_ptr", sizeof(void*)};
inline HiddenVariable numbers_as_tensors_variable{
    "libtorch_python.so", "_ZN5torch3jitL24allow_numbers_as_tensorsE", sizeof(bool)};
inline HiddenVariable autocast_dtypes_variable{
    "libtorch_cpu.so", "_ZN2at8autocast12_GLOBAL__N_114autocast_dtypeE", compat::kNumDevices};
inline HiddenVariable autocast_nesting_variable{
    "libtorch_cpu.so", "_ZN2at8autocast12_GLOBAL__N_17nestingE", sizeof(int)};
inline HiddenVariable entry_keys_variable{
    "libtorch_cpu.so", "_ZN12_GLOBAL__N_112tls_on_entryE", sizeof(EntryKeys)};

// What autograd's engine keeps of the backward pass that this thread is in. A worker that parks
// in a backward hook is in the middle of one, and a backward pass of the model would join it.
inline HiddenVariable engine_variables[] = {
    {"libtorch_cpu.so", "_ZN5torch8autogradL13worker_deviceE", sizeof(int)},
    {"libtorch_cpu.so", "_ZN5torch8autogradL13current_depthE", sizeof(int)},
    {"libtorch_cpu.so", "_ZN5torch8autogradL11total_depthE", sizeof(int)},
    {"libtorch_cpu.so", "_ZN5torch8autogradL16checkpoint_validE", sizeof(bool)},
    {"libtorch_cpu.so", "_ZZNK5torch8autogradL21tls_local_ready_queueMUlvE_clEvE3var",
     sizeof(std::shared_ptr<void>)},
    {"libtorch_cpu.so", "_ZZNK5torch8autogradL22tls_current_graph_taskMUlvE_clEvE3var",
     sizeof(std::shared_ptr<void>)},
    {"libtorch_cpu.so", "_ZZNK5torch8autogradL27tls_current_evaluating_nodeMUlvE_clEvE3var",
     sizeof(void*)},
};
constexpr int kNoDevice = -2;  // torch/csrc/autograd/engine.cpp: in no backward pass

class Engine {
 public:
  Engine() {
    for (const HiddenVariable& variable : engine_variables) {
      if (variable.module_id == 0) return;
    }
    device_ = address<int>(0);
    current_depth_ = address<int>(1);
    total_depth_ = address<int>(2);
    checkpoint_valid_ = address<bool>(3);
    ready_queue_ = address<std::shared_ptr<void>>(4);
    graph_task_ = address<std::shared_ptr<void>>(5);
    node_ = address<void*>(6);
  }

  bool is_in_backward() const { return device_ != nullptr && *device_ != kNoDevice; }

  // The deleter of a shared_ptr is in its control block, so shared_ptr<void> moves any of them.
  // `node` is moved as the pointer it is, from its place and back to it.
  struct State {
    int device, current_depth, total_depth;
    bool checkpoint_valid;
    std::shared_ptr<void> ready_queue, graph_task;
    void* node;
  };

  State take() const {
    return {std::exchange(*device_, kNoDevice), std::exchange(*current_depth_, 0),
            std::exchange(*total_depth_, 0),    std::exchange(*checkpoint_valid_, true),
            std::move(*ready_queue_),           std::move(*graph_task_),
            std::exchange(*node_, nullptr)};
  }

  void put(State state) const {
    *device_ = state.device;
    *current_depth_ = state.current_depth;
    *total_depth_ = state.total_depth;
    *checkpoint_valid_ = state.checkpoint_valid;
    *ready_queue_ = std::move(state.ready_queue);
    *graph_task_ = std::move(state.graph_task);
    *node_ = state.node;
  }

 private:
  template <class T>
  static T* address(int index) {
    return static_cast<T*>(engine_variables[index].address());
  }

  int* device_ = nullptr;
  int* current_depth_ = nullptr;
  int* total_depth_ = nullptr;
  bool* checkpoint_valid_ = nullptr;
  std::shared_ptr<void>* ready_queue_ = nullptr;
  std::shared_ptr<void>* graph_task_ = nullptr;
  void** node_ = nullptr;
};

inline std::vector<HiddenVariable*> variables_without_accessor() {
  std::vector<HiddenVariable*> variables = {
      &pybind_frame_variable, &numbers_as_tensors_variable, &entry_keys_variable};
  for (HiddenVariable& variable : engine_variables) variables.push_back(&variable);
  return variables;
}

inline void find_hidden_variables() {
  for (HiddenVariable* variable : variables_without_accessor()) {
    find_hidden(*variable);
  }
  // These have accessors, too: found or not, all is exchanged.
  find_hidden(autocast_dtypes_variable);
  find_hidden(autocast_nesting_variable);
}

// Addresses of this thread's objects. Getters return const references to objects that are not
// const; they are moved in and out through these.
struct Places {
  c10::AutogradState* autograd;
  at::impl::PythonTorchFunctionTLS* function_modes;
  c10::impl::TorchDispatchModeTLS* dispatch_modes;
  at::impl::SavedTensorDefaultHooksTLS* saved_hooks;
  at::impl::ThreadLocalPythonObjects* python_objects;
  const at::RecordFunctionTLS* record_function;
  std::unique_ptr<at::functorch::FuncTorchTLSBase>* functorch;
  void** pybind_frame;  // this and the following may be null
  bool* numbers_as_tensors;
  EntryKeys* entry_keys;
  // These two for speed only: through the getters a round trip costs 0.12 us more.
  const std::int8_t* autocast_dtypes;
  int* autocast_nesting;
  Engine engine;
};

template <class T>
T* writable(const T& object) {
  return const_cast<T*>(&object);
}

inline const Places& places() {
  thread_local const Places here{
      &c10::AutogradState::get_tls_state(),
      writable(at::impl::PythonTorchFunctionTLS::get_state()),
      writable(c10::impl::TorchDispatchModeTLS::get_state()),
      writable(at::SavedTensorDefaultHooks::get_tls_state()),
      writable(at::impl::ThreadLocalPythonObjects::get_state()),
      &at::get_record_function_tls_(),
      &at::functorch::functorchTLSAccessor(),
      static_cast<void**>(pybind_frame_variable.address()),
      static_cast<bool*>(numbers_as_tensors_variable.address()),
      static_cast<EntryKeys*>(entry_keys_variable.address()),
      static_cast<const std::int8_t*>(autocast_dtypes_variable.address()),
      static_cast<int*>(autocast_nesting_variable.address()),
      Engine(),
  };
  return here;
}

// ---------------------------------------------------------------------------------------------
// Words: the part that is plain data

enum HeldBits : std::uint16_t {
  kFunctionModes = 1,
  kDispatchModes = 2,
  kSavedHooks = 4,
  kPythonObjects = 8,
  kDebugInfo = 16,
  kRecordFunction = 32,
  kFunctorch = 64,
  kExecGroup = 128,
  kNodeHooks = 256,
  kBackward = 512,
};

// Invariant: no padding, so that memcmp compares values; `unused` is zero.
struct Words {
  c10::WarningHandler* warning_handler;
  std::uint64_t included, excluded;  // as torch stores them: exclusive-or with the defaults
  c10::impl::PyInterpreter* python_dispatcher;
  void* pybind_frame;
  std::uint64_t entry_included, entry_excluded;
  std::int32_t autocast_nesting;
  std::uint16_t autograd;
  std::uint16_t held;  // HeldBits: which objects are not empty
  std::uint8_t function_state;
  bool skip_next, has_entry_keys, numbers_as_tensors, reapply_views, dtensor, autocast_cache;
  std::int8_t autocast_dtypes[compat::kNumDevices];
  std::int8_t unused[8 - (7 + compat::kNumDevices) % 8];

  bool operator==(const Words& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(std::is_trivially_copyable_v<Words>);
static_assert(std::has_unique_object_representations_v<Words>);

// True for an object whose bytes are all zero. For the two mode states that means: as they are
// made (checked at import). Their accessors cost 36 ns, and nearly always they are untouched.
template <class T>
bool is_untouched(const T& object) {
  static_assert(sizeof(T) % sizeof(std::uint64_t) == 0);
  std::uint64_t words[sizeof(T) / sizeof(std::uint64_t)];
  std::memcpy(words, &object, sizeof words);
  std::uint64_t any = 0;
  for (const std::uint64_t word : words) any |= word;
  return any == 0;
}
inline bool untouched_is_clean = false;  // set at import

inline void read(const Places& at, Words& out) {
  std::memset(out.unused, 0, sizeof out.unused);
  out.warning_handler = c10::WarningUtils::get_warning_handler();
  out.included = c10::impl::raw_local_dispatch_key_set.included_;
  out.excluded = c10::impl::raw_local_dispatch_key_set.excluded_;
  out.python_dispatcher = c10::impl::PythonDispatcherTLS::get_state();
  out.pybind_frame = at.pybind_frame != nullptr ? *at.pybind_frame : nullptr;
  out.numbers_as_tensors = at.numbers_as_tensors != nullptr && *at.numbers_as_tensors;
  out.has_entry_keys = at.entry_keys != nullptr && at.entry_keys->has_value();
  out.entry_included = out.has_entry_keys ? (*at.entry_keys)->included_.raw_repr() : 0;
  out.entry_excluded = out.has_entry_keys ? (*at.entry_keys)->excluded_.raw_repr() : 0;
  if (at.autocast_nesting != nullptr) {
    out.autocast_nesting = *at.autocast_nesting;
  } else {  // there is no getter; a pair of calls is one
    out.autocast_nesting = at::autocast::increment_nesting() - 1;
    at::autocast::decrement_nesting();
  }
  out.autocast_cache = at::autocast::is_autocast_cache_enabled();
  out.autograd = compat::autograd_bits(*at.autograd);
  bool has_function_modes = false;
  out.function_state = 0;
  out.skip_next = false;
  if (!untouched_is_clean || !is_untouched(*at.function_modes)) {
    has_function_modes = at::impl::PythonTorchFunctionTLS::stack_len() != 0;
    out.function_state =
        static_cast<std::uint8_t>(at::impl::PythonTorchFunctionTLS::get_disabled_state());
    out.skip_next = compat::peek_skip_next();
  }
  out.reapply_views = at::functionalization::impl::getFunctionalizationReapplyViewsTLS();
  out.dtensor = compat::dtensor_replication();
  if (at.autocast_dtypes != nullptr) {
    std::memcpy(out.autocast_dtypes, at.autocast_dtypes, sizeof out.autocast_dtypes);
  }
  for (int i = 0; at.autocast_dtypes == nullptr && i < compat::kNumDevices; ++i) {
    out.autocast_dtypes[i] = static_cast<std::int8_t>(
        at::autocast::get_autocast_dtype(static_cast<c10::DeviceType>(i)));
  }

  static_assert(sizeof(c10::ScalarType) == 1);

  unsigned held = has_function_modes ? kFunctionModes : 0;
  if ((!untouched_is_clean || !is_untouched(*at.dispatch_modes)) &&
      c10::impl::TorchDispatchModeTLS::stack_len() != 0) {
    held |= kDispatchModes;
  }
  const at::impl::SavedTensorDefaultHooksTLS& hooks = *at.saved_hooks;
  if (!hooks.stack.empty() || hooks.disabled_error_message.has_value() || hooks.is_tracing) {
    held |= kSavedHooks;
  }
  if (compat::has_python_objects(*at.python_objects)) held |= kPythonObjects;
  if (c10::ThreadLocalDebugInfo::current() != nullptr) held |= kDebugInfo;
  if (!at.record_function->sorted_tls_callbacks_.empty() ||
      !at.record_function->tls_record_function_enabled_) {
    held |= kRecordFunction;
  }
  if (*at.functorch != nullptr) held |= kFunctorch;
  if (compat::has_exec_group(*at.autograd)) held |= kExecGroup;
  if (!compat::NodeHooks::is_empty()) held |= kNodeHooks;
  if (at.engine.is_in_backward()) held |= kBackward;
  out.held = static_cast<std::uint16_t>(held);
}

// Make the thread's words `wanted`, knowing that they are `now`. Leaves held objects alone.
inline void write(const Places& at, const Words& now, const Words& wanted) {
  if (now.warning_handler != wanted.warning_handler) {
    c10::WarningUtils::set_warning_handler(wanted.warning_handler);
  }
  c10::impl::raw_local_dispatch_key_set.included_ = wanted.included;
  c10::impl::raw_local_dispatch_key_set.excluded_ = wanted.excluded;
  if (now.python_dispatcher != wanted.python_dispatcher) {
    c10::impl::PythonDispatcherTLS::set_state(wanted.python_dispatcher);
  }
  if (at.pybind_frame != nullptr) *at.pybind_frame = wanted.pybind_frame;
  if (at.numbers_as_tensors != nullptr) *at.numbers_as_tensors = wanted.numbers_as_tensors;
  if (at.entry_keys != nullptr) {
    if (wanted.has_entry_keys) {
      using c10::DispatchKeySet;
      c10::impl::LocalDispatchKeySet keys{c10::impl::PODLocalDispatchKeySet{}};
      keys.included_ = DispatchKeySet(DispatchKeySet::RAW, wanted.entry_included);
      keys.excluded_ = DispatchKeySet(DispatchKeySet::RAW, wanted.entry_excluded);
      *at.entry_keys = keys;
    } else {
      at.entry_keys->reset();
    }
  }
  for (int n = now.autocast_nesting; n < wanted.autocast_nesting; ++n) {
    at::autocast::increment_nesting();
  }
  for (int n = now.autocast_nesting; n > wanted.autocast_nesting; --n) {
    at::autocast::decrement_nesting();
  }
  if (now.autocast_cache != wanted.autocast_cache) {
    at::autocast::set_autocast_cache_enabled(wanted.autocast_cache);
  }
  if (now.autograd != wanted.autograd) compat::set_autograd_bits(*at.autograd, wanted.autograd);
  if (now.function_state != wanted.function_state) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        static_cast<at::impl::TorchFunctionDisabledState>(wanted.function_state));
  }
  if (now.skip_next != wanted.skip_next) compat::set_skip_next(wanted.skip_next);
  if (now.reapply_views != wanted.reapply_views) {
    at::functionalization::impl::setFunctionalizationReapplyViewsTLS(wanted.reapply_views);
  }
  if (now.dtensor != wanted.dtensor) compat::set_dtensor_replication(wanted.dtensor);
  for (int i = 0; i < compat::kNumDevices; ++i) {
    if (now.autocast_dtypes[i] == wanted.autocast_dtypes[i]) continue;
    at::autocast::set_autocast_dtype(static_cast<c10::DeviceType>(i),
                                     static_cast<c10::ScalarType>(wanted.autocast_dtypes[i]));
  }
}

// ---------------------------------------------------------------------------------------------
// Held: the part that owns something. Objects move between the thread and a Held.

class Held {
 public:
  // Move the objects of `bits` out of the thread, which is left without them.
  void take(const Places& at, unsigned bits) {
    if (bits & kFunctionModes) {
      // Only the stack is empty afterwards: the two flags beside it are words.
      const auto state = at::impl::PythonTorchFunctionTLS::get_disabled_state();
      const bool skip_next = compat::peek_skip_next();
      function_modes_ = std::exchange(*at.function_modes, {});
      at::impl::PythonTorchFunctionTLS::set_disabled_state(state);
      compat::set_skip_next(skip_next);
    }
    if (bits & kDispatchModes) dispatch_modes_ = std::exchange(*at.dispatch_modes, {});
    if (bits & kSavedHooks) saved_hooks_ = std::exchange(*at.saved_hooks, {});
    if (bits & kPythonObjects) python_objects_ = std::exchange(*at.python_objects, {});
    if (bits & kDebugInfo) {
      debug_info_ = c10::ThreadLocalDebugInfo::current();
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
    }
    if (bits & kRecordFunction) {
      record_function_ = at::get_record_function_tls_();
      at::set_record_function_tls_({});
    }
    if (bits & kFunctorch) functorch_ = std::move(*at.functorch);
    if (bits & kExecGroup) exec_group_ = compat::take_exec_group(*at.autograd);
    if (bits & kNodeHooks) node_hooks_ = compat::NodeHooks::take();
    if (bits & kBackward) backward_ = at.engine.take();
    bits_ |= bits;
  }

  // Move everything back into the thread.
  void put(const Places& at) {
    if (bits_ & kFunctionModes) {
      const auto state = at::impl::PythonTorchFunctionTLS::get_disabled_state();
      const bool skip_next = compat::peek_skip_next();
      *at.function_modes = std::move(*function_modes_);
      at::impl::PythonTorchFunctionTLS::set_disabled_state(state);
      compat::set_skip_next(skip_next);
      function_modes_.reset();
    }
    if (bits_ & kDispatchModes) {
      *at.dispatch_modes = std::move(*dispatch_modes_);
      dispatch_modes_.reset();
    }
    if (bits_ & kSavedHooks) {
      *at.saved_hooks = std::move(*saved_hooks_);
      saved_hooks_.reset();
    }
    if (bits_ & kPythonObjects) {
      *at.python_objects = std::move(*python_objects_);
      python_objects_.reset();
    }
    if (bits_ & kDebugInfo) {
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(debug_info_));
      debug_info_.reset();
    }
    if (bits_ & kRecordFunction) {
      at::set_record_function_tls_(*record_function_);
      record_function_.reset();
    }
    if (bits_ & kFunctorch) *at.functorch = std::move(functorch_);
    if (bits_ & kExecGroup) {
      compat::put_exec_group(*at.autograd, std::move(exec_group_));
      exec_group_.reset();
    }
    if (bits_ & kNodeHooks) {
      compat::NodeHooks::put(std::move(*node_hooks_));
      node_hooks_.reset();
    }
    if (bits_ & kBackward) {
      at.engine.put(std::move(*backward_));
      backward_.reset();
    }
    bits_ = 0;
  }

  bool empty() const { return bits_ == 0; }

 private:
  unsigned bits_ = 0;
  std::optional<at::impl::PythonTorchFunctionTLS> function_modes_;
  std::optional<c10::impl::TorchDispatchModeTLS> dispatch_modes_;
  std::optional<at::impl::SavedTensorDefaultHooksTLS> saved_hooks_;
  std::optional<at::impl::ThreadLocalPythonObjects> python_objects_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> debug_info_;
  std::optional<at::RecordFunctionTLS> record_function_;
  std::unique_ptr<at::functorch::FuncTorchTLSBase> functorch_;
  std::optional<c10::SafePyObject> exec_group_;
  std::optional<compat::NodeHooks::State> node_hooks_;
  std::optional<Engine::State> backward_;
};

// Check, on the words of a thread that has done nothing, what was assumed about torch above.
inline void check_assumptions(const Words& clean) {
  // kNoDevice is read from torch's source. If this torch has another, leave its engine alone.
  if ((clean.held & kBackward) != 0) {
    for (HiddenVariable& variable : engine_variables) variable.module_id = 0;
  }
  untouched_is_clean = clean.function_state == 0 && !clean.skip_next &&
                       (clean.held & (kFunctionModes | kDispatchModes)) == 0 &&
                       is_untouched(at::impl::PythonTorchFunctionTLS::get_state());
}

}  // namespace nnsight_pp
