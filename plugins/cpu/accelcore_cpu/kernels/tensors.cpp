// What tensors are now, read from torch's objects: address, memory, device, type, sizes, strides, and bits of views.
// Asked in Python, the same questions take twenty times as long.
//
// The functions below hold Python's lock.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
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

  void add(Object* tensor) {
    if (tensor->layout() != c10::kStrided || !tensor->has_storage()) return layouts.push_back({});
    const auto sizes = tensor->sizes(), strides = tensor->strides();
    int64_t last = 0;
    for (size_t n = 0; n < sizes.size(); n++) last += (sizes[n] - 1) * strides[n];
    layouts.push_back({true, tensor->mutable_data(), tensor->device_type(), tensor->dtype(), sizes.size(),
                       numbers.size(), tensor->is_empty() ? 0 : (last + 1) * tensor->itemsize(),
                       tensor->unsafe_storage().unsafeGetStorageImpl()});
    numbers.insert(numbers.end(), sizes.begin(), sizes.end());
    numbers.insert(numbers.end(), strides.begin(), strides.end());
  }

  Found find(Object* const* given, void** addresses) {
    release();
    if (!std::equal(objects.begin(), objects.end(), given)) return REPLACED;  // only now all are known to be alive
    gradients.resize(waits.size());
    Found found = ALL;
    for (size_t n = 0; n < objects.size(); n++) {
      ask_ahead(n);
      if (!is_unchanged(n)) return REPLACED;
      if (n >= waits.size()) continue;
      if (!find_gradient(n, addresses[n])) found = UNLIKE;
      if (waits[n] && gradients[n].defined()) return REPLACED;
    }
    return found;
  }

  // Tells autograd that the values change whose gradients have an address.
  void bump_versions(void* const* addresses) const {
    for (size_t n = 0; n < waits.size(); n++)
      if (addresses[n] && !objects[n]->is_inference()) objects[n]->bump_version();
  }

  // Holds the gradients no longer.
  void release() {
    for (size_t n = 0; n < gradients.size(); n++) {
      __builtin_prefetch(gradients[std::min(n + APART, gradients.size() - 1)].unsafeGetTensorImpl(), 1);
      gradients[n].reset();
    }
    gradients.clear();
  }

 private:
  static constexpr size_t APART = 12;  // tensors: how far before its use an object is asked for

  static void ask(const void* object, long lines) {
    for (long line = 0; line < lines; line++) __builtin_prefetch(static_cast<const char*>(object) + 64 * line);
  }

  // Objects in several stages, because each has the address of the next.
  void ask_ahead(size_t n) const {
    const auto later = [&](size_t stages) { return std::min(n + stages * APART, objects.size() - 1); };
    ask(objects[later(3)], 4);
    ask(layouts[later(2)].beside, 1);
    if (later(2) < waits.size()) ask(objects[later(2)]->autograd_meta(), 1);
    if (later(1) < waits.size()) ask(objects[later(1)]->grad().unsafeGetTensorImpl(), 4);
  }

  // False: there is one that is not laid out as its value.
  bool find_gradient(size_t n, void*& address) {
    address = nullptr;
    gradients[n] = objects[n]->grad();
    if (!gradients[n].defined()) return true;
    Object& gradient = *gradients[n].unsafeGetTensorImpl();
    if (!is_alike(gradient, layouts[n])) return false;
    address = layouts[n].bytes ? gradient.mutable_data() : this;
    return true;
  }

  bool is_unchanged(size_t n) const {
    const Layout& known = layouts[n];
    return !known.read || (is_alike(*objects[n], known) && objects[n]->mutable_data() == known.data);
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
           now.unsafe_storage().nbytes() >= now.storage_offset() * now.itemsize() + known.bytes;
  }
};

}  // namespace

extern "C" {

// The first objects are values, as many as there are `waits`: whether a value has had no gradient yet. Null where there
// is not enough memory.
void* tensors_new(Object* const* objects, long count, const bool* waits, long value_count) noexcept try {
  auto tensors = std::make_unique<Tensors>();
  tensors->objects.assign(objects, objects + count), tensors->waits.assign(waits, waits + value_count);
  for (Object* object : tensors->objects) tensors->add(object);
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

void tensors_bump_versions(void* tensors, void* const* addresses) noexcept {
  static_cast<Tensors*>(tensors)->bump_versions(addresses);
}

void tensors_release(void* tensors) noexcept { static_cast<Tensors*>(tensors)->release(); }
}
