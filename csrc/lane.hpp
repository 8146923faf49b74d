// Published tensors and parts of them, asked for and answered without the interpreter.
//
// `Table` (plain_tensors.hpp) holds what a rank can answer so. A `Lane` leads to one other stage. Its
// `receive` stands in front of the Python reader: a question for a tensor of the table is answered
// there and then, and an answer wakes the thread that waits for it; every other message is left in
// the frame, for Python. So a pull needs the owner's interpreter no more than gloo does, however long
// its forward keeps the GIL.
//
// Bodies have tags of their own: only the reader posts them, so nothing comes between them, and
// they share no order with what Python sends.
//
// Locks: no mutex is held while a thread waits for the GIL, for gloo, or frees a tensor (which may
// have a Python object).

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plain_tensors.hpp"

namespace nnsight_pp {

using Clock = std::chrono::steady_clock;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// As in parallel/gloo_peer.py.
constexpr std::size_t frame_bytes = 16 * 1024, body_bytes = 1 << 20, most_posted = 64,
                      most_sizes = 64;
enum Tag : int { frames = 0, plain_bodies = 3, plain_large = 4 };

#pragma pack(push, 1)
struct Prefix {
  char magic[4];
  uint8_t kind;
  uint32_t head_length;
  uint64_t length;  // of the head and what follows it
};
// The head of a question: this, the numbers of its picks, and the key in the table.
struct Ask {
  uint64_t ticket;
  int64_t step;
  uint8_t what;
  uint16_t num_picks;
};
// The head of an answer: this, and the sizes.
struct Answer {
  uint64_t ticket;
  uint8_t dtype;
  uint8_t num_sizes;
};
#pragma pack(pop)
constexpr std::size_t room_bytes = frame_bytes - sizeof(Prefix);

const auto bytes_of_cpu = at::TensorOptions().dtype(at::kByte).device(at::kCPU);

at::Tensor memory(std::size_t size) {
  return at::empty({static_cast<int64_t>(size)}, bytes_of_cpu);
}
char* data(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

// An answer that is waited for.
struct Coming {
  bool is_here = false;
  at::Tensor body;
  std::size_t size = 0;
  uint8_t dtype = 0;
  Dims sizes;
};

class Lane {
 public:
  Lane(std::shared_ptr<Table> table, const std::string& group, int rank, char* frame, uint8_t ask,
       uint8_t answer, std::size_t most_bytes)
      : table_(std::move(table)),
        backend_(c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CPU)),
        rank_(rank),
        ask_(ask),
        answer_(answer),
        most_bytes_(most_bytes),
        frame_(at::from_blob(frame, {static_cast<int64_t>(frame_bytes)}, bytes_of_cpu)) {}

  // Keep the answer to `ticket` until it is taken or forgotten.
  void expect(uint64_t ticket) {
    std::lock_guard held(mutex_);
    coming_.try_emplace(ticket);
  }
  // Nobody waits for it any more, or it comes another way.
  void forget(uint64_t ticket) {
    std::unordered_map<uint64_t, Coming>::node_type dropped;
    std::lock_guard held(mutex_);
    dropped = coming_.extract(ticket);
    changed_.notify_all();
  }

  // Post a question.
  void ask(uint64_t ticket, int64_t step, uint8_t what, std::string_view picks,
           std::string_view key) {
    const Ask head{ticket, step, what, static_cast<uint16_t>(picks.size() / sizeof(int64_t))};
    const std::size_t length = sizeof head + picks.size() + key.size();
    const Prefix prefix{{'n', 'n', 'p', 'p'}, ask_, static_cast<uint32_t>(length), length};
    at::Tensor frame = memory(sizeof prefix + prefix.length);
    char* at = data(frame);
    at = std::copy_n(reinterpret_cast<const char*>(&prefix), sizeof prefix, at);
    at = std::copy_n(reinterpret_cast<const char*>(&head), sizeof head, at);
    at = std::copy(picks.begin(), picks.end(), at);
    std::copy(key.begin(), key.end(), at);
    post(std::move(frame), frames);
  }

  // Wait until the answer is here, or forgotten, or `until`; whether one of the first two.
  bool wait(uint64_t ticket, Clock::time_point until) {
    std::unique_lock held(mutex_);
    return changed_.wait_until(held, until, [&] {
      const auto found = coming_.find(ticket);
      return found == coming_.end() || found->second.is_here;
    });
  }
  // Take the answer out, if it is here.
  bool take(uint64_t ticket, Coming& answer) {
    std::lock_guard held(mutex_);
    const auto found = coming_.find(ticket);
    if (found == coming_.end() || !found->second.is_here) return false;
    answer = std::move(found->second);
    coming_.erase(found);
    return true;
  }
  std::size_t num_coming() {
    std::lock_guard held(mutex_);
    return coming_.size();
  }

  // Return when the frame holds a message for Python. Throws where the other stage is lost.
  void receive() {
    if (!expected_) expect_body();
    do {
      post_receive(frame_, frames)->wait();
    } while (is_done());
  }

  // Wait for what was posted, until `stop`: its memory must live as long. It is the only one that
  // waits for a send.
  void sweep() {
    for (bool is_over = false; !is_over;) {
      Works works;
      {
        std::unique_lock held(posted_mutex_);
        is_posted_.wait(held, [&] { return is_stopped_ || is_due_; });
        works.swap(posted_);
        is_due_ = false;
        is_over = is_stopped_;
      }
      for (auto& work : works) work->wait();
    }
  }
  void stop() {
    std::lock_guard held(posted_mutex_);
    is_stopped_ = true;
    is_posted_.notify_all();
  }

  std::atomic<uint64_t> bytes_received = 0, bytes_sent = 0;

 private:
  c10::intrusive_ptr<c10d::Work> post_receive(const at::Tensor& into, int tag) {
    std::vector<at::Tensor> tensors{into};
    return backend_->recv(tensors, rank_, tag);
  }

  void post(at::Tensor message, int tag) {
    bytes_sent += message.nbytes();
    std::vector<at::Tensor> tensors{std::move(message)};
    auto work = backend_->send(tensors, rank_, tag);
    std::lock_guard held(posted_mutex_);
    posted_.push_back(std::move(work));
    // Bodies are not kept until there are many.
    if (tag == frames && posted_.size() <= most_posted) return;
    is_due_ = true;
    is_posted_.notify_all();
  }

  void expect_body() {
    body_ = memory(body_bytes);
    expected_ = post_receive(body_, plain_bodies);
  }

  // Whether the message in the frame is dealt with.
  bool is_done() {
    Prefix prefix;
    std::memcpy(&prefix, data(frame_), sizeof prefix);
    const bool is_whole = std::memcmp(prefix.magic, "nnpp", 4) == 0 &&
                          prefix.head_length <= room_bytes && prefix.head_length <= prefix.length;
    if (!is_whole) return false;
    const char* head = data(frame_) + sizeof prefix;
    if (prefix.kind == ask_ && prefix.head_length > sizeof(Ask)) return answered(prefix, head);
    if (prefix.kind == answer_ && prefix.head_length >= sizeof(Answer)) return taken(prefix, head);
    return false;
  }

  bool answered(const Prefix& asked, const char* at) {
    Ask ask;
    std::memcpy(&ask, at, sizeof ask);
    std::vector<int64_t> picks(ask.num_picks);
    const std::size_t picks_bytes = picks.size() * sizeof(int64_t);
    const std::size_t key_at = sizeof ask + picks_bytes;
    if (key_at > asked.head_length) return false;
    if (picks_bytes) std::memcpy(picks.data(), at + sizeof ask, picks_bytes);
    const auto plain = table_->find(std::string(at + key_at, asked.head_length - key_at),
                                    Picks(std::move(picks)));
    if (!plain || plain->size > most_bytes_) return false;
    bytes_received += asked.length;

    const Answer head{ask.ticket, plain->dtype, static_cast<uint8_t>(plain->sizes.size())};
    const std::size_t sizes_bytes = plain->sizes.size() * sizeof(int64_t);
    const std::size_t head_bytes = sizeof head + sizes_bytes;
    const Prefix prefix{{'n', 'n', 'p', 'p'}, answer_, static_cast<uint32_t>(head_bytes),
                        head_bytes + plain->size};
    const bool is_in_frame = prefix.length <= room_bytes;
    at::Tensor frame = memory(sizeof prefix + (is_in_frame ? prefix.length : head_bytes));
    char* to = data(frame);
    to = std::copy_n(reinterpret_cast<const char*>(&prefix), sizeof prefix, to);
    to = std::copy_n(reinterpret_cast<const char*>(&head), sizeof head, to);
    to = std::copy_n(reinterpret_cast<const char*>(plain->sizes.data()), sizes_bytes, to);
    if (is_in_frame) std::memcpy(to, plain->begin, plain->size);
    if (is_in_frame) {
      post(std::move(frame), frames);
      return true;
    }
    const auto keep = [storage = plain->storage](void*) {};
    at::Tensor body =
        at::from_blob(plain->begin, {static_cast<int64_t>(plain->size)}, keep, bytes_of_cpu);
    if (plain->size <= body_bytes) {
      // Ahead of the frame: its receive is posted, and the reader then wakes once, not twice.
      post(std::move(body), plain_bodies);
      post(std::move(frame), frames);
    } else {
      post(std::move(frame), frames);
      post(std::move(body), plain_large);
    }
    return true;
  }

  bool taken(const Prefix& prefix, const char* at) {
    Answer head;
    std::memcpy(&head, at, sizeof head);
    const std::size_t sizes_bytes = head.num_sizes * sizeof(int64_t);
    const std::size_t size = prefix.length - prefix.head_length;
    const bool is_whole = prefix.head_length == sizeof head + sizes_bytes;
    if (!is_whole || size == 0 || size > most_bytes_) {
      if (prefix.length <= room_bytes) return false;  // Python says so
      throw std::runtime_error("a malformed answer, whose body cannot be told from the next one's");
    }
    bytes_received += prefix.length;

    Coming answer{true, {}, size, head.dtype, Dims(head.num_sizes)};
    std::memcpy(answer.sizes.data(), at + sizeof head, sizes_bytes);
    const bool is_expected = prefix.length > room_bytes && size <= body_bytes;
    if (is_expected) {
      expected_->wait();
      answer.body = std::move(body_);
    } else {
      answer.body = memory(size);
      if (prefix.length > room_bytes) {
        post_receive(answer.body, plain_large)->wait();
      } else {
        std::memcpy(data(answer.body), at + prefix.head_length, size);
      }
    }
    {
      std::lock_guard held(mutex_);
      const uint64_t ticket = head.ticket;  // a copy that is aligned
      const auto found = coming_.find(ticket);
      if (found != coming_.end()) found->second = std::move(answer);  // else it was let go
    }
    changed_.notify_all();
    if (is_expected) expect_body();  // only now: somebody waited
    return true;
  }

  const std::shared_ptr<Table> table_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const int rank_;
  const uint8_t ask_, answer_;
  const std::size_t most_bytes_;

  // The reader's.
  const at::Tensor frame_;  // Python's memory
  at::Tensor body_;
  c10::intrusive_ptr<c10d::Work> expected_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<uint64_t, Coming> coming_;

  std::mutex posted_mutex_;
  std::condition_variable is_posted_;
  Works posted_;
  bool is_due_ = false, is_stopped_ = false;
};

}  // namespace nnsight_pp
