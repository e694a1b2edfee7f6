// Arithmetic on lines: 64 bytes of each tensor, which are a line of the cache, and one vector or several.
//
// The vectors are written out, not left to the compiler to find: so each line of memory is asked for once, a while
// before its use, and a sum has the same lanes on every machine.
#pragma once

#include <algorithm>
#include <cmath>

#include "memory.h"

inline long ahead = 512;   // bytes: how far before its use memory is asked for; 0: never. prefetch.cpp measures what is best
constexpr long STRIP = 8;  // lines that are summed in the precision of their type

// Bytes of a vector: as wide as a register, because g++ computes with wider ones in memory.
#if defined(__AVX512F__)
constexpr long VECTOR = 64;
#elif defined(__AVX__)
constexpr long VECTOR = 32;
#else
constexpr long VECTOR = 16;
#endif
constexpr int PARTS = LINE / VECTOR;  // vectors of a line

template <class T>
struct Vector {
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Number;
  typedef T Lanes __attribute__((vector_size(VECTOR)));
  typedef T InMemory __attribute__((vector_size(VECTOR), aligned(sizeof(T)), may_alias));
  typedef Number Numbers __attribute__((vector_size(VECTOR)));
  static constexpr long count = VECTOR / sizeof(T);
};
template <class T>
using Lanes = typename Vector<T>::Lanes;

template <class T>
inline T sqrt(T lanes) {
  for (unsigned lane = 0; lane < VECTOR / sizeof lanes[0]; lane++) lanes[lane] = std::sqrt(lanes[lane]);
  return lanes;
}

// addend + factor * lanes, rounded once, as torch's add(alpha=).
template <class T, class Factor>
inline T plus(T addend, Factor factor, T lanes) {
  for (unsigned lane = 0; lane < VECTOR / sizeof lanes[0]; lane++)
    lanes[lane] = std::fma(factor, lanes[lane], addend[lane]);
  return lanes;
}

// Running means, as torch computes them.
template <class T, class Weight>
inline T toward(T from, T to, Weight weight) {
  return weight < Weight(0.5) ? from + weight * (to - from) : to - (to - from) * (1 - weight);
}

// Lanes that are added to a sum, and which part of a line they are.
template <class T>
struct Addend {
  Lanes<T> lanes;
  int part;
};

// One line of a block, or a part of it. What is read and written is memory.
template <class T>
struct Line {
  typedef typename Vector<T>::InMemory InMemory;
  const long first, count;  // lanes in use: fewer than all, or none, at the end of a tensor
  const int part;
  T *const values, *const gradients, *const *const states, *const directions;
  const T factor, decay;

  InMemory& value() const { return reinterpret_cast<InMemory&>(values[first]); }
  InMemory& state(int number) const { return reinterpret_cast<InMemory&>(states[number][first]); }
  // Keeps the direction of the update for later, if there is memory for it.
  void keep(Lanes<T> direction) const {
    if (directions) reinterpret_cast<InMemory&>(directions[first]) = direction;
  }
  // What was kept; else what `anew` computes.
  template <class Anew>
  Lanes<T> kept(const Anew& anew) const {
    return directions ? Lanes<T>(reinterpret_cast<const InMemory&>(directions[first])) : anew(*this);
  }
  // As a rule wants it.
  Lanes<T> gradient() const {
    const Lanes<T> raw = reinterpret_cast<const InMemory&>(gradients[first]) * factor;
    return decay == 0 ? raw : plus<Lanes<T>>(raw, decay, value());
  }
  // With 0 in the lanes that are not in use.
  Addend<T> in_use(Lanes<T> lanes) const {
    typename Vector<T>::Numbers numbers;
    for (long lane = 0; lane < Vector<T>::count; lane++) numbers[lane] = lane;
    return {numbers < typename Vector<T>::Number(count) ? lanes : Lanes<T>{}, part};
  }
};

// What is worked on in one go. There is memory for whole lines.
template <class T>
struct Block {
  T* value;
  T* gradient;
  T* state[STATES];
  T* direction;     // of the update, where it is kept
  long size;        // elements
  T factor, decay;  // what gradients are multiplied by, and the share of the value that is added to them then
  long ahead;       // bytes: how far before its use memory is asked for; 0: never

  // Calls `visit` with each part of each line. Sums settle after each strip.
  template <class Visit, class... Sums>
  [[gnu::always_inline]] void each(const Visit& visit, Sums&... sums) const {
    constexpr long lanes = Vector<T>::count, line = PARTS * lanes;
    const Block its = *this;  // which cannot be changed by what is written to memory
    for (long first = 0; first < its.size; (sums.settle(), ...)) {
      const long end = std::min(its.size, first + STRIP * line), whole = end - (end - first) % line;
      for (; first < whole; first += line) its.visit_line(visit, first, [](long) { return lanes; });
      if (first < end) its.visit_line(visit, first, [&](long at) { return std::min(lanes, its.size - at); }), first = end;
    }
  }

 private:
  // `count` of a whole line is a constant, by which the compiler leaves the masks of sums out.
  template <class Visit, class Count>
  [[gnu::always_inline]] inline void visit_line(const Visit& visit, long first, const Count& count) const {
    if (ahead) ask(first);
#pragma GCC unroll 4  // all parts, so that sums stay in registers
    for (int part = 0; part < PARTS; part++) {
      const long at = first + part * Vector<T>::count;
      visit(Line<T>{at, count(at), part, value, gradient, state, direction, factor, decay});
    }
  }
  // Always inlined: a call of what only asks would be taken for one of what does nothing, and left out.
  [[gnu::always_inline]] inline void ask(long first) const {
    ask(value, first), ask(gradient, first), ask(state[0], first), ask(state[1], first), ask(state[2], first);
  }
  [[gnu::always_inline]] inline void ask(const T* stream, long first) const {
    if (stream) __builtin_prefetch(reinterpret_cast<const char*>(stream + first) + ahead);
  }
};

// A sum, lane by lane: within a strip in the precision of its type, over strips in double.
template <class T>
class Sum {
 public:
  void operator+=(Addend<T> addend) { recent[addend.part] += addend.lanes; }
  void settle() {
    T its[count];
    std::memcpy(its, recent, sizeof its);
    for (long lane = 0; lane < count; lane++) settled[lane] += its[lane];
    for (Lanes<T>& lanes : recent) lanes = Lanes<T>{};
  }
  double total() const {
    double sum[8] = {};
    for (long lane = 0; lane < count; lane++) sum[lane % 8] += settled[lane];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
  }

 private:
  static constexpr long count = LINE / sizeof(T);
  Lanes<T> recent[PARTS] = {};
  double settled[count] = {};
};

// The sum of the squares of a block's gradients.
template <class T>
double squares(const Block<T>& block) {
  Sum<T> sum;
  block.each([&](const Line<T>& at) {
    const Lanes<T> g = at.gradient();
    sum += at.in_use(g * g);
  }, sum);
  return sum.total();
}
