// Optimizers that treat each element alike. The formulas are those of accelcore/optim/formulas, where they are explained.
#pragma once

#include "rule.h"

struct SGD : Rule {
  double lr, momentum, dampening;
  bool nesterov;

  explicit SGD(Options next) {
    lr = next, decay = next, maximizes = next, momentum = next, dampening = next, nesterov = next;
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T lr = T(this->lr), momentum = T(this->momentum), share = T(1 - dampening);
    block.each([&](const Line<T>& at) {
      const Lanes<T> g = at.gradient();
      if (momentum == 0) {
        at.value() -= lr * g;
        return;
      }
      const Lanes<T> before = at.state(0);
      Lanes<T> now = momentum * before + share * g;
      if (share != 1) now = before != before ? g : now;  // nan: the first gradient, not dampened
      at.state(0) = now;
      at.value() -= lr * (nesterov ? g + momentum * now : now);
    });
  }
  FOR_BOTH_TYPES(compute)
};

// Adam and AdamW.
struct Adam : Rule {
  double beta1, beta2, eps, shrink, rate, root;
  bool amsgrad;

  Adam(Options next, double step) {
    const double lr = next, weight_decay = next;
    maximizes = next, beta1 = next, beta2 = next, eps = next, amsgrad = next;
    const bool decoupled = next;
    shrink = decoupled ? 1 - lr * weight_decay : 1;
    decay = decoupled ? 0 : weight_decay;
    rate = lr / (1 - std::pow(beta1, step)), root = 1 / std::sqrt(1 - std::pow(beta2, step));
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T rate = T(this->rate), root = T(this->root), eps = T(this->eps), shrink = T(this->shrink);
    const T toward1 = T(1 - beta1), beta2 = T(this->beta2), share2 = T(1 - this->beta2);
    block.each([&](const Line<T>& at) {
      const Lanes<T> g = at.gradient(), m = at.state(0) = toward<Lanes<T>>(at.state(0), g, toward1);
      Lanes<T> v = at.state(1) = beta2 * at.state(1) + share2 * g * g;
      if (amsgrad) {
        const Lanes<T> largest = at.state(2);
        v = at.state(2) = (v > largest) | (v != v) ? v : largest;
      }
      at.value() = at.value() * shrink - rate * m / (sqrt(v) * root + eps);
    });
  }
  FOR_BOTH_TYPES(compute)
};

struct Adadelta : Rule {
  double lr, rho, eps;

  explicit Adadelta(Options next) { lr = next, decay = next, maximizes = next, rho = next, eps = next; }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T lr = T(this->lr), rho = T(this->rho), share = T(1 - this->rho), eps = T(this->eps);
    block.each([&](const Line<T>& at) {
      const Lanes<T> g = at.gradient(), v = at.state(0) = rho * at.state(0) + share * g * g;
      const Lanes<T> delta = sqrt((at.state(1) + eps) / (v + eps)) * g;
      at.state(1) = rho * at.state(1) + share * delta * delta;
      at.value() -= lr * delta;
    });
  }
  FOR_BOTH_TYPES(compute)
};

// RMSprop and RMSpropTF, which differ in where eps and lr come in.
struct RMSprop : Rule {
  double lr, alpha, momentum, inside, outside, shrink;
  bool centered, lr_in_momentum;

  RMSprop(Options next, bool inner) {
    lr = next;
    const double weight_decay = next;
    maximizes = next, alpha = next;
    const double eps = next;
    momentum = next, centered = next;
    const bool decoupled = next;
    lr_in_momentum = next;
    shrink = decoupled ? 1 - weight_decay : 1, decay = decoupled ? 0 : weight_decay;
    inside = inner ? eps : 0, outside = inner ? 0 : eps;
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T alpha = T(this->alpha), share = T(1 - this->alpha), inside = T(this->inside), outside = T(this->outside);
    const T momentum = T(this->momentum), shrink = T(this->shrink);
    const T first = lr_in_momentum ? T(lr) : T(1), last = lr_in_momentum ? T(1) : T(lr);
    block.each([&](const Line<T>& at) {
      const Lanes<T> g = at.gradient(), v = at.state(0) = alpha * at.state(0) + share * g * g;
      Lanes<T> square = v;
      if (centered) {
        const Lanes<T> m = at.state(2) = toward<Lanes<T>>(at.state(2), g, share);
        square = v - m * m;
      }
      Lanes<T> update = first * (g / (sqrt(square + inside) + outside));
      if (momentum != 0) update = at.state(1) = momentum * at.state(1) + update;
      at.value() = at.value() * shrink - last * update;
    });
  }
  FOR_BOTH_TYPES(compute)
};

struct BertAdam : Rule {
  enum Schedule { CONSTANT, COSINE, LINEAR, POLY };
  double rate, b1, b2, e, weight_decay;

  BertAdam(Options next, double step) {
    const double lr = next;
    weight_decay = next, b1 = next, b2 = next, e = next, clip = next;
    const double warmup = next, t_total = next;
    const int schedule = next;
    rate = lr * (t_total == -1 ? 1 : factor(schedule, (step - 1) / t_total, warmup));
  }
  static double factor(int schedule, double progress, double warmup) {
    if (progress < warmup) return progress / warmup;
    switch (schedule) {
      case COSINE: return 0.5 * (1 + std::cos(M_PI * std::fmin(progress, 1)));
      case LINEAR: return std::fmax((progress - 1) / (warmup - 1), 0);
      case POLY: return std::sqrt(std::fmax(1 - progress, 0));
      default: return 1;
    }
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T rate = T(this->rate), e = T(this->e), weight_decay = T(this->weight_decay);
    const T toward1 = T(1 - b1), b2 = T(this->b2), share2 = T(1 - this->b2);
    block.each([&](const Line<T>& at) {
      const Lanes<T> g = at.gradient(), m = at.state(0) = toward<Lanes<T>>(at.state(0), g, toward1);
      const Lanes<T> v = at.state(1) = b2 * at.state(1) + share2 * g * g;
      at.value() -= rate * plus<Lanes<T>>(m / (sqrt(v) + e), weight_decay, at.value());
    });
  }
  FOR_BOTH_TYPES(compute)
};
