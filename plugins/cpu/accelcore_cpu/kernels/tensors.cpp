// What tensors are now, as torch tells by DLPack's exchange API: address, device, type, sizes and strides. The same
// questions in Python take ten times as long.
//
// The functions below call into torch and hold Python's lock. If torch raises, Python's error is set.
#include <ATen/dlpack.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using Object = void*;  // a tensor of Python's, which whoever asks keeps alive
using Look = DLPackDLTensorFromPyObjectNoSync;

enum Found { ALL, REPLACED, UNLIKE };

bool is_empty(const DLTensor& tensor) {
  return std::count(tensor.shape, tensor.shape + tensor.ndim, 0) > 0;
}

// How a tensor lay in memory when it was first looked at. Its sizes, and after them its strides, are from `first` on.
struct Layout {
  void* data;
  DLDevice device;
  DLDataType type;
  int32_t dimensions;
  bool empty;
  size_t first;
  const void* beside;  // where torch keeps it, to ask for that memory early; never read
};

struct Tensors {
  Look look;
  std::vector<Object> objects;
  std::vector<bool> waits;  // of values, which come first
  std::vector<Layout> layouts = {};
  std::vector<int64_t> numbers = {};

  void add(const DLTensor& tensor) {
    layouts.push_back({tensor.data, tensor.device, tensor.dtype, tensor.ndim, is_empty(tensor), numbers.size(),
                       tensor.shape});
    numbers.insert(numbers.end(), tensor.shape, tensor.shape + tensor.ndim);
    numbers.insert(numbers.end(), tensor.strides, tensor.strides + tensor.ndim);
  }

  bool is_alike(const DLTensor& now, const Layout& known) const {
    const int64_t* const sizes = numbers.data() + known.first;
    return now.ndim == known.dimensions && now.device.device_type == known.device.device_type &&
           now.dtype.code == known.type.code && now.dtype.bits == known.type.bits &&
           now.dtype.lanes == known.type.lanes && std::equal(now.shape, now.shape + now.ndim, sizes) &&
           std::equal(now.strides, now.strides + now.ndim, sizes + now.ndim);
  }

  Found find(const Object* gradients, Object none, void** addresses) {
    if (!unchanged()) return REPLACED;
    Found found = ALL;
    DLTensor now;
    for (size_t n = 0; n < waits.size(); n++) {
      addresses[n] = nullptr;
      if (gradients[n] == none) continue;
      if (waits[n] || look(gradients[n], &now)) return REPLACED;
      const Layout& value = layouts[n];
      if (!is_alike(now, value) || !(now.data || value.empty)) found = UNLIKE;
      addresses[n] = value.empty ? this : now.data;
    }
    return found;
  }

 private:
  bool unchanged() const {
    constexpr size_t apart = 8;
    DLTensor now;
    for (size_t n = 0; n < objects.size(); n++) {
      const size_t later = std::min(n + apart, objects.size() - 1);
      __builtin_prefetch(objects[later]);
      for (long line = -1; line < 3; line++) __builtin_prefetch(static_cast<const char*>(layouts[later].beside) + 64 * line);
      if (look(objects[n], &now) || now.data != layouts[n].data || !is_alike(now, layouts[n])) return false;
    }
    return true;
  }
};

}  // namespace

extern "C" {

// The first tensors are values, as many as there are `waits`: whether a value has had no gradient yet. Null if torch
// raised, or if there is not enough memory.
void* tensors_new(const DLPackExchangeAPI* api, const Object* objects, long count, const bool* waits,
                  long value_count) noexcept try {
  auto* tensors = new Tensors{api->dltensor_from_py_object_no_sync, std::vector<Object>(objects, objects + count),
                              std::vector<bool>(waits, waits + value_count)};
  DLTensor now;
  for (Object object : tensors->objects) {
    if (tensors->look(object, &now)) return delete tensors, nullptr;
    tensors->add(now);
  }
  return tensors;
} catch (...) {
  return nullptr;
}

void tensors_free(void* tensors) noexcept { delete static_cast<Tensors*>(tensors); }

// The address of each value's gradient: null for `none`, and any if it has no elements. REPLACED: a tensor has other
// memory or another layout than it had, a value that waited has a gradient, or torch raised. UNLIKE: a gradient is not
// laid out as its value, or has no memory.
int tensors_find(void* tensors, const Object* gradients, Object none, void** addresses) noexcept {
  return static_cast<Tensors*>(tensors)->find(gradients, none, addresses);
}
}
