// Memory of tensors in any of four types, seen as blocks of float or double.
//
// Arithmetic is IEEE 754 without contraction: the same operations give the same bits on every machine. A block of the
// type that is computed in is used where it lies; another is converted into a buffer, and back.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

enum Type : int64_t { FLOAT, DOUBLE, BFLOAT16, FLOAT16 };

constexpr long BLOCK = 512;  // elements: what is converted, and computed with while it is in the first cache
constexpr long LINE = 64;    // bytes: of a cache
constexpr int STATES = 3;

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct BFloat16 {
  uint16_t word;
  operator float() const { return bits<float>(uint32_t(word) << 16); }
  static BFloat16 nearest(float value) {
    const uint32_t word = bits<uint32_t>(value);
    const uint32_t rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;  // ties to even
    return {uint16_t(value != value ? 0x7fc0 : rounded)};
  }
};

struct Float16 {
  uint16_t word;
  operator float() const {
    const uint32_t shifted = uint32_t(word & 0x7fff) << 13, exponent = shifted & 0x0f800000;
    const uint32_t normal = shifted + (uint32_t(127 - 15) << 23) + (exponent == 0x0f800000 ? uint32_t(128 - 16) << 23 : 0);
    const float small = bits<float>(shifted + (uint32_t(127 - 15 + 1) << 23)) - bits<float>(uint32_t(127 - 14) << 23);
    return bits<float>((exponent ? normal : bits<uint32_t>(small)) | uint32_t(word & 0x8000) << 16);
  }
  static Float16 nearest(float value) {
    const uint32_t word = bits<uint32_t>(value), size = word & 0x7fffffff, sign = (word ^ size) >> 16;
    const uint32_t infinite = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t normal = (size + (uint32_t(15 - 127) << 23) + 0xfff + ((size >> 13) & 1)) >> 13;  // ties to even
    const uint32_t magic = uint32_t(127 - 15 + 23 - 10 + 1) << 23;  // its last place is that of a subnormal
    const uint32_t small = bits<uint32_t>(bits<float>(size) + bits<float>(magic)) - magic;
    const uint32_t finite = size < uint32_t(127 - 14) << 23 ? small : normal;
    return {uint16_t(sign | (size >= uint32_t(127 + 16) << 23 ? infinite : finite))};
  }
};

template <class T> constexpr Type type_of();
template <> constexpr Type type_of<float>() { return FLOAT; }
template <> constexpr Type type_of<double>() { return DOUBLE; }

template <class T> inline void put(T& place, double value) { place = T(value); }
template <class T> inline void put(T& place, float value) { place = T(value); }
template <> inline void put(BFloat16& place, float value) { place = BFloat16::nearest(value); }
template <> inline void put(Float16& place, float value) { place = Float16::nearest(value); }
template <> inline void put(BFloat16& place, double value) { place = BFloat16::nearest(float(value)); }
template <> inline void put(Float16& place, double value) { place = Float16::nearest(float(value)); }

template <class From, class To>
inline void convert(const From* __restrict from, To* __restrict to, long size) {
  for (long i = 0; i < size; i++) put(to[i], typename std::conditional<std::is_same<From, double>::value, double, float>::type(from[i]));
}

// Asks for `size` bytes from the element `offset` of a tensor on.
inline void prefetch(const void* tensor, Type type, long offset, long size) {
  const long element = type == DOUBLE ? 8 : type == FLOAT ? 4 : 2;
  const char* const from = static_cast<const char*>(tensor) + offset * element;
  for (long n = 0; n < size; n += 64) __builtin_prefetch(from + n);
}

// Elements from `offset` of a tensor, as T, where whole lines can be read and written.
template <class T>
T* read(const void* tensor, Type type, long offset, long size, T* buffer) {
  constexpr long line = LINE / sizeof(T);
  if (type == type_of<T>() && size % line == 0) return (T*)tensor + offset;
  for (long i = size; i % line != 0; i++) buffer[i] = 0;
  switch (type) {
    case FLOAT: convert((const float*)tensor + offset, buffer, size); break;
    case DOUBLE: convert((const double*)tensor + offset, buffer, size); break;
    case BFLOAT16: convert((const BFloat16*)tensor + offset, buffer, size); break;
    case FLOAT16: convert((const Float16*)tensor + offset, buffer, size); break;
  }
  return buffer;
}

// The reverse of `read`, given what that returned.
template <class T>
void write(void* tensor, Type type, long offset, long size, const T* values) {
  if (type == type_of<T>() && values == (T*)tensor + offset) return;
  switch (type) {
    case FLOAT: convert(values, (float*)tensor + offset, size); break;
    case DOUBLE: convert(values, (double*)tensor + offset, size); break;
    case BFLOAT16: convert(values, (BFloat16*)tensor + offset, size); break;
    case FLOAT16: convert(values, (Float16*)tensor + offset, size); break;
  }
}
