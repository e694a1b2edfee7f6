// What an optimizer does in one step with one group's options: the interface between formulas and what drives them.
#pragma once

#include "lanes.h"

// The options of a group, in the order in which a rule asks for them.
struct Options {
  const double* next;
  operator double() { return *next++; }
};

struct Rule {
  double decay = 0;         // share of the value that is added to the gradient first
  bool maximizes = false;   // the gradient's sign is changed before that
  double clip = 0;          // the gradients' largest norm; 0: any
  bool clips_all = false;   // that is the norm over all groups together
  int sums = 0;             // for each row of a tensor; with 0, `update` is all there is to do
  bool looks_back = false;  // `update` needs the gradient again, after `measure`

  virtual ~Rule() = default;
  // Takes the gradient into the moments, and adds to a row's sums.
  virtual void measure(const Block<float>&, double*) const {}
  virtual void measure(const Block<double>&, double*) const {}
  // From the sums of all rows, a number for each, which `update` is given.
  virtual void decide(const double*, long /*rows*/, long /*columns*/, bool /*projects*/, double*) const {}
  virtual void update(const Block<float>&, double row) const = 0;
  virtual void update(const Block<double>&, double row) const = 0;
};

// Makes one template of a rule for both types.
#define FOR_BOTH_TYPES(function)                                                                             \
  void update(const Block<float>& block, double row) const override { function<float>(block, row); }        \
  void update(const Block<double>& block, double row) const override { function<double>(block, row); }
#define MEASURE_BOTH_TYPES(function)                                                                         \
  void measure(const Block<float>& block, double* sums) const override { function<float>(block, sums); }    \
  void measure(const Block<double>& block, double* sums) const override { function<double>(block, sums); }
