// The little JSON that is written for Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace emulator::json {

inline std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += char(c);
    } else if (c < 0x20) {
      char escape[8];
      snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += char(c);
    }
  }
  return out + "\"";
}

// Python's json reads NaN and the infinities by these names.
inline std::string number(float value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char text[32];
  snprintf(text, sizeof text, "%.9g", value);
  return text;
}

inline std::string number(int64_t value) { return std::to_string(value); }

template <class T, class Text>
std::string list(size_t count, const T *values, Text text) {
  std::string out;
  for (size_t i = 0; i < count; i++) {
    if (i) out += ',';
    out += text(values[i]);
  }
  return "[" + out + "]";
}

}  // namespace emulator::json
