// Python's lists and dicts, compared with what they held. Python would count a reference to each object in them, and so
// write to memory all over the place.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using Object = void*;

// Python's own functions, which lend what they return.
struct Python {
  int (*next)(Object dict, int64_t* position, Object* key, Object* value);  // PyDict_Next
  int64_t (*size)(Object list);                                             // PyList_Size
  Object (*item)(Object list, int64_t number);                              // PyList_GetItem
};

// Some lists, and a dict of dicts, by what is in them. Who asks keeps that alive.
struct Objects {
  Python python;
  std::vector<int64_t> sizes;         // of the lists
  std::vector<Object> items;          // of all of them
  std::vector<Object> entries, kept;  // the dicts in the dict, and what is in all of these

  bool same(const Object* lists, int64_t count, Object dict) const {
    return count == int64_t(sizes.size()) && same_items(lists) && same_entries(dict);
  }

 private:
  bool same_items(const Object* lists) const {
    std::size_t place = 0;
    for (std::size_t n = 0; n < sizes.size(); n++) {
      if (python.size(lists[n]) != sizes[n]) return false;
      for (int64_t item = 0; item < sizes[n]; item++)
        if (python.item(lists[n], item) != items[place++]) return false;
    }
    return true;
  }

  bool same_entries(Object dict) const {
    Object key, entry, value;
    std::size_t place = 0, number = 0;
    for (int64_t at = 0; python.next(dict, &at, &key, &entry); number++) {
      if (number == entries.size() || entry != entries[number]) return false;
      for (int64_t within = 0; python.next(entry, &within, &key, &value); place++)
        if (place == kept.size() || value != kept[place]) return false;
    }
    return number == entries.size() && place == kept.size();
  }
};

}  // namespace

extern "C" {

// Null where there is not enough memory.
void* objects_new(const Python* python, const int64_t* sizes, long list_count, const Object* items,
                  const Object* entries, long entry_count, const Object* kept, long kept_count) noexcept try {
  auto* objects = new Objects{*python};
  objects->sizes.assign(sizes, sizes + list_count);
  for (int64_t size : objects->sizes) objects->items.insert(objects->items.end(), items, items + size), items += size;
  objects->entries.assign(entries, entries + entry_count);
  objects->kept.assign(kept, kept + kept_count);
  return objects;
} catch (...) {
  return nullptr;
}

void objects_free(void* objects) noexcept { delete static_cast<Objects*>(objects); }

// Whether these lists, and this dict of dicts, hold what was given, in that order.
bool objects_same(const void* objects, const Object* lists, long count, Object dict) noexcept {
  return static_cast<const Objects*>(objects)->same(lists, count, dict);
}
}
