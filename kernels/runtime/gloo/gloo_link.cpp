// Bytes between processes by gloo's TCP transport. A message is its length (slot 0) and its bytes (slot 1);
// each other process has a thread that receives and one that sends. Both wait without a limit: who waits for
// a rank has the limit (the deadline), and a process that has gone ends the wait.
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "kernels/build_id.h"
#include "kernels/error.h"
#include "kernels/runtime/gloo/gloo_module.h"

namespace cppool::kernels {
namespace {

constexpr std::chrono::milliseconds kConnectLimit{30000};
constexpr std::chrono::hours kNoLimit{24 * 365};
constexpr std::uint64_t kLengthSlot = 0, kBytesSlot = 1;
constexpr std::uint64_t kLongest = std::uint64_t{1} << 40;

// gloo's addresses are bytes: in hexadecimal digits, with a comma between them.
std::string Join(const std::vector<std::vector<char>>& addresses) {
  std::string text;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (i > 0) text += ',';
    for (const char byte : addresses[i]) {
      text += "0123456789abcdef"[static_cast<unsigned char>(byte) >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
  }
  return text;
}

std::vector<char> AddressAt(std::size_t index, std::string_view text) {
  for (; index > 0 && text.find(',') != std::string_view::npos; --index)
    text.remove_prefix(text.find(',') + 1);
  text = text.substr(0, text.find(','));
  std::vector<char> address(text.size() / 2);
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (std::size_t i = 0; i < address.size(); ++i)
    address[i] = static_cast<char>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  if (index > 0 || address.empty() || text.find_first_not_of("0123456789abcdef") != std::string_view::npos)
    throw RuntimeError(CPPOOL_INTERNAL, "another process gave no address of gloo");
  return address;
}

class GlooLink final : public HostLink {
 public:
  GlooLink(int process, int processes, const std::string& own, const Exchange& exchange) {
    gloo::transport::tcp::attr attr(own.c_str());
    device_ = gloo::transport::tcp::CreateDevice(attr);
    context_ = device_->createContext(process, processes);
    context_->setTimeout(kConnectLimit);
    std::vector<std::vector<char>> addresses(At(processes));
    for (int other = 0; other < processes; ++other) {
      if (other == process) continue;
      addresses[At(other)] = context_->createPair(other)->address().bytes();
    }
    const std::vector<std::string> all = exchange(Join(addresses));
    for (int other = 0; other < processes; ++other) {
      if (other == process) continue;
      context_->getPair(other)->connect(AddressAt(At(process), all.at(At(other))));
      others_.push_back(std::make_unique<Other>());
      others_.back()->process = other;
    }
    context_->setTimeout(kNoLimit);
  }

  ~GlooLink() override {
    for (const auto& other : others_) {
      const std::lock_guard lock(other->mutex);
      other->stop = true;
      other->changed.notify_all();
      if (other->receives) other->receives->abortWaitRecv();
      if (other->sends) other->sends->abortWaitSend();
    }
    for (const auto& other : others_) {
      if (other->sender.joinable()) other->sender.join();
      if (other->receiver.joinable()) other->receiver.join();
      context_->getPair(other->process)->close();
    }
  }

  std::string name() const override { return "gloo"; }

  void Start(Events events) override {
    events_ = std::move(events);
    for (const auto& other : others_) {
      other->receiver = std::thread([this, &other = *other] { Receive(other); });
      other->sender = std::thread([this, &other = *other] { SendAll(other); });
    }
  }

  void Send(int process, Bytes message) override {
    for (const auto& other : others_) {
      if (other->process != process) continue;
      const std::lock_guard lock(other->mutex);
      if (other->lost) return;
      other->queue.push_back(std::move(message));
      other->changed.notify_all();
    }
  }

 private:
  struct Other {
    int process = 0;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Bytes> queue;
    bool stop = false, lost = false;
    gloo::transport::UnboundBuffer *receives = nullptr, *sends = nullptr;  // that are waited for
    std::thread receiver, sender;
  };

  static std::size_t At(int process) { return static_cast<std::size_t>(process); }

  // False: the link ends. Throws what gloo throws when the process has gone.
  bool Transfer(Other& other, gloo::transport::UnboundBuffer* Other::*waits, void* data, std::size_t bytes,
                std::uint64_t slot) {
    const auto buffer = context_->createUnboundBuffer(data, bytes);
    const bool receives = waits == &Other::receives;
    {
      const std::lock_guard lock(other.mutex);
      if (other.stop) return false;
      other.*waits = buffer.get();
    }
    const auto end = [&] {
      const std::lock_guard lock(other.mutex);
      other.*waits = nullptr;
    };
    try {
      if (receives)
        buffer->recv(other.process, slot);
      else
        buffer->send(other.process, slot);
      const bool done = receives ? buffer->waitRecv(kNoLimit) : buffer->waitSend(kNoLimit);
      end();
      return done;
    } catch (...) {
      end();
      throw;
    }
  }

  void Receive(Other& other) {
    pthread_setname_np(pthread_self(), "gloo receive");
    try {
      for (;;) {
        std::uint64_t length = 0;
        if (!Transfer(other, &Other::receives, &length, sizeof(length), kLengthSlot)) return;
        if (length > kLongest)
          throw RuntimeError(CPPOOL_INTERNAL, "a message of " + std::to_string(length) + " bytes");
        Bytes bytes(length);
        if (length > 0 && !Transfer(other, &Other::receives, bytes.data(), length, kBytesSlot)) return;
        events_.take(other.process, std::move(bytes));
      }
    } catch (const std::exception& error) {
      Lose(other, error.what());
    }
  }

  void SendAll(Other& other) {
    pthread_setname_np(pthread_self(), "gloo send");
    try {
      for (;;) {
        Bytes bytes;
        {
          std::unique_lock lock(other.mutex);
          other.changed.wait(lock, [&] { return other.stop || other.lost || !other.queue.empty(); });
          if (other.stop || other.lost) return;
          bytes = std::move(other.queue.front());
          other.queue.pop_front();
        }
        std::uint64_t length = bytes.size();
        if (!Transfer(other, &Other::sends, &length, sizeof(length), kLengthSlot)) return;
        if (length > 0 && !Transfer(other, &Other::sends, bytes.data(), length, kBytesSlot)) return;
      }
    } catch (const std::exception& error) {
      Lose(other, error.what());
    }
  }

  void Lose(Other& other, const std::string& why) {
    {
      const std::lock_guard lock(other.mutex);
      if (other.stop || other.lost) return;
      other.lost = true;
      other.queue.clear();
      other.changed.notify_all();
    }
    events_.lost(other.process, why);
  }

  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<std::unique_ptr<Other>> others_;
  Events events_;
};

std::unique_ptr<HostLink> Connect(int process, int processes, const std::string& own,
                                  const Exchange& exchange) try {
  return std::make_unique<GlooLink>(process, processes, own, exchange);
} catch (const RuntimeError&) {
  throw;
} catch (const std::exception& error) {
  throw RuntimeError(CPPOOL_INTERNAL, std::string("gloo could not connect the processes: ") + error.what());
}

}  // namespace
}  // namespace cppool::kernels

extern "C" [[gnu::visibility("default")]] const cppool::kernels::GlooModule* cppool_gloo_module() {
  static const cppool::kernels::GlooModule module = {cppool::kernels::SeamId(), cppool::kernels::Connect};
  return &module;
}
