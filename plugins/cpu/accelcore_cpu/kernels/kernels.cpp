// A step of an optimizer over many tensors, in one call: passes over pieces of them, on several threads.
#include <map>
#include <memory>
#include <string>

#include "elementwise.h"
#include "normed.h"
#include "plan.h"
#include "threads.h"

namespace {

constexpr long BEGINNING = 512;  // bytes of the next piece that are asked for

using MakeRule = Rule* (*)(Options, double step);

// By the registry's names of the optimizers.
const std::map<std::string, MakeRule> RULES = {
    {"adadelta", [](Options next, double) -> Rule* { return new Adadelta(next); }},
    {"adam", [](Options next, double step) -> Rule* { return new Adam(next, step); }},
    {"adamp", [](Options next, double step) -> Rule* { return new AdamP(next, step); }},
    {"adamw", [](Options next, double step) -> Rule* { return new Adam(next, step); }},
    {"bertadam", [](Options next, double step) -> Rule* { return new BertAdam(next, step); }},
    {"lamb", [](Options next, double) -> Rule* { return new Lamb(next); }},
    {"rmsprop", [](Options next, double) -> Rule* { return new RMSprop(next, false); }},
    {"rmsproptf", [](Options next, double) -> Rule* { return new RMSprop(next, true); }},
    {"sgd", [](Options next, double) -> Rule* { return new SGD(next); }},
};

// What of a piece a pass touches.
struct Access {
  bool gradient, reads, writes_state, writes_value;
};
constexpr Access EVERYTHING{true, true, true, true}, GRADIENTS{true, false, false, false};

class Plan {
 public:
  Plan(const char* name, Fork fork, Tables&& given)
      : make_rule(RULES.at(name)), fork(fork), tables(std::move(given)) {
    rules.resize(tables.sources.size());
    factors.resize(tables.sources.size());
    numbers.resize(tables.first_row.back());
  }

  void step(void* const* given, const double* options, long stride, double scale, int allowed) {
    gradients = given, grad_scale = scale, threads = tables.elements < 2 * PIECE ? 1 : allowed;
    made.clear();
    bool clips = false;
    int needed = 0;
    for (size_t n = 0; n < rules.size(); n++) {
      const Source& source = tables.sources[n];
      rules[n] = nullptr, factors[n] = 1;
      if (!gradients[n]) continue;
      const float count = source.step ? *source.step += 1 : 0;
      auto& rule = made[{source.group, count}];
      if (!rule) rule.reset(make_rule(Options{options + source.group * stride}, count));
      rules[n] = rule.get();
      clips = clips || rule->clip > 0;
      needed = rule->sums;
    }
    sums.resize(tables.slots * std::max(needed, clips ? 1 : 0));
    if (clips) find_factors(), grad_scale = 1;
    if (needed) return update_by_norms();
    visit_bundles(EVERYTHING, [&](const Piece& piece) {
      const Rule& rule = *rules[piece.source];
      walk(piece, EVERYTHING, [&](const auto& block, long) { rule.update(block, 0); });
    });
  }

 private:
  const MakeRule make_rule;
  const Fork fork;
  const Tables tables;
  std::map<std::pair<long, float>, std::unique_ptr<Rule>> made;  // by group and number of steps
  std::vector<const Rule*> rules;                                // by source; null where there is no gradient
  std::vector<double> factors;                                   // by source: what clipping multiplies gradients by
  std::vector<double> sums, numbers;                             // by slot of a piece; by row of a tensor
  void* const* gradients = nullptr;
  double grad_scale = 1;  // what gradients are divided by; 1 if they were divided already
  int threads = 1;

  bool whole(const Piece& piece) const {
    return tables.first_piece[piece.tensor + 1] - tables.first_piece[piece.tensor] == 1;
  }

  template <class Visit>
  void visit_bundles(Access access, const Visit& visit) {
    parallel(fork, threads, long(tables.bundles.size()) - 1, false, [&](long bundle) {
      for (long n = tables.bundles[bundle]; n < tables.bundles[bundle + 1]; n++) {
        if (n + 1 < long(tables.pieces.size())) ask_for_beginning(tables.pieces[n + 1], access);
        if (rules[tables.pieces[n].source]) visit(tables.pieces[n]);
      }
    });
  }

  // A piece's blocks ask for what comes later in it; its beginning is asked for while the one before is worked on.
  void ask_for_beginning(const Piece& piece, Access access) const {
    const Source& source = tables.sources[piece.source];
    const long size = std::min(BEGINNING, piece.rows * piece.columns * 4);
    void* const gradient = gradients[piece.source];
    if (gradient) prefetch(gradient, source.gradient_type, piece.begin, size);
    if (!access.reads) return;
    prefetch(source.value, source.value_type, piece.begin, size);
    for (void* state : source.state)
      if (state) prefetch(state, source.state_type, piece.begin, size);
  }

  // Norms of gradients, and what to multiply these by.
  void find_factors() {
    visit_bundles(GRADIENTS, [&](const Piece& piece) {
      double& sum = sums[piece.sums] = 0;
      walk(piece, GRADIENTS, [&](const auto& block, long) { sum += squares(block); });
    });
    std::map<long, double> squares;
    double all = 0;
    for (const Piece& piece : tables.pieces) {
      if (!rules[piece.source]) continue;
      squares[tables.sources[piece.source].group] += sums[piece.sums];
      all += sums[piece.sums];
    }
    for (size_t n = 0; n < rules.size(); n++) {
      if (!rules[n] || !(rules[n]->clip > 0)) continue;
      if (rules[n]->clips_all)
        factors[n] = 1 / std::fmax(std::sqrt(all), 1);
      else
        factors[n] = std::fmin(rules[n]->clip / (std::sqrt(squares[tables.sources[n].group]) + 1e-6), 1);
    }
  }

  void update_by_norms() {
    // What is one piece is measured and updated while it is in the cache, and so is the direction of its update.
    visit_bundles(EVERYTHING, [&](const Piece& piece) {
      alignas(LINE) char directions[PIECE * sizeof(double) + LINE];
      if (whole(piece)) measure(piece, directions), decide(piece.tensor), update(piece, directions);
    });
    for (const auto& wave : tables.waves) {
      const long first = tables.first_piece[wave.first], last = tables.first_piece[wave.second];
      const auto pass = [&](bool backwards, const auto& visit) {
        parallel(fork, threads, last - first, backwards, [&](long n) {
          const Piece& piece = tables.pieces[first + n];
          if (rules[piece.source] && !whole(piece)) visit(piece);
        });
      };
      pass(false, [&](const Piece& piece) { measure(piece, nullptr); });
      for (long tensor = wave.first; tensor < wave.second; tensor++) {
        const long its = tables.first_piece[tensor];
        if (tables.first_piece[tensor + 1] - its > 1 && rules[tables.pieces[its].source]) decide(tensor);
      }
      pass(true, [&](const Piece& piece) { update(piece, nullptr); });  // what was read last is still in a cache
    }
  }

  // Directions are kept for `update` in the memory given; with null, it computes them anew.
  void measure(const Piece& piece, void* directions) {
    const Rule& rule = *rules[piece.source];
    double* const its = &sums[piece.sums * rule.sums];
    std::fill(its, its + piece.rows * rule.sums, 0.0);
    walk(piece, {true, true, true, false},
         [&](const auto& block, long row) { rule.measure(block, its + row * rule.sums); }, directions);
  }

  void decide(long number) {
    const Tensor& tensor = tables.tensors[number];
    const Piece* const pieces = &tables.pieces[tables.first_piece[number]];
    const long count = tables.first_piece[number + 1] - tables.first_piece[number];
    const Rule& rule = *rules[pieces->source];
    double* const its = &sums[pieces->sums * rule.sums];
    const long each = count / tensor.rows;  // above 1: a row has several pieces, and the first takes the sums of all
    for (long row = 0; each > 1 && row < tensor.rows; row++)
      for (int n = 0; n < rule.sums; n++) {
        double sum = 0;
        for (long piece = 0; piece < each; piece++) sum += its[(row * each + piece) * rule.sums + n];
        its[row * rule.sums + n] = sum;
      }
    rule.decide(its, tensor.rows, tensor.columns, tensor.projects, &numbers[tables.first_row[number]]);
  }

  void update(const Piece& piece, void* directions) {
    const Rule& rule = *rules[piece.source];
    const double* const its = &numbers[tables.first_row[piece.tensor] + piece.row];
    walk(piece, {rule.looks_back, true, false, true},
         [&](const auto& block, long row) { rule.update(block, its[row]); }, directions, /*again=*/true);
  }

  template <class Visit>
  void walk(const Piece& piece, Access access, const Visit& visit, void* directions = nullptr, bool again = false) {
    if (tables.sources[piece.source].value_type == DOUBLE)
      walk_as(piece, access, visit, static_cast<double*>(directions), again);
    else
      walk_as(piece, access, visit, static_cast<float*>(directions), again);
  }

  template <class T, class Visit>
  void walk_as(const Piece& piece, Access access, const Visit& visit, T* directions, bool again) {
    const Source& source = tables.sources[piece.source];
    const bool direct = source.value_type == type_of<T>() && source.state_type == type_of<T>() &&
                        source.gradient_type == type_of<T>();
    const long whole = direct ? piece.columns & -long(LINE / sizeof(T)) : 0;
    for (long row = 0; row < piece.rows; row++)
      for (long begin = 0, size; begin < piece.columns; begin += size) {
        const long at = row * piece.columns + begin;
        size = std::min(BLOCK, (begin < whole ? whole : piece.columns) - begin);
        Block<T> block = make_block<T>(piece.source, size, access);
        if (directions) block.direction = directions + at;
        block.ahead = begin < whole && !(directions && again) ? ahead : 0;
        const auto its = [&] { visit(block, row); };
        if (begin < whole)
          in_place(piece.source, piece.begin + at, block, access, again, its);
        else
          converted(piece.source, piece.begin + at, block, access, again, its);
      }
  }

  // A block without memory yet.
  template <class T>
  Block<T> make_block(long number, long size, Access access) const {
    const Rule& rule = *rules[number];
    Block<T> block = {};
    block.size = size;
    block.factor = T(rule.maximizes ? -factors[number] : factors[number]);
    block.decay = access.reads ? T(rule.decay) : 0;
    return block;
  }

  // Whole lines where they lie, of tensors that are all of the type T.
  template <class T, class Visit>
  inline void in_place(long number, long at, Block<T>& block, Access access, bool again, const Visit& visit) {
    const Source& source = tables.sources[number];
    if (access.reads) {
      block.value = static_cast<T*>(source.value) + at;
      for (int n = 0; n < STATES; n++)
        if (source.state[n]) block.state[n] = static_cast<T*>(source.state[n]) + at;
    }
    if (access.gradient) {
      block.gradient = static_cast<T*>(gradients[number]) + at;
      if (grad_scale != 1 && !again) unscale(block);
    }
    visit();
  }

  // A copy of what is of any types, as T.
  template <class T, class Visit>
  void converted(long number, long at, Block<T>& block, Access access, bool again, const Visit& visit) {
    const Source& source = tables.sources[number];
    const long size = block.size;
    alignas(LINE) T buffers[2 + STATES][BLOCK];
    if (access.reads) {
      block.value = read(source.value, source.value_type, at, size, buffers[0]);
      for (int n = 0; n < STATES; n++)
        if (source.state[n]) block.state[n] = read(source.state[n], source.state_type, at, size, buffers[2 + n]);
    }
    if (access.gradient) {
      block.gradient = read(gradients[number], source.gradient_type, at, size, buffers[1]);
      if (grad_scale != 1 && !again) {
        unscale(block);
        write(gradients[number], source.gradient_type, at, size, block.gradient);
      }
    }
    visit();
    if (access.writes_value) write(source.value, source.value_type, at, size, block.value);
    for (int n = 0; access.writes_state && n < STATES; n++)
      if (source.state[n]) write(source.state[n], source.state_type, at, size, block.state[n]);
  }

  // In memory, too, as torch's fused kernels do.
  template <class T>
  void unscale(const Block<T>& block) const {
    const T scale = T(grad_scale);
    for (long i = 0; i < block.size; i++) block.gradient[i] /= scale;
  }
};

}  // namespace

extern "C" {

// Null where there is not enough memory.
void* plan_new(const char* name, Fork fork, const int64_t* sources, long source_count, const int64_t* tensors,
               long tensor_count) noexcept try {
  return new Plan(name, fork, Tables(sources, source_count, tensors, tensor_count));
} catch (...) {
  return nullptr;
}

void plan_free(void* plan) noexcept { delete static_cast<Plan*>(plan); }

// False where there is not enough memory.
bool plan_step(void* plan, void* const* gradients, const double* options, long stride, double grad_scale,
               int threads) noexcept try {
  static_cast<Plan*>(plan)->step(gradients, options, stride, grad_scale, threads);
  return true;
} catch (...) {
  return false;
}
}
