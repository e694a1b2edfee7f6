// What tensors are now, read from torch's objects: address, memory, device, type, sizes, strides, and bits of views.
// Asked in Python, the same questions take twenty times as long.
//
// The functions below hold Python's lock.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace {

using Object = c10::TensorImpl;  // what is behind a tensor of Python's, whose `_cdata` is its address

enum Found { ALL, REPLACED, UNLIKE };

// How a tensor lay in memory when it was first looked at. Its sizes, and after them its strides, are from `first` on.
struct Layout {
  bool read;  // false: it is sparse, and no kernel reads it
  void* data;
  c10::DeviceType device;
  caffe2::TypeMeta type;
  size_t dimensions, first;
  size_t bytes;        // from its first element to the end of its last
  const void* beside;  // where torch describes its memory, to ask for that early; never read
};

struct Tensors {
  std::vector<Object*> objects;
  std::vector<bool> waits;  // of values, which come first
  std::vector<Layout> layouts;
  std::vector<int64_t> numbers;
  std::vector<at::Tensor> gradients;  // of this step, whose memory has to stay

  void add(Object& tensor) {
    if (tensor.layout() != c10::kStrided || !tensor.has_storage()) return layouts.push_back({});
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    int64_t last = 0;
    for (size_t n = 0; n < sizes.size(); n++) last += (sizes[n] - 1) * strides[n];
    layouts.push_back({true, tensor.mutable_data(), tensor.device_type(), tensor.dtype(), sizes.size(), numbers.size(),
                       tensor.is_empty() ? 0 : (last + 1) * tensor.itemsize(), tensor.storage().unsafeGetStorageImpl()});
    numbers.insert(numbers.end(), sizes.begin(), sizes.end());
    numbers.insert(numbers.end(), strides.begin(), strides.end());
  }

  Found find(Object* const* given, void** addresses) {
    if (!unchanged(given)) return REPLACED;
    Found found = ALL;
    gradients.resize(waits.size());
    for (size_t n = 0; n < waits.size(); n++) {
      ask(objects[std::min(n + 2 * APART, waits.size() - 1)]->grad().unsafeGetTensorImpl());
      addresses[n] = nullptr;
      gradients[n] = objects[n]->grad();
      if (!gradients[n].defined()) continue;
      if (waits[n]) return REPLACED;
      Object& gradient = *gradients[n].unsafeGetTensorImpl();
      if (!is_alike(gradient, layouts[n]))
        found = UNLIKE;
      else
        addresses[n] = layouts[n].bytes ? gradient.mutable_data() : this;
    }
    return found;
  }

  std::span<Object* const> values() const { return {objects.data(), waits.size()}; }

 private:
  static constexpr size_t APART = 8;  // tensors: how far before its use an object is asked for

  static void ask(const Object* object) {
    for (long line = 0; line < 4; line++) __builtin_prefetch(reinterpret_cast<const char*>(object) + 64 * line);
  }

  bool unchanged(Object* const* given) const {
    if (!std::equal(objects.begin(), objects.end(), given)) return false;
    for (size_t n = 0; n < objects.size(); n++) {
      const size_t later = std::min(n + APART, objects.size() - 1);
      __builtin_prefetch(layouts[later].beside);
      ask(objects[later]);
      __builtin_prefetch(objects[n]->autograd_meta());
      const Layout& known = layouts[n];
      if (!known.read) continue;
      if (!is_alike(*objects[n], known) || objects[n]->mutable_data() != known.data) return false;
    }
    return true;
  }

  // Also: whether the memory holds all of it, as values without a sign of their own.
  bool is_alike(const Object& now, const Layout& known) const {
    if (now.layout() != c10::kStrided || !now.has_storage()) return false;
    const int64_t* const sizes = numbers.data() + known.first;
    const auto its = now.sizes(), strides = now.strides();
    return its.size() == known.dimensions && now.device_type() == known.device && now.dtype() == known.type &&
           std::equal(its.begin(), its.end(), sizes) &&
           std::equal(strides.begin(), strides.end(), sizes + known.dimensions) &&
           !now.is_neg() && !now.is_conj() && !now._is_zerotensor() &&
           now.storage().nbytes() >= now.storage_offset() * now.itemsize() + known.bytes;
  }
};

}  // namespace

extern "C" {

// The first objects are values, as many as there are `waits`: whether a value has had no gradient yet. Null where there
// is not enough memory.
void* tensors_new(Object* const* objects, long count, const bool* waits, long value_count) noexcept try {
  auto tensors = std::make_unique<Tensors>();
  tensors->objects.assign(objects, objects + count), tensors->waits.assign(waits, waits + value_count);
  for (Object* object : tensors->objects) tensors->add(*object);
  return tensors.release();
} catch (...) {
  return nullptr;
}

void tensors_free(void* tensors) noexcept { delete static_cast<Tensors*>(tensors); }

// The address of each value's gradient: null for none, and any if it has no elements. REPLACED: an object is another, a
// tensor has other memory or another layout than it had, or a value that waited has a gradient. UNLIKE: a gradient is
// not laid out as its value, or has no memory.
int tensors_find(void* tensors, Object* const* objects, void** addresses) noexcept try {
  return static_cast<Tensors*>(tensors)->find(objects, addresses);
} catch (...) {
  return REPLACED;
}

// Tells autograd that the values change whose gradients have an address.
void tensors_bump_versions(void* tensors, void* const* addresses) noexcept {
  for (Object* object : static_cast<Tensors*>(tensors)->values()) {
    if (*addresses++ && !object->is_inference()) object->bump_version();
  }
}

// Holds the gradients no longer.
void tensors_release(void* tensors) noexcept { static_cast<Tensors*>(tensors)->gradients.clear(); }
}
