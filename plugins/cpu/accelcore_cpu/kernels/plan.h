// What one optimizer updates, as tables: sources of memory, the tensors in them, and pieces of tensors.
#pragma once

#include <algorithm>
#include <vector>

#include "memory.h"

constexpr long PIECE = 16384;      // elements: a tensor this small stays in the second cache from pass to pass
constexpr long WAVE = 64 * PIECE;       // elements that are measured before they are updated, unless a tensor has more

// Values, gradients and state laid out alike, and how often they were updated. As Python gives it: 10 words.
struct Source {
  void* value;
  void* state[STATES];
  float* step;  // null: not counted
  Type value_type, state_type, gradient_type;
  int64_t group, first_tensor;
};

// A tensor in a source, and what of it is a row. As Python gives it: 4 words.
struct Tensor {
  int64_t offset, rows, columns;  // in elements of its source
  int64_t projects;
};

// Of a tensor: some whole rows, or a part of one. Pieces are the same however many threads share them, and so is the
// order in which their sums are added.
struct Piece {
  long tensor, source, begin, rows, columns, row, sums;
};

struct Tables {
  std::vector<Source> sources;
  std::vector<Tensor> tensors;
  std::vector<Piece> pieces;
  std::vector<long> first_piece;          // of each tensor, and after the last
  std::vector<long> first_row;            // likewise
  std::vector<long> bundles;              // first pieces of what one thread takes at a time, and after the last
  std::vector<std::pair<long, long>> waves;  // of tensors with several pieces
  long slots = 0, elements = 0;           // for sums; in all

  Tables(const int64_t* source_words, long source_count, const int64_t* tensor_words, long tensor_count) {
    const auto* from = reinterpret_cast<const Source*>(source_words);
    sources.assign(from, from + source_count);
    const auto* parts = reinterpret_cast<const Tensor*>(tensor_words);
    tensors.assign(parts, parts + tensor_count);
    cut();
    bundle();
  }

 private:
  void cut() {
    long source = 0, row = 0;
    for (long number = 0; number < long(tensors.size()); number++) {
      while (source + 1 < long(sources.size()) && sources[source + 1].first_tensor <= number) source++;
      const Tensor& tensor = tensors[number];
      first_piece.push_back(pieces.size());
      first_row.push_back(row);
      row += tensor.rows;
      elements += tensor.rows * tensor.columns;
      if (!tensor.columns) continue;
      const long together = std::max(1L, PIECE / long(tensor.columns));
      for (long first = 0; first < tensor.rows; first += together) {
        const long rows = std::min(together, long(tensor.rows) - first);
        for (long begin = 0; begin < tensor.columns; begin += PIECE) {
          const long columns = std::min(PIECE, long(tensor.columns) - begin);
          pieces.push_back({number, source, tensor.offset + first * tensor.columns + begin, rows, columns, first, slots});
          slots += rows;
        }
      }
    }
    first_piece.push_back(pieces.size());
    first_row.push_back(row);
  }

  void bundle() {
    long held = PIECE;
    for (long piece = 0; piece < long(pieces.size()); piece++) {
      const long size = pieces[piece].rows * pieces[piece].columns;
      if (held + size > PIECE) bundles.push_back(piece), held = 0;
      held += size;
    }
    bundles.push_back(pieces.size());
    long begin = -1, in_wave = 0;
    for (long number = 0; number < long(tensors.size()); number++) {
      if (first_piece[number + 1] - first_piece[number] < 2) continue;
      const long size = tensors[number].rows * tensors[number].columns;
      if (begin < 0 || in_wave + size > WAVE) waves.push_back({number, number}), begin = number, in_wave = 0;
      waves.back().second = number + 1;
      in_wave += size;
    }
  }
};
