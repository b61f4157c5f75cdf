// Moves bytes between the processes of a world on the host backend. It knows nothing of ranks or tensors.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace cppool::kernels {

class HostLink {
 public:
  using Bytes = std::vector<std::byte>;
  // Both are called on threads of the link, the first one for a process's messages in the order of their
  // Send. `lost`: once for each process that has gone; no message of it follows. Neither may throw.
  struct Events {
    std::function<void(int process, Bytes message)> take;
    std::function<void(int process, const std::string& why)> lost;
  };

  virtual ~HostLink() = default;         // drops what has not been sent
  virtual std::string name() const = 0;  // "gloo"
  // Once, before the first Send. What comes earlier waits.
  virtual void Start(Events events) = 0;
  // Any thread. Returns before the bytes are there. To a process that has gone: nothing happens.
  virtual void Send(int process, Bytes message) = 0;
};

// Gives `own` to the other processes, and returns what each has given, by process. Throws RuntimeError.
using Exchange = std::function<std::vector<std::string>(const std::string& own)>;

// Connects this process with the others, by gloo, at the address `own` of this machine. Opens the module
// libcppool_gloo.so: the file that CPPOOL_GLOO_MODULE names, else the first one found beside the program, in
// `../lib` from there, and on the dynamic linker's path. Throws RuntimeError that says what to do.
std::unique_ptr<HostLink> ConnectGloo(int process, int processes, const std::string& own,
                                      const Exchange& exchange);

}  // namespace cppool::kernels
