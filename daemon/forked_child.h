// Processes that a case forks without exec: they have the daemon's descriptors and handlers, and none of its threads.
#pragma once

namespace cppool::daemon {

// From here on a forked process lets go of the pipes of requests and answers, so that the client sees the daemon's end, takes SIGTERM by
// its default, and is killed with the thread that forked it, at the latest when the daemon ends. Call it once.
void RestrainForkedChildren(int requests, int answers);

}  // namespace cppool::daemon
