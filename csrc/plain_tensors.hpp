// The tensors among a rank's publications that lie in memory as they are sent, and their parts.
//
// A publication is a tensor, or a tuple or list of a few, or the arguments of a call, of which the
// first is kept. A part is named by picks, in the order in which they are applied: see `Picks`.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nnsight_pp {

using Dims = c10::SmallVector<int64_t, 5>;

// Where a tensor stands in a publication; from 0 on, it is an item of a tuple or list.
constexpr int64_t is_value = -1, is_first_argument = -2;

// What is sent: memory, and how it is read.
struct Plain {
  c10::Storage storage;  // keeps the memory
  char* begin;
  std::size_t size;
  uint8_t dtype;
  Dims sizes;
};

// A part of a tensor, in steps of elements.
struct Part {
  int64_t offset = 0;
  Dims sizes, strides;
};

inline Part whole(const Plain& plain) {
  Part part{0, plain.sizes, Dims(plain.sizes.size())};
  int64_t step = 1;
  for (std::size_t at = part.sizes.size(); at-- > 0; step *= part.sizes[at]) part.strides[at] = step;
  return part;
}

// The picks of a question: numbers, as `lane.question` in Python packs them.
//
// Each pick: how many indices it has, or `first_argument`. Each index: its kind, and three numbers:
// a number (at), or a slice (start, stop, step), with bits for a start and a stop that are left out.
class Picks {
 public:
  enum Kind : int64_t { number = 0, slice = 1, no_start = 2, no_stop = 4 };
  static constexpr int64_t first_argument = -1;

  explicit Picks(std::vector<int64_t> numbers) : numbers_(std::move(numbers)) {}

  bool is_over() const { return at_ >= numbers_.size(); }

  // Take the pick that says which tensor of a publication is meant.
  int64_t take_place(bool is_one_tensor) {
    if (is_over()) return is_value;
    if (numbers_[at_] == first_argument) {
      ++at_;
      return is_first_argument;
    }
    if (is_one_tensor || numbers_[at_] != 1 || left() < 5 || numbers_[at_ + 1] != number) {
      return is_value;
    }
    at_ += 5;
    return numbers_[at_ - 3];
  }

  // Apply the next pick; whether it could be. Python says why not.
  bool apply(Part& part) {
    const int64_t count = numbers_[at_++];
    if (count < 0 || static_cast<std::size_t>(count) > part.sizes.size() ||
        left() < 4 * static_cast<std::size_t>(count)) {
      return false;
    }
    Dims sizes, strides;
    for (int64_t dim = 0; dim < count; ++dim, at_ += 4) {
      const int64_t size = part.sizes[dim], stride = part.strides[dim];
      const int64_t* index = &numbers_[at_];
      if (index[0] == number) {
        const int64_t place = index[1] < 0 ? index[1] + size : index[1];
        if (place < 0 || place >= size) return false;
        part.offset += place * stride;
        continue;
      }
      if (!(index[0] & slice) || index[3] <= 0) return false;
      const auto clamped = [size](int64_t end) {
        return std::clamp<int64_t>(end < 0 ? end + size : end, 0, size);
      };
      const int64_t start = index[0] & no_start ? 0 : clamped(index[1]);
      const int64_t stop = index[0] & no_stop ? size : clamped(index[2]);
      const int64_t length = std::max<int64_t>(stop - start, 0);
      part.offset += start * stride;
      const bool is_many = length > index[3];  // else no step is made, however long
      sizes.push_back(is_many ? (length - 1) / index[3] + 1 : length > 0);
      strides.push_back(is_many ? stride * index[3] : 1);
    }
    sizes.append(part.sizes.begin() + count, part.sizes.end());
    strides.append(part.strides.begin() + count, part.strides.end());
    part.sizes = std::move(sizes);
    part.strides = std::move(strides);
    return true;
  }

 private:
  std::size_t left() const { return numbers_.size() - at_; }

  std::vector<int64_t> numbers_;
  std::size_t at_ = 0;
};

// Return what is sent of `part`: where it lies in one piece it is not copied. Null where it is empty.
inline std::optional<Plain> sent(const Plain& plain, Part part) {
  int64_t count = 1;
  bool is_one_piece = true;
  for (std::size_t at = part.sizes.size(); at-- > 0; count *= part.sizes[at]) {
    is_one_piece = is_one_piece && (part.sizes[at] == 1 || part.strides[at] == count);
  }
  if (count == 0) return std::nullopt;
  int64_t all = 1;
  for (const int64_t size : plain.sizes) all *= size;
  const std::size_t item = plain.size / all, size = item * count;
  char* begin = plain.begin + item * part.offset;
  if (is_one_piece) {
    return Plain{plain.storage, begin, size, plain.dtype, std::move(part.sizes)};
  }
  const auto kind = item == 1   ? at::kByte
                    : item == 2 ? at::kShort
                    : item == 4 ? at::kInt
                    : item == 8 ? at::kLong
                                : at::kComplexDouble;  // only the size counts
  const at::Tensor copy =
      at::from_blob(begin, part.sizes, part.strides, at::TensorOptions().dtype(kind)).contiguous();
  return Plain{copy.storage(), static_cast<char*>(copy.data_ptr()), size, plain.dtype,
               std::move(part.sizes)};
}

// On any thread. No tensor is freed under its lock: it may have a Python object.
class Table {
 public:
  void put(std::string key, int64_t place, const at::Tensor& tensor, uint8_t dtype) {
    Plain plain{tensor.storage(), static_cast<char*>(tensor.data_ptr()), tensor.nbytes(), dtype,
                Dims(tensor.sizes().begin(), tensor.sizes().end())};
    std::lock_guard held(mutex_);
    published_[std::move(key)].emplace_back(place, std::move(plain));
  }
  void drop(const std::string& key) {
    std::unordered_map<std::string, Published>::node_type dropped;
    std::lock_guard held(mutex_);
    dropped = published_.extract(key);
    // `dropped` is freed after the lock.
  }
  // Return what is sent of `key`, or null where Python must tell.
  std::optional<Plain> find(const std::string& key, Picks picks) {
    std::optional<Plain> plain = tensor(key, picks);
    if (!plain || picks.is_over()) return plain;
    Part part = whole(*plain);
    while (!picks.is_over()) {
      if (!picks.apply(part)) return std::nullopt;
    }
    return sent(*plain, std::move(part));
  }
  std::size_t size() {
    std::lock_guard held(mutex_);
    return published_.size();
  }

 private:
  using Published = std::vector<std::pair<int64_t, Plain>>;

  std::optional<Plain> tensor(const std::string& key, Picks& picks) {
    std::lock_guard held(mutex_);
    const auto found = published_.find(key);
    if (found == published_.end()) return std::nullopt;
    const int64_t place = picks.take_place(found->second.front().first == is_value);
    for (const auto& [at, plain] : found->second) {
      if (at == place) return plain;
    }
    return std::nullopt;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, Published> published_;
};

}  // namespace nnsight_pp
