// Mazes, on one thread; the definition is in Python (envs/tasks/popgym/hunt_and_kill.py).
#include <cmath>

#include "../driver.h"

namespace recurl {
namespace {

class Maze {
 public:
  Maze(int64_t side, char* squares, int64_t stride, char* closed, char* beside)
      : side_(side), squares_(squares), stride_(stride), closed_(closed), beside_(beside) {
    for (int64_t cell = 0; cell < side * side; ++cell) {
      closed_[cell] = 1;
      beside_[cell] = 0;
      neighbors(cell, [&](int64_t) { ++beside_[cell]; });
    }
  }

  // Opens a cell, and the wall to `from`, which may be the cell itself.
  void open(int64_t cell, int64_t from) {
    closed_[cell] = 0;
    neighbors(cell, [&](int64_t other) { --beside_[other]; });
    squares_[square(cell) * stride_] = 0;
    squares_[(square(cell) + square(from)) / 2 * stride_] = 0;
  }

  // Returns one of the closed neighbors of a cell.
  int64_t choose(int64_t cell, double chance) const {
    int64_t left = int64_t(chance * beside_[cell]), found = cell;
    neighbors(cell, [&](int64_t other) {
      if (closed_[other] && left-- == 0) found = other;
    });
    return found;
  }

  bool is_stuck(int64_t cell) const { return beside_[cell] == 0; }

  // Returns one of the open cells with closed neighbors, and takes the trials that finding it needs from `trials`.
  int64_t hunt(double chance, double luck, int64_t* trials) const {
    const int64_t cells = side_ * side_;
    int64_t count = 0, cell = 0;
    for (int64_t other = 0; other < cells; ++other) count += is_end(other);
    *trials -= 1 + int64_t(std::log(1 - luck) / std::log(1 - double(count) / double(cells)));
    for (int64_t left = int64_t(chance * count); !is_end(cell) || left-- > 0;) ++cell;
    return cell;
  }

 private:
  bool is_end(int64_t cell) const { return !closed_[cell] && beside_[cell] > 0; }
  int64_t square(int64_t cell) const { return (2 * (cell / side_) + 1) * (2 * side_ + 1) + 2 * (cell % side_) + 1; }

  // In ascending order.
  template <class Visit>
  void neighbors(int64_t cell, const Visit& visit) const {
    const int64_t column = cell % side_;
    if (cell >= side_) visit(cell - side_);
    if (column > 0) visit(cell - 1);
    if (column < side_ - 1) visit(cell + 1);
    if (cell < side_ * (side_ - 1)) visit(cell + side_);
  }

  int64_t side_;
  char* squares_;
  int64_t stride_;
  char *closed_, *beside_;
};

}  // namespace
}  // namespace recurl

int recurl_native_hunt_and_kill(int64_t side, int64_t rows, const int64_t* starts, const double* chances,
                                int64_t chance_stride, int64_t row_stride, void* squares) {
  return recurl::guarded(RECURL_PORTABLE, [&] {
    const int64_t cells = side * side, width = 2 * side + 1;
    recurl::Memory memory;
    char* closed = static_cast<char*>(memory.space(cells));
    char* beside = static_cast<char*>(memory.space(cells));
    std::memset(squares, 1, width * width * rows);
    for (int64_t row = 0; row < rows; ++row) {
      recurl::Maze maze(side, static_cast<char*>(squares) + row, rows, closed, beside);
      const double* chance = chances + row * row_stride;
      int64_t at = starts[row], trials = width * width;
      maze.open(at, at);
      for (int64_t step = 1; step < cells; ++step, chance += 3 * chance_stride) {
        if (maze.is_stuck(at)) at = maze.hunt(chance[0], chance[chance_stride], &trials);
        if (trials < 0) break;
        const int64_t to = maze.choose(at, chance[2 * chance_stride]);
        maze.open(to, at);
        at = to;
      }
    }
  });
}
