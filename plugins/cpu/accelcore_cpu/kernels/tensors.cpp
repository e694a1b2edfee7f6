// torch's tensors, looked at where they are. To ask Python for the memory of each takes longer than a small update.
//
// What Python calls `_cdata` is the address of a TensorImpl, which torch's headers describe.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <vector>

namespace {

using Impl = c10::TensorImpl;
using Held = c10::intrusive_ptr<Impl, c10::UndefinedTensorImpl>;  // all that a tensor of torch's consists of

enum Found { ALL, REPLACED, UNLIKE };

// Always inlined: a call of what only asks would be taken for one of what does nothing, and left out.
[[gnu::always_inline]] inline void ask_for(const void* object, size_t size) {
  for (size_t n = 0; object && n < size; n += 64) __builtin_prefetch(static_cast<const char*>(object) + n);
}
[[gnu::always_inline]] inline void ask_for(const Impl& tensor) { ask_for(&tensor, sizeof tensor); }
[[gnu::always_inline]] inline void ask_for_memory(const Impl& tensor) {
  ask_for(tensor.unsafe_storage().unsafeGetStorageImpl(), 64);
}

const Held& gradient_of(Impl& value) { return reinterpret_cast<const Held&>(value.grad()); }

// What a tensor consists of is spread over memory, in no cache, and one part leads to the next. So each tensor is
// looked at in stages: while one is at the last, those after it are at the stages before.
template <class... Stages>
void in_stages(const std::vector<Impl*>& tensors, const Stages&... stages) {
  constexpr long apart = 4, count = sizeof...(Stages);
  const long size = tensors.size();
  for (long begin = 0; begin < size + (count - 1) * apart; begin++) {
    long n = begin;
    ((n >= 0 && n < size ? stages(n) : void(), n -= apart), ...);
  }
}

int64_t address(Impl& tensor) { return tensor.numel() ? reinterpret_cast<int64_t>(tensor.mutable_data()) : 0; }

// Dense on the CPU, and no object of Python's that looks like a tensor.
bool is_plain(const Impl& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == c10::kStrided && tensor.is_cpu();
}

// Python's tensors can be given each other's TensorImpl (torch.utils.swap_tensors), and the old one is freed. To hold it
// would forbid that. So Python's object, which lives as long as who asks, is asked which one it has.
struct Values {
  std::vector<const char*> objects;
  long offset;  // of the address of the TensorImpl, in bytes

  bool are(const std::vector<Impl*>& known) const {
    constexpr size_t apart = 16;
    for (size_t n = 0; n < objects.size(); n++) {
      __builtin_prefetch(objects[std::min(n + apart, objects.size() - 1)] + offset);
      if (*reinterpret_cast<Impl* const*>(objects[n] + offset) != known[n]) return false;
    }
    return true;
  }
};

struct Tensors {
  Values python;
  std::vector<Impl*> values, states;
  std::vector<Held> held;  // the states
  std::vector<int64_t> value_addresses, state_addresses;
  std::vector<bool> waits;
  std::vector<Held> gradients;  // kept while they are in use

  Found find(void** found) {
    if (!python.are(values)) return REPLACED;
    bool same = true, alike = true;
    gradients.assign(values.size(), Held());
    in_stages(
        states, [&](long n) { ask_for(*states[n]); }, [&](long n) { ask_for_memory(*states[n]); },
        [&](long n) { same = same && address(*states[n]) == state_addresses[n]; });
    in_stages(
        values, [&](long n) { ask_for(*values[n]); },
        [&](long n) { ask_for_memory(*values[n]), ask_for(values[n]->autograd_meta(), 64); },
        [&](long n) { ask_for(*(gradients[n] = gradient_of(*values[n]))); },
        [&](long n) { ask_for_memory(*gradients[n]); },
        [&](long n) {
          Impl& value = *values[n];
          const Held& gradient = gradients[n];
          same = same && address(value) == value_addresses[n] && !(gradient.defined() && waits[n]);
          found[n] = nullptr;
          if (!gradient.defined()) return;
          if (!is_plain(*gradient) || gradient->dtype() != value.dtype() || gradient->strides() != value.strides())
            alike = false;
          else
            found[n] = gradient->numel() ? gradient->mutable_data() : this;  // any address, if there is nothing there
        });
    return !same ? REPLACED : alike ? ALL : UNLIKE;
  }

  void updated(void* const* found) {
    for (size_t n = 0; n < values.size(); n++)
      if (found[n]) values[n]->bump_version();
    gradients.clear();
  }
};

}  // namespace

extern "C" {

// `objects` and `offset`: Python's objects of the values, and where in them the address of a TensorImpl is. Null where
// there is not enough memory.
void* tensors_new(const char* const* objects, long offset, const int64_t* values, const int64_t* value_addresses, const bool* waits, long value_count,
                  const int64_t* states, const int64_t* state_addresses, long state_count) noexcept try {
  auto* tensors = new Tensors;
  tensors->python.objects.assign(objects, objects + value_count);
  tensors->python.offset = offset;
  for (long n = 0; n < value_count; n++) tensors->values.push_back(reinterpret_cast<Impl*>(values[n]));
  for (long n = 0; n < state_count; n++) {
    tensors->states.push_back(reinterpret_cast<Impl*>(states[n]));
    tensors->held.push_back(Held::unsafe_reclaim_from_nonowning(tensors->states.back()));
  }
  tensors->value_addresses.assign(value_addresses, value_addresses + value_count);
  tensors->state_addresses.assign(state_addresses, state_addresses + state_count);
  tensors->waits.assign(waits, waits + value_count);
  return tensors;
} catch (...) {
  return nullptr;
}

void tensors_free(void* tensors) noexcept { delete static_cast<Tensors*>(tensors); }

// Where the gradient of each value is, null where it has none. REPLACED: a value or state has other memory than it had,
// or one that was waiting for its first gradient has it. UNLIKE: a gradient is not laid out as its value.
int tensors_find(void* tensors, void** found) noexcept try {
  return static_cast<Tensors*>(tensors)->find(found);
} catch (...) {
  return REPLACED;  // not all was looked at
}

// Tells autograd that the values which had a gradient were changed.
bool tensors_updated(void* tensors, void* const* found) noexcept try {
  static_cast<Tensors*>(tensors)->updated(found);
  return true;
} catch (...) {
  return false;
}
}
