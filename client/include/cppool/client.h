/* The client library for other languages: plain C, JSON text in and out, one shared library
 * (libcppool_client.so) that never loads or calls CUDA. What a pool does, its limits, kill, respawn and
 * forks, is the same as in C++: see cppool/pool.h.
 *
 *     #include <cppool/client.h>
 *     #include <stdio.h>
 *
 *     int main(void) {
 *       cppool_pool* pool = NULL;
 *       char* out = NULL;
 *       cppool_client_status status = cppool_pool_create("{\"world_size\": 2}", NULL, &pool, &out);
 *       if (status == CPPOOL_CLIENT_OK)
 *         status = cppool_pool_ask(pool, "{\"op\": \"run\", \"params\": {\"cp_comm_type\": \"a2a\"}}", &out);
 *       printf("%d %s\n", (int)status, out ? out : "");
 *       cppool_client_free(out);
 *       cppool_pool_free(pool);
 *       return status == CPPOOL_CLIENT_OK ? 0 : 1;
 *     }
 *
 * Text: UTF-8, ended by a zero byte. Arguments belong to the caller and are not kept.
 * Results: every function that can fail returns a status and sets *out to a JSON object, which the caller
 * frees with cppool_client_free. *out is NULL only when there is nothing to say, or no memory to say it.
 * Threads: any thread may call anything; calls on one pool take turns. A pool must not be freed while a call
 * on it goes on. Forks: a child may use the parent's pools: it gets daemons of its own, and leaves the
 * parent's alone. Versions: functions, members and keys are only added. */
#ifndef CPPOOL_CLIENT_H
#define CPPOOL_CLIENT_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cppool_client_status {
  CPPOOL_CLIENT_OK = 0,
  /* There is no answer: the daemon could not start, died, hung or broke the protocol; *out is
   *   {"kind": "start" | "died" | "timeout" | "protocol" | "queue", "error": text for people, which ends with
   * the tail of stderr, "stderr_tail": its last 200 lines, at most 4000 characters, "diagnosis": what the
   * system knew of a daemon that did not answer, or where the ranks of an interrupted call were, or "",
   * "attempts": daemons that were asked, "start": why it did not start (protocol/schema/start.schema.json),
   * "crash": where a case or a library ended it, {"error", "rank", "stage", "case", "library", "stack":
   * functions, innermost first}; absent: unknown, "lost": how the daemons before ended, as of
   * cppool_pool_ask, "flaky": "flaky (timeout at attempt 2)" when two ended differently; absent: nothing} */
  CPPOOL_CLIENT_NO_ANSWER,
  CPPOOL_CLIENT_INVALID,     /* an argument is wrong, and nothing was done; *out is {"error": text} */
  CPPOOL_CLIENT_INTERRUPTED, /* `interrupted` ended the call; *out as for CPPOOL_CLIENT_NO_ANSWER, of the kind
                                "interrupted" */
  CPPOOL_CLIENT_INTERNAL     /* anything else, such as no memory; *out is {"error": text} or NULL */
} cppool_client_status;

/* What a pool calls. Every member may be NULL. They may use another pool. In their own one cppool_pool_ask is
 * an error of the kind CPPOOL_CLIENT_INTERNAL, cppool_pool_stop does nothing, cppool_pool_stderr_tail is
 * NULL; it must not be freed there. */
typedef struct cppool_pool_hooks {
  size_t struct_size; /* sizeof(cppool_pool_hooks); a smaller one is CPPOOL_CLIENT_INVALID */
  void* context;      /* the first argument of the next two, which get a line without its newline */
  void (*on_stderr)(void* context, const char* line,
                    size_t size); /* every line of stderr, on a thread of the pool */
  void (*log)(void* context, const char* line,
              size_t size); /* other lines of stdout, respawns; on the caller's thread */
  /* For a caller with a lock that no wait may hold, such as an interpreter's: `leave` gives it up at the
   * beginning of a call and returns what `enter` needs to take it again at its end. `interrupted` is asked
   * with the lock held, about ten times a second, when a signal handler has run and before `log` is called;
   * not 0: the call ends with CPPOOL_CLIENT_INTERRUPTED, as PoolOptions::interrupted has it.
   * PyEval_SaveThread, PyEval_RestoreThread and PyErr_CheckSignals of CPython are such functions. */
  void* (*leave)(void);
  void (*enter)(void* left);
  int (*interrupted)(void);
} cppool_pool_hooks;

typedef struct cppool_pool cppool_pool;

/* The version of this library, as CPPOOL_VERSION of cppool/version.h; the text belongs to the library. */
const char* cppool_client_version(void);

/* Frees what a function has put into *out; NULL is allowed. */
void cppool_client_free(char* out);

/* Makes a pool, and starts nothing. `options` is a JSON object (NULL: {}) with members of
 * cppool::PoolOptions: world_size, daemon, backend, transport, devices (a list), case_files (a list),
 * sentinel, log_level, python, preload (a list), launch, arguments (a list), environment (an object), attach,
 * retries; and the limits in milliseconds: start_limit_ms, grace_ms, kill_grace_ms, idle_exit_ms,
 * queue_limit_ms. `hooks` (NULL: none) is copied. On success *pool is set and *out is NULL. */
cppool_client_status cppool_pool_create(const char* options, const cppool_pool_hooks* hooks,
                                        cppool_pool** pool, char** out);

/* Sends a request of protocol/README.md: hello, list, run, validate or stats, without an id. On success *out
 * is
 *   {"answer": what the daemon answered, whatever it is, "attempts": daemons that were asked, "flaky": "flaky
 * (passed at attempt 2)" when other daemons died or broke the protocol before it, "lost": list of these, each
 * {"kind": "died" | "protocol", "error", "stderr_tail", "crash"} as above}; the last two are absent when
 * there was one attempt. */
cppool_client_status cppool_pool_ask(cppool_pool* pool, const char* request, char** out);

/* Makes a library for `load` or `kernels` of a request of a source, .cu for the GPUs of the pool's daemon or
 * .cpp, .cc, .cxx, .c for the host, as cppool/compile.h says. `request` is {"source": path,
 * "include_folders": list of paths searched first; may be absent}. On success *out is {"library": path,
 * "command": text, "output": the compiler's warnings, "included": list of paths, "cached": no compiler was
 * run}; a source that does not compile is CPPOOL_CLIENT_INVALID, with the compiler's messages. */
cppool_client_status cppool_pool_compile(cppool_pool* pool, const char* request, char** out);

/* For another thread, while cppool_pool_ask goes on with a `run` or `validate`: ends that soon, with an
 * answer whose failure has the kind "cancelled". On success *out is {"cancelled": true}; false: no such call
 * goes on. CPPOOL_CLIENT_NO_ANSWER: the daemon has not the feature `cancel`. */
cppool_client_status cppool_pool_cancel(cppool_pool* pool, char** out);

/* Likewise: where every rank is now. *out is the protocol's answer to `status`. */
cppool_client_status cppool_pool_status(cppool_pool* pool, char** out);

/* The end of the stderr of the latest daemon, at most 4000 characters; NULL without memory. To be freed with
 * cppool_client_free. */
char* cppool_pool_stderr_tail(cppool_pool* pool);

/* Ends the daemon; the next request starts another. Waits for a call of another thread. */
void cppool_pool_stop(cppool_pool* pool);

/* Ends the calls of other threads as `interrupted` does; any thread. It does not wait for them. */
void cppool_pool_interrupt(cppool_pool* pool);

/* Ends the daemon and frees the pool; NULL is allowed. */
void cppool_pool_free(cppool_pool* pool);

/* The daemon that a pool with these options starts: {"daemon": path}, "" when there is none. */
cppool_client_status cppool_client_find_daemon(const char* options, char** out);

/* The shell command that does the same again: {"command": text}. `options` as for cppool_pool_create,
 * `request` a `run`. */
cppool_client_status cppool_client_command(const char* options, const char* request, char** out);

/* What became of a run, for people: {"text": lines, as Result::Describe() of cppool/pool.h has them}.
 * `result` is what cppool_pool_ask gave for a `run` or `validate`; it may have a "command", which is the last
 * line. */
cppool_client_status cppool_client_describe(const char* result, char** out);

/* The cells of a suite, in the order in which the command runs them. `selection` is {"suite": name or path,
 * "filters": list of "key=value", "max_seqlen": integer}, the last two as the options of `cppool run`; they
 * may be absent. *out is {"cells": [{"name", "suite", "rows", "essential", "world_size", "case", "params"},
 * ...]}. */
cppool_client_status cppool_client_suite(const char* selection, char** out);

#ifdef __cplusplus
}
#endif

#endif
