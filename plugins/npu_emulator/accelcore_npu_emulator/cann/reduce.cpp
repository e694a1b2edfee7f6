// Reductions, as the device does them: two arrays at a time, each result rounded to the element's type.
#include "communicator.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

struct Half {
  uint16_t bits;

  static float widen(Half half) {
    uint32_t sign = uint32_t(half.bits & 0x8000) << 16, exponent = half.bits >> 10 & 0x1f, mantissa = half.bits & 0x3ff;
    if (exponent == 0) return float_of(bits_of(std::ldexp(float(mantissa), -24)) | sign);
    uint32_t wide = exponent == 0x1f ? 0xff : exponent + (127 - 15);
    return float_of(sign | wide << 23 | mantissa << 13);
  }

  static Half narrow(float value) {
    uint32_t all = bits_of(value), magnitude = all & 0x7fffffff;
    uint16_t sign = uint16_t(all >> 16 & 0x8000), result;
    if (magnitude > 0x7f800000) {
      result = 0x7e00;  // NaN
    } else if (magnitude >= 0x47800000) {
      result = 0x7c00;  // 2^16 and above: infinity
    } else if (magnitude < 0x38800000) {
      // Below 2^-14, subnormal: adding 0.5 leaves the rounded mantissa in the lowest bits.
      result = uint16_t(bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
    } else {
      uint32_t odd = magnitude >> 13 & 1;  // ties go to even
      result = uint16_t((magnitude - (uint32_t(127 - 15) << 23) + 0xfff + odd) >> 13);
    }
    return {uint16_t(sign | result)};
  }
};

struct BFloat16 {
  uint16_t bits;

  static float widen(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }

  static BFloat16 narrow(float value) {
    if (std::isnan(value)) return {0x7fc0};
    uint32_t all = bits_of(value);
    return {uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16)};
  }
};

template <class T>
struct Same {
  T value;
  static T widen(Same same) { return same.value; }
  static Same narrow(T value) { return {value}; }
};

template <class Element, class Combine>
void combine(void *into, const void *from, size_t count, Combine op) {
  Element *left = static_cast<Element *>(into);
  const Element *right = static_cast<const Element *>(from);
  for (size_t i = 0; i < count; i++) {
    left[i] = Element::narrow(op(Element::widen(left[i]), Element::widen(right[i])));
  }
}

template <class Element>
bool reduce(void *into, const void *from, size_t count, HcclReduceOp op) {
  using T = decltype(Element::widen(Element{}));
  switch (op) {
    case HCCL_REDUCE_SUM: combine<Element>(into, from, count, [](T a, T b) { return T(a + b); }); return true;
    case HCCL_REDUCE_PROD: combine<Element>(into, from, count, [](T a, T b) { return T(a * b); }); return true;
    case HCCL_REDUCE_MAX: combine<Element>(into, from, count, [](T a, T b) { return a > b ? a : b; }); return true;
    case HCCL_REDUCE_MIN: combine<Element>(into, from, count, [](T a, T b) { return a < b ? a : b; }); return true;
    default: return false;
  }
}

}  // namespace

size_t element_size(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64: return 8;
    case HCCL_DATA_TYPE_INT128: return 16;
    default: return 1;
  }
}

bool reduce_into(void *into, const void *from, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return reduce<Same<int8_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_UINT8: return reduce<Same<uint8_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce<Same<int16_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_UINT16: return reduce<Same<uint16_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce<Same<int32_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_UINT32: return reduce<Same<uint32_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_INT64: return reduce<Same<int64_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_UINT64: return reduce<Same<uint64_t>>(into, from, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce<Half>(into, from, count, op);
    case HCCL_DATA_TYPE_BFP16: return reduce<BFloat16>(into, from, count, op);
    case HCCL_DATA_TYPE_FP32: return reduce<Same<float>>(into, from, count, op);
    case HCCL_DATA_TYPE_FP64: return reduce<Same<double>>(into, from, count, op);
    default: return false;
  }
}

}  // namespace emulator
