#include "daemon/forked_child.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>

namespace cppool::daemon {
namespace {

int requests_fd = -1, answers_fd = -1;
thread_local pid_t forking = 0;  // the process that forks

// In the child, before fork() returns there.
void Restrain() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != forking) _exit(0);  // it has ended before
  close(requests_fd);
  close(answers_fd);
  std::signal(SIGTERM, SIG_DFL);  // the daemon's handler would end the daemon
}

}  // namespace

void RestrainForkedChildren(int requests, int answers) {
  requests_fd = requests;
  answers_fd = answers;
  pthread_atfork([] { forking = getpid(); }, nullptr, Restrain);
}

}  // namespace cppool::daemon
