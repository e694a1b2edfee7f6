// What tensors are now, read from torch's objects: address, memory, device, type, sizes, strides, and bits of views.
// Asked in Python, the same questions take twenty times as long.
//
// The functions below hold Python's lock. Most of their time goes to objects that are in no cache, so each object is
// asked for while those before it are looked at.
#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

// From Python's stable interface. They are declared here, because not every machine has Python's headers.
typedef struct _object PyObject;
extern "C" {
PyObject* PyList_GetItem(PyObject* list, ssize_t place);
ssize_t PyList_Size(PyObject* list);
int PyDict_Next(PyObject* dict, ssize_t* place, PyObject** key, PyObject** value);
PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
void* PyLong_AsVoidPtr(PyObject* number);
void Py_DecRef(PyObject* object);
void PyErr_Clear();
}

namespace {

using Object = c10::TensorImpl;  // what is behind a tensor of Python's

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
  std::vector<PyObject*> held;   // values, and what their state holds; the caller keeps all of it
  std::vector<Object*> objects;  // behind each; null: it is no tensor
  std::vector<bool> waits;       // of values, which come first
  std::vector<Layout> layouts;
  std::vector<int64_t> numbers;
  std::vector<at::Tensor> gradients;  // of this step, whose memory has to stay
  std::vector<PyObject*> entries;     // of the last step, to ask for them early; never read

  void add(Object* tensor) {
    if (!tensor || tensor->layout() != c10::kStrided || !tensor->has_storage()) return layouts.push_back({});
    const auto sizes = tensor->sizes(), strides = tensor->strides();
    int64_t last = 0;
    for (size_t n = 0; n < sizes.size(); n++) last += (sizes[n] - 1) * strides[n];
    layouts.push_back({true, tensor->mutable_data(), tensor->device_type(), tensor->dtype(), sizes.size(),
                       numbers.size(), tensor->is_empty() ? 0 : (last + 1) * tensor->itemsize(),
                       tensor->unsafe_storage().unsafeGetStorageImpl()});
    numbers.insert(numbers.end(), sizes.begin(), sizes.end());
    numbers.insert(numbers.end(), strides.begin(), strides.end());
  }

  Found find(PyObject* lists, PyObject* state, PyObject* behind, void** addresses) {
    release();
    if (!hold_the_same(lists, state)) return PyErr_Clear(), REPLACED;  // an error: they are no lists
    gradients.resize(waits.size());
    Found found = ALL;
    for (size_t n = 0, alive = 0; n < objects.size(); n++) {
      for (; alive < std::min(n + 4 * APART, objects.size()); alive++) {
        if (objects[alive] && address_behind(held[alive], behind) != objects[alive]) return REPLACED;
        ask(objects[alive], 4), ask(layouts[alive].beside, 2);
      }
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

  // Whether groups' lists of values and the state hold what they held. Then all of it is alive.
  bool hold_the_same(PyObject* lists, PyObject* state) {
    size_t n = 0, count = 0;
    const auto is_next = [&](PyObject* object) {
      if (n == held.size()) return false;
      ask(held[n], 2), ask(layouts[n].beside, 1);  // early: to find where a page lies takes longest
      return object == held[n++];
    };
    for (ssize_t group = 0; group < PyList_Size(lists); group++) {
      PyObject* const list = PyList_GetItem(lists, group);
      for (ssize_t place = 0, size = PyList_Size(list); place < size; place++)
        if (!is_next(PyList_GetItem(list, place))) return false;
    }
    PyObject *key, *entry, *value;
    for (ssize_t place = 0; PyDict_Next(state, &place, &key, &entry); count++) {
      entries.resize(std::max(entries.size(), count + 1));
      entries[count] = entry;
      ask(entries[std::min(count + APART, entries.size() - 1)], 1);
      for (ssize_t within = 0; PyDict_Next(entry, &within, &key, &value);)
        if (!is_next(value)) return false;
    }
    return n == held.size();
  }

  // The address of torch's object behind a tensor, which is its attribute `name`. Null, with an error of Python's: none.
  static void* address_behind(PyObject* tensor, PyObject* name) {
    PyObject* const number = PyObject_GetAttr(tensor, name);
    if (!number) return nullptr;
    void* const address = PyLong_AsVoidPtr(number);
    Py_DecRef(number);
    return address;
  }

  // Gradients in several stages, because each object has the address of the next. The values are known to be alive.
  void ask_ahead(size_t n) const {
    const auto ask_later = [&](size_t stages, const auto& of, long lines) {
      if (n + stages * APART < waits.size()) ask(of(*objects[n + stages * APART]), lines);
    };
    const auto gradient = [](const Object& value) { return value.grad().unsafeGetTensorImpl(); };
    ask_later(3, [](const Object& value) { return value.autograd_meta(); }, 2);
    ask_later(2, gradient, 4);
    ask_later(1, [&](const Object& value) { return gradient(value)->unsafe_storage().unsafeGetStorageImpl(); }, 2);
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

// What is held, by Python's addresses, and torch's objects behind it: null for what is no tensor. The first are values,
// as many as there are `waits`: whether a value has had no gradient yet. Null where there is not enough memory.
void* tensors_new(PyObject* const* held, Object* const* objects, long count, const bool* waits,
                  long value_count) noexcept try {
  auto tensors = std::make_unique<Tensors>();
  tensors->held.assign(held, held + count), tensors->objects.assign(objects, objects + count);
  tensors->waits.assign(waits, waits + value_count);
  for (Object* object : tensors->objects) tensors->add(object);
  return tensors.release();
} catch (...) {
  return nullptr;
}

void tensors_free(void* tensors) noexcept { delete static_cast<Tensors*>(tensors); }

// The address of each value's gradient: null for none, and any if it has no elements. `lists` are those of the groups'
// values, `state` is a dict of dicts, and `behind` the name of the attribute that is the address of torch's object.
// REPLACED: an object is another, a tensor has other memory or another layout than it had, or a value that waited has a
// gradient. UNLIKE: a gradient is not laid out as its value, or has no memory.
int tensors_find(void* tensors, PyObject* lists, PyObject* state, PyObject* behind, void** addresses) noexcept try {
  return static_cast<Tensors*>(tensors)->find(lists, state, behind, addresses);
} catch (...) {
  return REPLACED;
}

void tensors_bump_versions(void* tensors, void* const* addresses) noexcept {
  static_cast<Tensors*>(tensors)->bump_versions(addresses);
}

void tensors_release(void* tensors) noexcept { static_cast<Tensors*>(tensors)->release(); }
}
