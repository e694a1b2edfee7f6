// torch's tensors, looked at where they are. To ask Python for the memory of each takes longer than a small update.
//
// What Python calls `_cdata` is the address of a TensorImpl, which torch's headers describe.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <vector>

namespace {

using Impl = c10::TensorImpl;
using Held = c10::intrusive_ptr<Impl, c10::UndefinedTensorImpl>;  // all that a tensor of torch's consists of

enum Found { ALL, REPLACED, UNLIKE };

// Tensors are spread over memory, and each is waited for unless it was asked for before.
void ask_for(const std::vector<Impl*>& tensors, size_t number) {
  constexpr size_t ahead = 8;
  if (number + ahead >= tensors.size()) return;
  const char* const tensor = reinterpret_cast<const char*>(tensors[number + ahead]);
  for (size_t n = 0; n < sizeof(Impl); n += 64) __builtin_prefetch(tensor + n);
}

int64_t address(Impl& tensor) { return tensor.numel() ? reinterpret_cast<int64_t>(tensor.mutable_data()) : 0; }

// Dense on the CPU, and no object of Python's that looks like a tensor.
bool is_plain(const Impl& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == c10::kStrided && tensor.is_cpu();
}

struct Tensors {
  std::vector<Impl*> values, states;
  std::vector<int64_t> value_addresses, state_addresses;
  std::vector<bool> waits;
  std::vector<Held> gradients;  // kept while they are in use

  Found find(void** found) {
    gradients.clear();
    for (size_t n = 0; n < states.size(); n++) {
      ask_for(states, n);
      if (address(*states[n]) != state_addresses[n]) return REPLACED;
    }
    bool alike = true;  // one that is not must not keep a later value from being looked at
    for (size_t n = 0; n < values.size(); n++) {
      ask_for(values, n);
      Impl& value = *values[n];
      if (address(value) != value_addresses[n]) return REPLACED;
      const Held& gradient = reinterpret_cast<const Held&>(value.grad());
      gradients.push_back(gradient);
      found[n] = nullptr;
      if (!gradient.defined()) continue;
      if (waits[n]) return REPLACED;
      if (!is_plain(*gradient) || gradient->dtype() != value.dtype() || gradient->strides() != value.strides())
        alike = false;
      else
        found[n] = gradient->numel() ? gradient->mutable_data() : this;  // any address, where there is nothing to read
    }
    return alike ? ALL : UNLIKE;
  }

  void updated(void* const* found) {
    for (size_t n = 0; n < values.size(); n++)
      if (found[n]) values[n]->bump_version();
    gradients.clear();
  }
};

}  // namespace

extern "C" {

// Null where there is not enough memory.
void* tensors_new(const int64_t* values, const int64_t* value_addresses, const bool* waits, long value_count,
                  const int64_t* states, const int64_t* state_addresses, long state_count) noexcept try {
  auto* tensors = new Tensors;
  for (long n = 0; n < value_count; n++) tensors->values.push_back(reinterpret_cast<Impl*>(values[n]));
  for (long n = 0; n < state_count; n++) tensors->states.push_back(reinterpret_cast<Impl*>(states[n]));
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
