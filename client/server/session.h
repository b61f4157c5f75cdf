// A client's connection. Its first line says what it wants (client/src/attach.h); the rest are requests,
// which are answered in order, but for those that overtake.
//
// Two threads take turns: one reads, answers what overtakes, and notices the end of the client; the one that
// has read a request works on it and on those that follow meanwhile. Neither waits for a client that does not
// read, but for 5 s for one that does not read its stderr.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/event.h"
#include "base/unique_fd.h"
#include "client/server/served_pool.h"
#include "protocol/framing.h"
#include "protocol/request.h"

namespace cppool::server {

// What a session needs of its server.
class Host {
 public:
  virtual ~Host() = default;
  virtual ServedPools& pools() = 0;
  virtual Json Describe() = 0;  // the answer to `ps`
  virtual void Stop() = 0;      // any thread; does not wait
  virtual bool stopping() const = 0;
  virtual const std::optional<std::string>& launch() const = 0;  // of pools whose client names no launcher
};

class Session : private Caller {
 public:
  // `pid` is the client's; 0: not known. Throws std::system_error.
  Session(Host& host, base::UniqueFd socket, pid_t pid);
  ~Session() override = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void Serve();                 // until the client is gone, or the server stops
  void Wake() { wake_.Set(); }  // any thread: the server stops

 private:
  struct Unwritten {
    std::string text;
    std::size_t written = 0;
    std::size_t left() const { return text.size() - written; }
  };
  struct Item {
    std::optional<Json> id;
    // Or the answer to a line that is no request, or whether the turn is kept from now on.
    std::variant<protocol::Operation, Json, bool> work;
    bool is_run() const;
  };

  std::string Name() const override { return name_; }
  std::string Client() const override { return client_; }
  void TakeStderr(std::string_view line) override;
  void TakeLog(std::string_view line) override;
  bool IsGone() override;
  bool HasGivenUp() override { return given_up_; }

  void Loop();
  std::optional<protocol::LineReader::Line> NextLine();
  bool Receive();  // false: end of file
  void Take(const protocol::LineReader::Line& line);
  void Begin(const std::string& line);  // the first one
  void Push(Item item);
  bool StartWork();  // false: the other thread works, or there is nothing to do
  void Work();
  Json AnswerTo(const Item& item);
  Json Lost(const PoolError& error, const std::optional<Json>& id) const;
  void Cancel(const Json& cancels, const std::optional<Json>& id);
  void Status(const std::optional<Json>& id);

  // Waits while the client reads it; what it has left out then is named in the answer.
  void EndStderr(Json& answer);
  void Send(const Json& answer);
  void SendText(const std::string& text, bool may_be_left_out);
  // False: something is left.
  bool Flush() { return Flush(unsent_, socket_); }
  bool FlushStderr() { return Flush(stderr_, errors_); }
  bool Flush(Unwritten& output, const base::UniqueFd& to);

  Host& host_;
  const base::UniqueFd socket_;
  base::UniqueFd pidfd_, errors_;
  const base::Event wake_;
  const std::string name_, client_;
  client::Attachment wanted_;
  std::shared_ptr<ServedPool> pool_;  // null before the first line
  Turns::Turn kept_;                  // of the thread that works

  std::mutex reading_;  // held by the thread that reads; of the next two lines
  protocol::LineReader lines_{protocol::kMaxRequestBytes};
  bool begun_ = false, over_ = false;
  std::atomic<bool> last_{false}, shut_{false};  // no line follows; those that do are not answered

  std::mutex mutex_;  // of the next four
  std::deque<Item> queue_;
  std::optional<Item> current_;  // what the other thread works on
  bool working_ = false;
  bool ended_cancelled_ = false;       // the one before it
  std::atomic<bool> given_up_{false};  // the current one was cancelled before its turn, or the client is gone

  std::mutex output_;          // of the next three
  Unwritten unsent_, stderr_;  // for socket_; of the daemon, for errors_
  std::size_t left_out_ = 0;   // bytes of stderr, since the last answer
};

}  // namespace cppool::server
