// What ranks write through C's stdio and C++'s iostreams, labelled with the rank: ranks are threads of one
// process and share its stderr, where a line would not show later which rank it is from.
#pragma once

namespace cppool::daemon {

// From here on each line that a thread of a rank writes to stdout, stderr, std::cout, std::cerr or std::clog
// begins with "[rank N] ", and is written when it is complete; what is longer than about 4 KiB is written in
// parts, each as a line. A line that begins with "[rank " has its label already. The output of other threads
// is unchanged, and so is what goes past these streams: write(2), and copies of `stdout` and `stderr` from
// before this call, as the log has one.
//
// A thread belongs to rank N when its name begins with "rank N", as those of the ranks and of the host's
// streams do; a thread that a case starts inherits the name. Call it once, before ranks are started and
// libraries are loaded. Throws std::bad_alloc.
void LabelRankOutput();

// Ends and writes the lines that threads of the rank have begun: on the rank's thread, at the end of its part
// of a case.
void EndLines(int rank);

// The same for all ranks, when the process is about to end. Any thread. Waits neither for a rank nor for the
// reader of stderr: what its pipe has no room for is lost.
void EndAllLines();

}  // namespace cppool::daemon
